"""The paper's order of work inside a virtual worker, for comparison with the static program.

Forwards run in minibatch order, and so do backwards; between a runnable forward and a runnable backward the one that
became runnable first runs, the backward on a tie. At most Nm minibatches are in flight. The last stage runs forward and
backward of a minibatch as one task.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hetpipe_compiler.passes.simulate.costs import PipelineCosts

_FORWARD, _BACKWARD = 1, 0  # the smaller wins a tie


@dataclass(frozen=True)
class FifoRun:
    """What a simulated run showed: the peak of minibatches in flight per stage, and each minibatch's end (ms)."""

    in_flight: tuple[int, ...]
    end_ms: tuple[float, ...]


def fifo_in_flight(costs: PipelineCosts, nm: int) -> tuple[int, ...]:
    """Peak number of minibatches between the start of F and the end of B, per stage, when Nm = ``nm``."""
    return simulate_fifo(costs, nm, 12 * len(costs) + 12 * nm).in_flight


def fifo_period_ms(costs: PipelineCosts, nm: int) -> float:
    """Milliseconds per minibatch in the long run: the mean over the middle third of a run, without fill and drain."""
    window = 20 * (len(costs) + nm)
    ends = simulate_fifo(costs, nm, 3 * window).end_ms
    return (ends[2 * window] - ends[window]) / window


def simulate_fifo(costs: PipelineCosts, nm: int, minibatches: int) -> FifoRun:
    """Play ``minibatches`` under the FIFO order."""
    return _Fifo(costs, nm, minibatches).run()


class _Fifo:
    """One simulation. A task is (stage, kind, minibatch)."""

    def __init__(self, costs: PipelineCosts, nm: int, minibatches: int) -> None:
        k = len(costs)
        self.costs, self.nm, self.minibatches = costs, nm, minibatches
        self.last = k - 1
        self.ready: list[list[tuple[float, int, int]]] = [
            [] for _ in range(k)
        ]  # (since, kind, minibatch), a heap a stage
        self.busy = [False] * k
        self.live, self.peak = [0] * k, [0] * k
        self.done_ms: dict[tuple[int, int, int], float] = {}
        self.missing: dict[tuple[int, int, int], int] = {}
        self.since: dict[tuple[int, int, int], float] = {}
        #: (time, order, task, whether it ends; else it becomes ready). The order keeps equal times deterministic.
        self.events: list[tuple[float, int, tuple[int, int, int], bool]] = []
        self.count = 0

    def run(self) -> FifoRun:
        for p in range(1, min(self.nm, self.minibatches) + 1):
            self.unlock((0, _FORWARD, p), 0.0)
        while self.events:
            now = self.events[0][0]
            # Everything that happens at this moment happens before a stage chooses its next task.
            while self.events and self.events[0][0] == now:
                _, _, task, ends = heapq.heappop(self.events)
                if ends:
                    self.finish(task, now)
                else:
                    heapq.heappush(self.ready[task[0]], (now, task[1], task[2]))
            for s in range(len(self.costs)):
                if self.ready[s] and not self.busy[s]:
                    self.start(s, now)
        ends_ms = [max(self.done_ms[s, _BACKWARD, p] for s in range(self.last + 1)) for p in self.all_minibatches()]
        return FifoRun(tuple(self.peak), tuple(ends_ms))

    def all_minibatches(self) -> Iterator[int]:
        return iter(range(1, self.minibatches + 1))

    def push_event(self, at: float, task: tuple[int, int, int], ends: bool) -> None:
        self.count += 1
        heapq.heappush(self.events, (at, self.count, task, ends))

    def start(self, s: int, now: float) -> None:
        _, kind, p = heapq.heappop(self.ready[s])
        self.busy[s] = True
        ms = self.costs.backward_ms[s] if kind == _BACKWARD else self.costs.forward_ms[s]
        if s == self.last:
            ms = self.costs.forward_ms[s] + self.costs.backward_ms[s]
        if kind == _FORWARD:
            self.live[s] += 1
            self.peak[s] = max(self.peak[s], self.live[s])
        self.push_event(now + float(ms), (s, kind, p), ends=True)

    def finish(self, task: tuple[int, int, int], now: float) -> None:
        s, kind, p = task
        self.busy[s] = False
        self.done_ms[task] = now
        if kind == _FORWARD:
            for j in np.flatnonzero(~np.isnan(self.costs.activation_ms[s])):
                self.unlock((int(j), _FORWARD, p), now + float(self.costs.activation_ms[s, j]))
            if s == self.last:
                self.finish((s, _BACKWARD, p), now)
            else:
                self.unlock((s, _BACKWARD, p), now)
            return
        self.live[s] -= 1
        for i in np.flatnonzero(~np.isnan(self.costs.gradient_ms[s])):
            self.unlock((int(i), _BACKWARD, p), now + float(self.costs.gradient_ms[s, i]))
        if s == 0 and p + self.nm <= self.minibatches:
            self.unlock((0, _FORWARD, p + self.nm), now)

    def unlock(self, task: tuple[int, int, int], at: float) -> None:
        """One of the things that ``task`` waits for is there at ``at``."""
        self.since[task] = max(at, self.since.get(task, 0.0))
        self.missing[task] = self.missing.get(task, self.inputs_of(task)) - 1
        if self.missing[task] == 0:
            self.push_event(self.since.pop(task), task, ends=False)

    def inputs_of(self, task: tuple[int, int, int]) -> int:
        s, kind, _ = task
        if kind == _FORWARD:
            return int(s == 0) + int((~np.isnan(self.costs.activation_ms[:, s])).sum())
        return 1 + int((~np.isnan(self.costs.gradient_ms[:, s])).sum())  # its own forward, and gradients
