"""Memory of a stage: the one formula that the partitioner searches with and the report prints.

With P the trainable parameter bytes of a stage, w its minibatches in flight and A what autograd saves of one:

==============  ============================================================================================
part            bytes
==============  ============================================================================================
weights         P + frozen parameters, buffers and constants
versions        w P: a ring of w stashed copies beside the master; none with w = 1, which computes on the master
gradients       P
optimizer       P x optimizer_factor
own_sums        the wave in progress and the update being made, 2 P; the wave pushed last too, 3 P, if it may lack an
                answer while the next one begins (see below); reproducible mode keeps D + 1 waves: (D + 2) P
activations     w A; A where the stage recomputes (`hetpipe_compiler.runtime.recompute`)
boundary        w x the forward values received + one copy of the gradients received and sent
replay          where the stage recomputes w x what its forward needs to run again beside the values received: the
                batch on the first stage, buffers that it changes; else 0
workspace       the most that one node needs while it runs, backward or forward; or what the optimizer's step needs
                beyond the A bytes that its minibatch has just set free, if that is more
pulled          on a CPU P, where pulled weights may wait in host memory during a backward; on a GPU 0
reserve         what the device kind loses to its context and to fragmentation
==============  ============================================================================================

The forward that waits for the answer to a push starts, whatever D is, at the latest when the stage has made Nm - w more
updates since the push. With Nm - w = 0 nothing runs in between; with 1 a backward does while the answer may have come;
with 2 or more a backward of the next wave does after an update of it.

The parts do not all peak at once (gradients grow while activations go), so their sum bounds the peak from above.
A chain with ``resident`` says a stage's memory itself: then that sum is all there is, and it stands under ``weights``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from hetpipe_compiler.ir.blocks import BlockChain
from hetpipe_compiler.ir.cluster import DeviceKind
from hetpipe_compiler.passes.stage_sums import StageSums

#: Parts whose sum is ``total``; ``capacity`` is the device's.
PARTS = (
    "weights",
    "versions",
    "gradients",
    "optimizer",
    "own_sums",
    "activations",
    "boundary",
    "replay",
    "workspace",
    "pulled",
    "reserve",
)


class Recompute(str, Enum):
    """Which stages keep their inputs only and run their forward again before their backward.

    None where that saves no memory: with one minibatch in flight, or where a replay needs as much.
    """

    NEVER = "never"
    WHERE_NEEDED = "auto"  # where the device has no room for the stage otherwise
    ALWAYS = "always"


@dataclass(frozen=True)
class MemoryRule:
    """What the formula needs beside the stage: the optimizer, and how many sums of its own waves a stage keeps.

    The factors are those of `BlockChain`. ``recompute`` says which stages recompute.
    """

    optimizer_factor: float
    staleness: int = 0
    reproducible: bool = False
    step_factor: float = 0.0
    loop_factor: float = 0.0
    recompute: Recompute = Recompute.NEVER

    @classmethod
    def of(
        cls,
        chain: BlockChain,
        staleness: int = 0,
        reproducible: bool = False,
        recompute: Recompute = Recompute.NEVER,
    ) -> MemoryRule:
        """The rule for ``chain``'s optimizer."""
        return cls(chain.optimizer_factor, staleness, reproducible, chain.step_factor, chain.loop_factor, recompute)

    def own_sums(self, in_flight: int, nm: int | None) -> int:
        """Sums of own waves that a stage keeps and the update being made, in multiples of P; None: the most."""
        if self.reproducible:
            return self.staleness + 2
        return 3 if nm is None or nm - in_flight > 1 else 2

    def pulls(self, in_flight: int, nm: int | None) -> bool:
        """Whether pulled weights may wait while a backward runs; None: if ever."""
        return self.reproducible or nm is None or nm > in_flight

    def step_bytes(self, parameters: int, largest_parameter: int, *, on_cpu: bool) -> int:
        """What the optimizer's step allocates for a moment."""
        return math.ceil(largest_parameter * self.loop_factor if on_cpu else parameters * self.step_factor)


def stage_memory(
    sums: StageSums,
    in_flight: int,
    kind: DeviceKind,
    rule: MemoryRule,
    nm: int | None = None,
    *,
    recompute: bool | None = None,
) -> dict[str, int]:
    """Bytes of every part of a stage on a device of ``kind``, with ``total`` and ``capacity``.

    ``nm``: minibatches in flight in the virtual worker; None: as many as need most.
    ``recompute``: whether the stage does; None: as ``rule`` says.
    """
    if recompute is None:
        recompute = recomputes(sums, in_flight, kind, rule, nm)
    parts = _parts(sums, in_flight, kind, rule, nm, recompute=recompute)
    parts["reserve"] = kind.reserve_bytes if sums.resident is None else 0
    parts["total"] = sum(parts[name] for name in PARTS)
    parts["capacity"] = kind.memory_bytes
    return parts


def reserve_bytes(chain: BlockChain, kind: DeviceKind) -> int:
    """What of the device's memory is not for the stage."""
    return kind.reserve_bytes if chain.resident is None else 0


def total_bytes(sums: StageSums, in_flight: int, kind: DeviceKind, rule: MemoryRule, nm: int | None = None) -> int:
    """The total without the reserve."""
    return sum(_parts(sums, in_flight, kind, rule, nm, recompute=recomputes(sums, in_flight, kind, rule, nm)).values())


def recomputes(sums: StageSums, in_flight: int, kind: DeviceKind, rule: MemoryRule, nm: int | None = None) -> bool:
    """Whether such a stage recomputes, by ``rule.recompute``; it need not fit even so."""
    if rule.recompute is Recompute.NEVER or in_flight == 1 or sums.resident is not None:
        return False
    plain = sum(_parts(sums, in_flight, kind, rule, nm, recompute=False).values())
    if rule.recompute is Recompute.WHERE_NEEDED and plain <= kind.memory_bytes - kind.reserve_bytes:
        return False
    return sum(_parts(sums, in_flight, kind, rule, nm, recompute=True).values()) < plain


def _parts(
    sums: StageSums, in_flight: int, kind: DeviceKind, rule: MemoryRule, nm: int | None, *, recompute: bool
) -> dict[str, int]:
    if sums.resident is not None:
        return dict.fromkeys(PARTS[:-1], 0) | {"weights": sums.resident}
    parameters = sums.parameters
    step = rule.step_bytes(parameters, sums.largest_parameter, on_cpu=kind.is_cpu)
    return {
        "weights": parameters + sums.frozen,
        "versions": parameters * (in_flight if in_flight > 1 else 0),
        "gradients": parameters,
        "optimizer": math.ceil(parameters * rule.optimizer_factor),
        "own_sums": parameters * rule.own_sums(in_flight, nm),
        "activations": sums.saved * (1 if recompute else in_flight),
        "boundary": sums.received * in_flight + sums.returned + sums.sent_back,
        "replay": sums.replay * in_flight if recompute else 0,
        "workspace": max(sums.workspace, step - sums.saved),
        "pulled": parameters if kind.is_cpu and rule.pulls(in_flight, nm) else 0,
    }
