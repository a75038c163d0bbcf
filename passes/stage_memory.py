"""Memory of a stage: the one formula that the partitioner searches with and the report prints.

With P the trainable parameter bytes of a stage and w its minibatches in flight (spec section 2):

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

from dataclasses import dataclass
from typing import Any

import numpy as np

from hetpipe_compiler.ir.cluster import DeviceKind
from hetpipe_compiler.passes.chain_tables import ChainTables, IntArray

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


def stage_memory(
    tables: ChainTables, blocks: tuple[int, int], in_flight: int, kind: DeviceKind, rule: MemoryRule
) -> dict[str, int]:
    """Bytes of every part of the stage ``blocks`` on a device of ``kind``, with ``total`` and ``capacity``."""
    parts = {name: int(size) for name, size in _parts(tables, blocks, in_flight, rule).items()}
    parts["pulled"] = 0
    parts["reserve"] = reserve_bytes(tables, kind)
    parts["total"] = sum(parts[name] for name in PARTS)
    parts["capacity"] = kind.memory_bytes
    return parts


def reserve_bytes(tables: ChainTables, kind: DeviceKind) -> int:
    """What of the device's memory is not for the stage."""
    return 0 if tables.resident is not None else kind.reserve_bytes


def total_table(tables: ChainTables, in_flight: int, rule: MemoryRule) -> IntArray:
    """The total without the reserve, for every interval ``[lo, hi]`` at once."""
    parts = list(_parts(tables, ..., in_flight, rule).values())
    return np.asarray(sum(parts[1:], start=parts[0]), dtype=np.int64)


def _parts(tables: ChainTables, at: Any, in_flight: int, rule: MemoryRule) -> dict[str, Any]:
    """The parts that depend on the stage. ``at``: a ``(lo, hi)`` pair, or ``...`` for whole tables."""
    if tables.resident is not None:
        nothing = tables.resident[at] * 0
        return {name: tables.resident[at] if name == "weights" else nothing for name in PARTS[:-2]}
    parameters = tables.parameters[at]
    return {
        "weights": parameters + tables.frozen[at],
        "versions": parameters * (in_flight if in_flight > 1 else 0),
        "gradients": parameters,
        "optimizer": np.ceil(parameters * rule.optimizer_factor).astype(np.int64),
        "own_sums": parameters * rule.own_sums,
        "activations": tables.saved[at] * in_flight,
        "boundary": tables.received[at] * in_flight + tables.returned[at] + tables.sent_back[at],
    }
