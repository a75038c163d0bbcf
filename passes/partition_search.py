"""The partition search: exact minimum of the slowest stage over all cuts, all orders and all subsets of the devices.

For a fixed order of devices the optimum is ``best[j][i] = min over j' of max(best[j'][i - 1], T_i(j' + 1 .. j))`` (spec
section 4). To cover every order the recurrence runs over *tails* (`device_classes.Tails`), and from the last stage
backwards, because the minibatches in flight on a stage depend on its distance to the last one. With t a tail whose
first stage has class a, i the first block of that stage, l the link over which it receives, and t' what follows it::

    V[t, l, i] = min over j, t' of  max( T_a([i, j), l, link(a, class of t')),  V[t', link(a, class of t'), j] )

    T_a([i, j), l, l') = compute_a[i, j) + received[i, j) over l + returned[i, j) over l',   infinite where memory is
    exceeded

The first stage (i = 0) receives nothing and holds Nm minibatches in flight. The answer is the least V[t, -, 0] over all
tails. A second sweep of the same shape finds, among the plans whose stages all keep to that bottleneck, the one with
the
fewest milliseconds of communication, then the least memory, then the first in order: so equal inputs give equal plans.

Pruning is exact: compute time grows with j, so a loop over j ends where compute alone exceeds what is already reached,
or a cap that the caller raises from the lower bound until a plan exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from hetpipe_compiler.ir.blocks import FloatArray
from hetpipe_compiler.passes.chain_tables import ChainTables, IntArray
from hetpipe_compiler.passes.device_classes import DeviceClasses, Tails, tails
from hetpipe_compiler.passes.in_flight import InFlightRule
from hetpipe_compiler.passes.stage_memory import MemoryRule, reserve_bytes, total_table

#: How far above the lower bound the search looks, first to last; only reached if nothing lies below.
_CAPS = (1.02, 1.1, 1.3, 1.7, 3.0, float("inf"))


#: Bottlenecks closer than this are equal: sums in another order differ by as much.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Found:
    """A plan: per stage its interval and device class; and the objective that no stage exceeds, ms or bytes."""

    cuts: tuple[tuple[int, int], ...]
    classes: tuple[int, ...]
    objective: float


@dataclass(frozen=True)
class Search:
    """All that the kernels read for one (chain, group); the in-flight counts are given per call.

    Attributes:
        compute_ms: Per device class, prefix sums of forward + backward.
        available: Per device class, bytes of memory less the reserve.
        receives_over: ``[class, link]``: whether a stage of that class can have a previous stage over that link.
        first_end, last_end: Per first block of a stage, the ends that its interval may have.
        lower_bound_ms: `lower_bound_ms` of these devices.
    """

    tables: ChainTables
    classes: DeviceClasses
    tails: Tails
    memory_rule: MemoryRule
    compute_ms: FloatArray
    available: IntArray
    ms_per_byte: FloatArray
    latency_ms: FloatArray
    receives_over: npt.NDArray[np.bool_]
    first_end: IntArray
    last_end: IntArray
    lower_bound_ms: float
    _totals: dict[int, IntArray] = field(default_factory=dict, repr=False)

    def fastest(self, nm: int, rule: InFlightRule) -> Found | None:
        """The plan with the least bottleneck whose stages fit in memory; None if there is none."""
        arrays = self._arrays(nm, rule)
        for cap in _CAPS:
            cap_ms = cap * self.lower_bound_ms if np.isfinite(cap) else np.inf
            bottleneck = _least_bottleneck(*(*arrays, cap_ms, False))
            if np.isfinite(bottleneck):
                return self._plan(arrays, bottleneck * (1 + _ROUNDING), False)
        return None

    def least_overflow(self, nm: int, rule: InFlightRule) -> Found | None:
        """The plan whose worst stage exceeds its device's memory least; None if no cut is allowed at all."""
        arrays = self._arrays(nm, rule)
        overflow = _least_bottleneck(*(*arrays, np.inf, True))
        return self._plan(arrays, overflow, True) if np.isfinite(overflow) else None

    def totals(self, in_flight: int) -> IntArray:
        """Memory of every interval with so many minibatches in flight, reserve excluded."""
        if in_flight not in self._totals:
            self._totals[in_flight] = total_table(self.tables, in_flight, self.memory_rule)
        return self._totals[in_flight]

    def fits(self, plan: Found, in_flight: tuple[int, ...]) -> bool:
        """Whether every stage of ``plan`` has room for its minibatches in flight."""
        stages = zip(plan.cuts, plan.classes, in_flight, strict=True)
        return all(self.totals(count)[cut] <= self.available[index] for cut, index, count in stages)

    def _arrays(self, nm: int, rule: InFlightRule) -> tuple[Any, ...]:
        deepest = int(self.tails.stages.max())
        counts = [rule.at_distance(distance, nm) for distance in range(deepest)]
        distinct = sorted({nm, 1, *counts})
        totals = np.stack([self.totals(count) for count in distinct])
        slots = np.array([distinct.index(count) for count in counts], dtype=np.int64)
        return (
            self.tails.first_class,
            self.tails.stages,
            self.tails.starts,
            self.tails.successors,
            self.compute_ms,
            self.tables.received,
            self.tables.returned,
            totals,
            slots,
            distinct.index(nm),
            self.available,
            self.ms_per_byte,
            self.latency_ms,
            self.classes.link_between,
            self.receives_over,
            self.first_end,
            self.last_end,
        )

    def _plan(self, arrays: tuple[Any, ...], objective: float, overflow: bool) -> Found:
        """Sweep again for the best plan within ``objective``, and follow its choices."""
        root, end, following = _least_communication(*(*arrays, objective, overflow))
        cuts: list[tuple[int, int]] = []
        classes: list[int] = []
        tail, link, lo = int(root), 0, 0
        while tail >= 0:
            hi, after = int(end[tail, link, lo]), int(following[tail, link, lo])
            cuts.append((lo, hi))
            classes.append(int(self.tails.first_class[tail]))
            if after >= 0:
                link = int(self.classes.link_between[classes[-1], self.tails.first_class[after]])
            tail, lo = after, hi
        return Found(tuple(cuts), tuple(classes), float(objective))


def search(
    tables: ChainTables, classes: DeviceClasses, memory_rule: MemoryRule, boundaries: tuple[int, ...] | None = None
) -> Search:
    """Prepare the search over a group's plans; ``boundaries`` (first blocks of stages 1, 2, ...) fix the cut.

    Raises:
        PlanningError: HP302, the group is too varied to search.
    """
    n = tables.blocks
    first_end = np.arange(1, n + 2, dtype=np.int64)
    last_end = np.full(n + 1, n, dtype=np.int64)
    if boundaries is not None:
        ends = (*boundaries, n)
        first_end[:n] = last_end[:n] = [next(end for end in ends if end > lo) for lo in range(n)]
    links = max(1, len(classes.links))
    receives_over = np.zeros((len(classes), links), dtype=np.bool_)
    for a, b in zip(*np.nonzero(classes.link_between >= 0), strict=True):
        receives_over[b, classes.link_between[a, b]] = True
    compute_ms = np.stack([tables.forward_ms[kind.name] + tables.backward_ms[kind.name] for kind in classes.kinds])
    return Search(
        tables=tables,
        classes=classes,
        tails=tails(classes, n),
        memory_rule=memory_rule,
        compute_ms=compute_ms,
        available=np.array([k.memory_bytes - reserve_bytes(tables, k) for k in classes.kinds], dtype=np.int64),
        ms_per_byte=np.array([1e-6 / link.bandwidth_gb_s for link in classes.links] or [0.0]),
        latency_ms=np.array([link.latency_us / 1e3 for link in classes.links] or [0.0]),
        receives_over=receives_over,
        first_end=first_end,
        last_end=last_end,
        lower_bound_ms=lower_bound_ms(compute_ms, np.array([len(devices) for devices in classes.members])),
    )


def lower_bound_ms(compute_ms: FloatArray, counts: IntArray) -> float:
    """A bottleneck that no plan can beat: the fractional bound, or the heaviest block on the device that suits it best.

    Fractional bound: for any weights y_d of the devices that sum to 1, the slowest stage takes at least the weighted
    mean of the stages' times, and that at least ``sum over blocks of min over d of y_d * ms(block, d)``. With y_d
    inverse to the whole chain's time on d this is the total work over the combined speed when the devices differ by a
    factor only.
    """
    per_block = np.diff(compute_ms, axis=1)
    whole = compute_ms[:, -1]
    heaviest = float(per_block.min(axis=0).max())
    if not np.all(whole > 0):
        return heaviest
    fractional = float((per_block / whole[:, None]).min(axis=0).sum() / (counts / whole).sum())
    return max(fractional, heaviest)


@numba.njit(cache=True, inline="always")
def _transfer_ms(n_bytes: int, ms_per_byte: float, latency_ms: float) -> float:
    return n_bytes * ms_per_byte + latency_ms if n_bytes > 0 else 0.0


@numba.njit(cache=True)
def _open(best: FloatArray, i: int, receives_over: npt.NDArray[np.bool_]) -> None:
    """Reset ``best``: infinite for the links over which a stage starting at i may receive, else closed (-infinite)."""
    for into in range(best.shape[0]):
        best[into] = np.inf if (receives_over[into] if i > 0 else into == 0) else -np.inf


@numba.njit(cache=True)
def _least_bottleneck(
    first_class: IntArray,
    stages: IntArray,
    starts: IntArray,
    successors: IntArray,
    compute_ms: FloatArray,
    received: IntArray,
    returned: IntArray,
    totals: IntArray,
    slots: IntArray,
    first_slot: int,
    available: IntArray,
    ms_per_byte: FloatArray,
    latency_ms: FloatArray,
    link_between: IntArray,
    receives_over: npt.NDArray[np.bool_],
    first_end: IntArray,
    last_end: IntArray,
    cap: float,
    overflow: bool,
) -> float:
    """The recurrence of the module docstring. Infinite if no plan lies within ``cap``.

    With ``overflow`` a stage's objective is the bytes by which it exceeds its device, and memory is no constraint.
    """
    n = received.shape[0] - 1
    links = ms_per_byte.shape[0]
    value = np.full((stages.shape[0], links, n + 1), np.inf)
    rest = np.empty((links, n + 1))
    best = np.empty(links)
    answer = np.inf
    for tail in range(stages.shape[0]):
        a, length = first_class[tail], stages[tail]
        rest[:] = np.inf
        reach = n
        if length == 1:
            rest[0, n] = -np.inf
        for s in range(starts[tail], starts[tail + 1]):
            link = link_between[a, first_class[successors[s]]]
            for j in range(n):
                if value[successors[s], link, j] < rest[link, j]:
                    rest[link, j] = value[successors[s], link, j]
                    reach = min(reach, j)
        for i in range(n - length + 1):
            slot = slots[length - 1] if i > 0 or length == 1 else first_slot
            _open(best, i, receives_over[a])
            for j in range(max(first_end[i], reach), last_end[i] + 1):
                compute = compute_ms[a, j] - compute_ms[a, i]
                over = totals[slot, i, j] - available[a]
                if not overflow:
                    if compute > cap or compute >= best.max():
                        break
                    if over > 0:
                        continue
                for out in range(links):
                    if rest[out, j] == np.inf:
                        continue
                    sent = compute + _transfer_ms(returned[i, j], ms_per_byte[out], latency_ms[out])
                    for into in range(links):
                        time = sent + _transfer_ms(received[i, j], ms_per_byte[into], latency_ms[into])
                        reached = max(float(over) if overflow else time, rest[out, j])
                        if reached <= cap and reached < best[into]:
                            best[into] = reached
            for into in range(links):
                value[tail, into, i] = best[into] if best[into] > -np.inf else np.inf
        answer = min(answer, value[tail, 0, 0])
    return answer


@numba.njit(cache=True)
def _least_communication(
    first_class: IntArray,
    stages: IntArray,
    starts: IntArray,
    successors: IntArray,
    compute_ms: FloatArray,
    received: IntArray,
    returned: IntArray,
    totals: IntArray,
    slots: IntArray,
    first_slot: int,
    available: IntArray,
    ms_per_byte: FloatArray,
    latency_ms: FloatArray,
    link_between: IntArray,
    receives_over: npt.NDArray[np.bool_],
    first_end: IntArray,
    last_end: IntArray,
    bound: float,
    overflow: bool,
) -> tuple[int, IntArray, IntArray]:
    """Among plans whose every stage's objective is at most ``bound``: least (communication ms, memory, order).

    Returns the tail that is the whole plan, and per ``[tail, link, first block]`` the end of the tail's first stage and
    the tail that follows it (-1: none).
    """
    n = received.shape[0] - 1
    links = ms_per_byte.shape[0]
    shape = (stages.shape[0], links, n + 1)
    communication, memory = np.full(shape, np.inf), np.zeros(shape, dtype=np.int64)
    end, following = np.zeros(shape, dtype=np.int32), np.full(shape, -1, dtype=np.int32)
    best = np.empty(links)
    root = -1
    for tail in range(stages.shape[0]):
        a, length = first_class[tail], stages[tail]
        chosen, reach = _least_rests(
            tail, a, length, starts, successors, first_class, link_between, communication, memory
        )
        for i in range(n - length + 1):
            slot = slots[length - 1] if i > 0 or length == 1 else first_slot
            _open(best, i, receives_over[a])
            for j in range(max(first_end[i], reach), last_end[i] + 1):
                compute = compute_ms[a, j] - compute_ms[a, i]
                over = totals[slot, i, j] - available[a]
                if not overflow:
                    if compute > bound:
                        break
                    if over > 0:
                        continue
                for out in range(links):
                    if chosen[out, j] == -2:
                        continue
                    back = _transfer_ms(returned[i, j], ms_per_byte[out], latency_ms[out])
                    after, bytes_here = 0.0, totals[slot, i, j]
                    if chosen[out, j] >= 0:
                        after = communication[chosen[out, j], out, j]
                        bytes_here += memory[chosen[out, j], out, j]
                    for into in range(links):
                        forth = _transfer_ms(received[i, j], ms_per_byte[into], latency_ms[into])
                        if (float(over) if overflow else compute + back + forth) > bound:
                            continue
                        moved = back + forth + after
                        if moved < best[into] or (moved == best[into] and bytes_here < memory[tail, into, i]):
                            best[into] = moved
                            communication[tail, into, i], memory[tail, into, i] = moved, bytes_here
                            end[tail, into, i], following[tail, into, i] = j, chosen[out, j]
        here = communication[tail, 0, 0]
        if here < np.inf and (
            root < 0
            or here < communication[root, 0, 0]
            or (here == communication[root, 0, 0] and memory[tail, 0, 0] < memory[root, 0, 0])
        ):
            root = tail
    return root, end, following


@numba.njit(cache=True)
def _least_rests(
    tail: int,
    a: int,
    length: int,
    starts: IntArray,
    successors: IntArray,
    first_class: IntArray,
    link_between: IntArray,
    communication: FloatArray,
    memory: IntArray,
) -> tuple[IntArray, int]:
    """Per (link, block): the best tail to follow ``tail`` (-1: the end, -2: none); and the first block that has one."""
    n, links = communication.shape[2] - 1, communication.shape[1]
    chosen = np.full((links, n + 1), -2, dtype=np.int64)
    if length == 1:
        chosen[0, n] = -1
    reach = n
    for s in range(starts[tail], starts[tail + 1]):
        after = successors[s]
        link = link_between[a, first_class[after]]
        for j in range(n):
            if communication[after, link, j] == np.inf:
                continue
            reach = min(reach, j)
            held = chosen[link, j]
            if (
                held < 0
                or communication[after, link, j] < communication[held, link, j]
                or (
                    communication[after, link, j] == communication[held, link, j]
                    and memory[after, link, j] < memory[held, link, j]
                )
            ):
                chosen[link, j] = after
    return chosen, reach
