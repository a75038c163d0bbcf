"""Memory of a stage: the one formula that the partitioner searches with and the report prints.

With P the trainable parameter bytes of a stage and w its minibatches in flight:

==============  ============================================================================================
part            bytes
==============  ============================================================================================
weights         P + frozen parameters, buffers and constants
versions        w P: a ring of w stashed copies beside the master; none with w = 1, which computes on the master
gradients       P
optimizer       P x optimizer_factor
own_sums        2 P: the wave in progress and the one pushed last; reproducible mode keeps D + 1 waves: (D + 1) P
activations     w x what autograd saves
boundary        w x the forward values received + one copy of the gradients received and sent
pulled          0: pulled weights wait in host memory until the gate applies them
reserve         what the device kind loses to its context and to fragmentation
==============  ============================================================================================

A chain with ``resident`` says a stage's memory itself: then that sum is all there is, and it stands under ``weights``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    "pulled",
    "reserve",
)


@dataclass(frozen=True)
class MemoryRule:
    """What the formula needs beside the stage: the optimizer, and how many sums of its own waves a stage keeps."""

    optimizer_factor: float
    staleness: int = 0
    reproducible: bool = False

    @property
    def own_sums(self) -> int:
        """Sums of own waves that a stage keeps, in multiples of P."""
        return self.staleness + 1 if self.reproducible else 2


def stage_memory(sums: StageSums, in_flight: int, kind: DeviceKind, rule: MemoryRule) -> dict[str, int]:
    """Bytes of every part of a stage on a device of ``kind``, with ``total`` and ``capacity``."""
    parts = _parts(sums, in_flight, rule)
    parts["pulled"] = 0
    parts["reserve"] = kind.reserve_bytes if sums.resident is None else 0
    parts["total"] = sum(parts[name] for name in PARTS)
    parts["capacity"] = kind.memory_bytes
    return parts


def reserve_bytes(chain: BlockChain, kind: DeviceKind) -> int:
    """What of the device's memory is not for the stage."""
    return kind.reserve_bytes if chain.resident is None else 0


def total_bytes(sums: StageSums, in_flight: int, rule: MemoryRule) -> int:
    """The total without the reserve."""
    return sum(_parts(sums, in_flight, rule).values())


def _parts(sums: StageSums, in_flight: int, rule: MemoryRule) -> dict[str, int]:
    if sums.resident is not None:
        return dict.fromkeys(PARTS[:-2], 0) | {"weights": sums.resident}
    parameters = sums.parameters
    return {
        "weights": parameters + sums.frozen,
        "versions": parameters * (in_flight if in_flight > 1 else 0),
        "gradients": parameters,
        "optimizer": math.ceil(parameters * rule.optimizer_factor),
        "own_sums": parameters * rule.own_sums,
        "activations": sums.saved * in_flight,
        "boundary": sums.received * in_flight + sums.returned + sums.sent_back,
    }
