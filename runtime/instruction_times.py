"""How long the instructions of a stage took: one summary a stage, small enough for the event log."""

from __future__ import annotations

import statistics
from collections import defaultdict

from hetpipe_compiler.ir.schedule import Instruction


class InstructionTimes:
    """Collects milliseconds by operation. The first of each is left out: it warms caches and allocators up."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = defaultdict(list)

    def add(self, instruction: Instruction, ms: float) -> None:
        """An instruction has taken ``ms``."""
        self._times[instruction.op.name.lower()].append(ms)

    def summary(self) -> dict[str, dict[str, float]]:
        """Operation (``forward``, ``backward``, ``update``, ...) -> count, median and quartiles in milliseconds."""
        return {name: _summary(times[1:] if len(times) > 1 else times) for name, times in sorted(self._times.items())}


def _summary(times: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    figures = {"median_ms": median, "low_ms": low, "high_ms": high}
    return {"count": len(times), **{name: round(ms, 4) for name, ms in figures.items()}}
