"""The cuts that a search may choose from, with costs for one group's devices: what the kernels read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hetpipe_compiler.ir.blocks import BlockChain, FloatArray
from hetpipe_compiler.passes.block_graph import BlockGraph
from hetpipe_compiler.passes.closed_sets import ClosedSets
from hetpipe_compiler.passes.crossing import Beyond, beyond, parted, shared_bytes
from hetpipe_compiler.passes.device_classes import DeviceClasses, Tails
from hetpipe_compiler.passes.in_flight import InFlightRule
from hetpipe_compiler.passes.kernels.arrays import (
    ALWAYS,
    NEVER,
    WHERE_NEEDED,
    BoolArray,
    Choices,
    DeviceArrays,
    IntArray,
    MemoryArrays,
    Reached,
    SetArrays,
    Sweep,
    TailArrays,
    new_choices,
    new_reached,
    new_stages,
)
from hetpipe_compiler.passes.kernels.least_bottleneck import first_stage_within, least_bottleneck
from hetpipe_compiler.passes.kernels.least_communication import least_communication
from hetpipe_compiler.passes.relaxation import possible
from hetpipe_compiler.passes.stage_memory import MemoryRule, Recompute, reserve_bytes
from hetpipe_compiler.passes.work_bound import work_bound

#: Entries of R at most: 8 bytes each in the first sweep, 25 in the second.
MAX_ENTRIES = 60_000_000
#: The worth of all nodes, in whole units: sums are then exact, whatever the order.
_UNITS = 1 << 40
_NO_LIMIT = 1 << 62
_RECOMPUTE = {Recompute.NEVER: NEVER, Recompute.WHERE_NEEDED: WHERE_NEEDED, Recompute.ALWAYS: ALWAYS}
#: Bottlenecks closer than this are equal: sums in another order differ by as much.
ROUNDING = 1e-12


class OutOfBudgetError(Exception):
    """A sweep was given up: too much work, or too much memory."""


@dataclass(frozen=True)
class Cut:
    """A plan: the blocks of each stage (ascending), its device class, and the objective that no stage exceeds.

    Attributes:
        moved_ms: Communication of all stages.
        memory: Bytes of all stages.
    """

    stages: tuple[tuple[int, ...], ...]
    classes: tuple[int, ...]
    objective: float
    moved_ms: float
    memory: int


@dataclass(frozen=True)
class CutSpace:
    """Closed sets of one graph, sorted by worth, with what stages between them cost on one group's devices.

    Attributes:
        node_ms: ``[class, node]``.
        worth: Per set, in units; ascending.
        prices: Per device class.
        lower_bound_ms: `work_bound`'s.
        exact_stages: Plans have exactly so many stages; 0: any number.
        relaxed: Look first at what a relaxation leaves possible.
    """

    graph: BlockGraph
    sets: ClosedSets
    arrays: SetArrays
    devices: DeviceArrays
    classes: DeviceClasses
    tails: Tails
    node_ms: FloatArray
    worth: IntArray
    unit: float
    prices: FloatArray
    lower_bound_ms: float
    rule: MemoryRule
    whole_memory: bool
    overlapped: bool
    exact_stages: int
    relaxed: bool
    _scratch: dict[str, Reached] = field(default_factory=dict, repr=False)

    def least_bottleneck(self, nm: int, rule: InFlightRule, cap: float, budget: int) -> tuple[float, int]:
        """The least bottleneck within ``cap`` (infinite if none is), and the work done.

        Raises:
            OutOfBudgetError: Nothing is known.
        """
        least, _, work = self._least_bottleneck(nm, rule, cap, budget, overflow=False, with_plan=False)
        return least, work

    def fastest_within(self, nm: int, rule: InFlightRule, cap: float, budget: int) -> tuple[float, Cut | None, int]:
        """The same with some plan that reaches it; its communication and memory are not known (infinite)."""
        return self._least_bottleneck(nm, rule, cap, budget, overflow=False, with_plan=True)

    def best_within(self, nm: int, rule: InFlightRule, bound: float, budget: int) -> tuple[Cut, int]:
        """Among the plans within ``bound``, which must exist, the first in (communication, memory); and the work done.

        Raises:
            OutOfBudgetError: It was not found.
        """
        return self._best_within(nm, rule, bound, budget, overflow=False)

    def least_overflow(self, nm: int, rule: InFlightRule) -> Cut | None:
        """The plan whose worst stage exceeds its device's memory least; None if there is no plan at all."""
        overflow, _, _ = self._least_bottleneck(nm, rule, np.inf, _NO_LIMIT, overflow=True, with_plan=False)
        return self._best_within(nm, rule, overflow, _NO_LIMIT, overflow=True)[0] if np.isfinite(overflow) else None

    def _least_bottleneck(
        self, nm: int, rule: InFlightRule, cap: float, budget: int, *, overflow: bool, with_plan: bool
    ) -> tuple[float, Cut | None, int]:
        memory = self._memory_arrays(nm, rule)
        tails, before = self._tail_arrays(memory, np.inf if overflow else cap)
        if tails is None:
            return np.inf, None, before
        rest = np.full(int(tails.rest_at[-1]), np.inf)
        sweep = self._sweep(tails, memory, overflow)
        left = budget - before
        least, work = least_bottleneck(sweep, rest, cap, left)
        if work > left:
            raise OutOfBudgetError
        cut = self._plan_of(sweep, rest, float(least)) if with_plan and np.isfinite(least) else None
        return float(least), cut, int(work) + before

    def _plan_of(self, sweep: Sweep, rest: FloatArray, least: float) -> Cut:
        """Follow R, which a sweep has filled, along stages within ``least``."""
        bound, ends, order = least * (1 + ROUNDING), [0], list[int]()
        following, into = np.arange(len(self.tails)), 0
        while ends[-1] < len(self.sets) - 1:
            for tail in following:
                length = int(self.tails.stages[tail])
                if not order and self.exact_stages not in (0, length):
                    continue
                if (
                    order
                    and self.devices.link_between[self.tails.first_class[order[-1]], self.tails.first_class[tail]]
                    != into
                ):
                    continue
                end, out = first_stage_within(ends[-1], int(tail), into, sweep, rest, bound)
                if end >= 0:
                    break
            else:
                raise AssertionError("a sweep's values lead nowhere")
            ends.append(int(end))
            order.append(int(tail))
            into = int(out)
            following = self.tails.successors[self.tails.starts[tail] : self.tails.starts[tail + 1]]
        return self._cut(ends[1:], order, least, float("inf"), _NO_LIMIT)

    def _cut(self, ends: list[int], order: list[int], objective: float, moved_ms: float, memory: int) -> Cut:
        """The plan whose stages end at the sets ``ends`` and begin the tails ``order``."""
        stages, before = [], frozenset[int]()
        for index in ends:
            nodes = frozenset(self.sets.nodes(index))
            stages.append(tuple(sorted(b for node in nodes - before for b in self.graph.members[node])))
            before = nodes
        classes = tuple(int(self.tails.first_class[tail]) for tail in order)
        return Cut(tuple(stages), classes, objective, moved_ms, memory)

    def _best_within(
        self, nm: int, rule: InFlightRule, bound: float, budget: int, *, overflow: bool
    ) -> tuple[Cut, int]:
        memory = self._memory_arrays(nm, rule)
        tails, before = self._tail_arrays(memory, np.inf if overflow else bound)
        assert tails is not None, "no plan within the bound"
        rest = new_choices(int(tails.rest_at[-1]))
        sweep = self._sweep(tails, memory, overflow)
        root, end, out, moved_ms, held, work = least_communication(sweep, rest, bound, budget - before)
        if work > budget - before:
            raise OutOfBudgetError
        ends, order = _follow(int(root), int(end), int(out), tails, rest)
        return self._cut(ends, order, float(bound), float(moved_ms), int(held)), int(work) + before

    def _sweep(self, tails: TailArrays, memory: MemoryArrays, overflow: bool) -> Sweep:
        count = len(self.sets)
        if "reached" not in self._scratch:
            self._scratch["reached"] = new_reached(count, len(self.graph))
        stages = new_stages(count, len(memory.in_flight), len(self.devices.bytes_per_ms))
        return Sweep(
            self.arrays,
            self.graph.arrays,
            tails,
            self.devices,
            memory,
            self._scratch["reached"],
            stages,
            self.exact_stages,
            self.overlapped,
            overflow,
        )

    @property
    def most_ms(self) -> float:
        """No stage takes longer."""
        links, nodes = self.devices, self.graph.arrays
        moved = int(nodes.forward_bytes.sum() + nodes.backward_bytes.sum())
        compute_ms = self.node_ms.sum(axis=1)
        if self.rule.recompute is not Recompute.NEVER:
            compute_ms = compute_ms + self.arrays.forward_ms[:, -1]
        return float(compute_ms.max() + moved / links.bytes_per_ms.min() + 2 * links.latency_ms.max())

    @cached_property
    def _beyond(self) -> Beyond:
        return beyond(self.graph, self.node_ms)

    def may_reach(self, nm: int, rule: InFlightRule, cap: float) -> tuple[bool, int]:
        """False if no plan is within ``cap`` (finite), for certain: see `relaxation`; and the work done."""
        try:
            tails, work = self._tail_arrays(self._memory_arrays(nm, rule), cap)
        except OutOfBudgetError:
            return True, 0
        return tails is not None, work

    def _tail_arrays(self, memory: MemoryArrays, cap: float) -> tuple[TailArrays | None, int]:
        """The windows of all tails for ``cap``, None where no plan is within it; and the work done."""
        tails, last = self.tails, len(self.sets) - 1
        low, high = np.zeros(len(tails), dtype=np.int64), np.full(len(tails), last, dtype=np.int64)
        if np.isfinite(cap) and self.unit > 0:
            after, before = tails.after @ self.prices, tails.before @ self.prices
            # Worth is rounded down to units node by node, so a set may lack a unit for each node.
            slack = len(self.graph) + 2
            low = np.searchsorted(self.worth, self.worth[-1] - np.ceil(after * cap / self.unit * (1 + 1e-9)) - slack)
            high = np.searchsorted(self.worth, np.ceil(before * cap / self.unit * (1 + 1e-9)) + slack, side="right")
            high = np.minimum(high, last)
            low = np.minimum(low, high)
        windows = self._windows(low, high, np.ones(last, dtype=np.bool_), self._beyond_reach(cap))
        if not self.relaxed or np.isinf(cap) or cap <= 0:
            return windows, 0
        found, work = possible(
            self.arrays, self._beyond, self.graph.arrays, windows, self.devices, memory, cap, overlapped=self.overlapped
        )
        return None if found is None else self._windows(found.low, found.high, found.begins, windows.beyond), work

    def _beyond_reach(self, cap: float) -> IntArray:
        """Per set, the first one that no stage from it can reach within ``cap``: a stage is worth its device's time."""
        if not np.isfinite(cap) or self.unit <= 0:
            return np.full(len(self.sets), len(self.sets), dtype=np.int64)
        most = math.ceil(self.prices.max() * cap / self.unit * (1 + 1e-9)) + len(self.graph) + 2
        reach: IntArray = np.searchsorted(self.worth, self.worth + most, side="right")
        return reach

    def _windows(self, low: IntArray, high: IntArray, begins: BoolArray, beyond: IntArray) -> TailArrays:
        tails, last = self.tails, len(self.sets) - 1
        rest_low, rest_high = np.full(len(tails), last), np.full(len(tails), last + 1)
        many = tails.starts[1:] > tails.starts[:-1]
        if len(tails.successors):
            rows = tails.starts[:-1][many]
            rest_low[many] = np.minimum.reduceat(np.where(low < high, low, last)[tails.successors], rows)
            rest_high[many] = np.maximum(np.maximum.reduceat(high[tails.successors], rows), rest_low[many])
        links = len(self.devices.bytes_per_ms)
        rest_at = np.zeros(len(tails) + 1, dtype=np.int64)
        np.cumsum((rest_high - rest_low) * links, out=rest_at[1:])
        if rest_at[-1] > MAX_ENTRIES:
            raise OutOfBudgetError
        by_class = np.argsort(tails.first_class, kind="stable")
        starts = np.searchsorted(tails.first_class[by_class], np.arange(len(self.classes) + 1))
        return TailArrays(
            tails.first_class, tails.stages, by_class, starts, tails.longer, low, high,
            rest_low, rest_high, rest_at, begins, beyond,
        )  # fmt: skip

    def _memory_arrays(self, nm: int, rule: InFlightRule) -> MemoryArrays:
        counts = [rule.at_distance(distance, nm) for distance in range(int(self.tails.stages.max()))]
        distinct = sorted({nm, 1, *counts})
        slots = np.array([distinct.index(count) for count in counts], dtype=np.int64)
        return MemoryArrays(
            np.array(distinct, dtype=np.int64),
            slots,
            distinct.index(nm),
            self.rule.optimizer_factor,
            np.array([self.rule.own_sums(count, nm) for count in distinct], dtype=np.int64),
            np.array([self.rule.pulls(count, nm) for count in distinct]),
            self.rule.step_factor,
            self.rule.loop_factor,
            _RECOMPUTE[self.rule.recompute],
            self.whole_memory,
        )


def cut_space(
    chain: BlockChain,
    graph: BlockGraph,
    sets: ClosedSets,
    classes: DeviceClasses,
    tails: Tails,
    rule: MemoryRule,
    *,
    overlapped: bool = False,
    exact_stages: int = 0,
    relaxed: bool = False,
) -> CutSpace:
    """The cuts at ``sets``, the closed sets of ``graph``."""
    node_ms = {k.name: graph.node_ms(chain.forward_ms[k.name] + chain.backward_ms[k.name]) for k in classes.kinds}
    bound = work_bound(np.stack([*node_ms.values()]), _counts(classes, [*node_ms]))
    unit = float(bound.worth.sum()) / _UNITS
    units = np.floor(bound.worth / unit).astype(np.int64) if unit > 0 else np.zeros(len(graph), dtype=np.int64)
    rows = np.vstack([units, np.ones(len(graph), dtype=np.int64), graph.replay, graph.held])
    sums = sets.sums(rows)
    order = np.lexsort((np.arange(len(sets)), sums[1], sums[0]))
    per_class = np.stack([node_ms[k.name] for k in classes.kinds])
    compute_ms = np.ascontiguousarray(sets.sums(per_class)[:, order])
    forward = np.stack([graph.node_ms(chain.forward_ms[k.name]) for k in classes.kinds])
    forward_ms = np.ascontiguousarray(sets.sums(forward)[:, order])
    sums = np.ascontiguousarray(sums[:, order])
    sets = sets.reordered(order)
    nodes = graph.arrays
    arrays = SetArrays(
        sets.words,
        sets.grow_starts,
        sets.grow_sets,
        compute_ms,
        forward_ms,
        sums[2],
        sums[3:] + shared_bytes(sets, nodes),
        *parted(sets, nodes.value_starts, nodes.value_nodes),
        *parted(sets, nodes.item_starts, nodes.item_nodes),
    )
    price = dict(zip(node_ms, bound.prices, strict=True))
    return CutSpace(
        graph=graph,
        sets=sets,
        arrays=arrays,
        devices=_device_arrays(chain, classes),
        classes=classes,
        tails=tails,
        node_ms=per_class,
        worth=sums[0],
        unit=unit,
        prices=np.array([price[k.name] for k in classes.kinds]),
        lower_bound_ms=bound.bottleneck_ms,
        rule=rule,
        whole_memory=chain.resident is None,
        overlapped=overlapped,
        exact_stages=exact_stages,
        relaxed=relaxed,
    )


def _counts(classes: DeviceClasses, kinds: list[str]) -> IntArray:
    counts = np.zeros(len(kinds), dtype=np.int64)
    for members in classes.members:
        counts[kinds.index(members[0].kind.name)] += len(members)
    return counts


def _device_arrays(chain: BlockChain, classes: DeviceClasses) -> DeviceArrays:
    links = classes.links
    receives_over = np.zeros((len(classes), max(1, len(links))), dtype=np.bool_)
    for a, b in zip(*np.nonzero(classes.link_between >= 0), strict=True):
        receives_over[b, classes.link_between[a, b]] = True
    return DeviceArrays(
        available=np.array([k.memory_bytes - reserve_bytes(chain, k) for k in classes.kinds], dtype=np.int64),
        on_cpu=np.array([k.is_cpu for k in classes.kinds]),
        bytes_per_ms=np.array([link.bandwidth_gb_s * 1e6 for link in links] or [np.inf]),
        latency_ms=np.array([link.latency_us * 1e-3 for link in links] or [0.0]),
        link_between=classes.link_between,
        receives_over=receives_over,
    )


def _follow(root: int, end: int, out: int, tails: TailArrays, rest: Choices) -> tuple[list[int], list[int]]:
    """Per stage, the set where it ends and the tail that it begins."""
    ends, order = [end], [root]
    tail = root
    while True:
        low, high = int(tails.rest_low[tail]), int(tails.rest_high[tail])
        at = int(tails.rest_at[tail]) + out * (high - low) + ends[-1] - low
        tail = int(rest.following[at])
        if tail < 0:
            return ends, order
        order.append(tail)
        ends.append(int(rest.end[at]))
        out = int(rest.out[at])
