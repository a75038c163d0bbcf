"""The partition search: least slowest stage over all nested closed sets, all orders and all subsets of the devices.

1. The chain's own order is searched first (`n + 1` closed sets; every so-manieth of them where blocks are many and all
   orders follow): quick, and its optimum bounds the answer from above.
2. Then all closed sets of the block graph, where their number is within `MAX_SETS`. Where there are more: those that
   differ from the chain's order within a band, and then all of the graph whose lightest blocks are merged with others,
   as few as bring their number within `MAX_SETS` (`light_nodes`). These may better what is held but prove nothing; a
   bound comes from the same blocks left out. Where that is as near to what is held as bounds are ever brought (`NEAR`),
   none is searched; while it is further than `TOLERANCE`, bands around the order of what is held follow.
3. A relaxation (`relaxation`) tells caps below which there is nothing from caps that may allow a plan: bisection brings
   the two close together, and the lower one is a proven bound.
4. A sweep looks for a plan below a cap only, and is the faster the lower the cap. Caps rise from the one the relaxation
   allows to what is held; one in vain proves that nothing lies below it (over all closed sets).
5. Among the plans of least bottleneck: less communication, then less memory; of few blocks the chain's own order
   if it is as good. (Where the work left does not allow that last sweep: some plan of least bottleneck.)

All work is counted, not timed, so that the answer does not depend on the machine. Where the work allowed is spent, or
not all closed sets were searched, the answer is the best plan held, and its distance to the proven bound is known.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from hetpipe_compiler.errors import PlanningError
from hetpipe_compiler.ir.blocks import BlockChain
from hetpipe_compiler.passes.block_graph import BlockGraph, block_graph
from hetpipe_compiler.passes.closed_sets import ClosedSets, closed_sets, widest_band
from hetpipe_compiler.passes.cut_space import ROUNDING, Cut, CutSpace, OutOfBudgetError, cut_space
from hetpipe_compiler.passes.device_classes import DeviceClasses, tails
from hetpipe_compiler.passes.in_flight import InFlightRule
from hetpipe_compiler.passes.light_nodes import over_the_fastest_link
from hetpipe_compiler.passes.orders import MAX_SETS, Orders, chain_orders
from hetpipe_compiler.passes.proven_bound import NEAR, bracket
from hetpipe_compiler.passes.stage_memory import MemoryRule, Recompute, recomputes, reserve_bytes, total_bytes
from hetpipe_compiler.passes.stage_sums import StageSums, stage_sums

#: How far above the lower bound the search looks, first to last, while no plan is known.
_CAPS = (1.02, 1.1, 1.3, 1.7, 3.0)
#: Where between the lower bound and the plan held.
_SHARES = (1 / 4,)
#: Cuts of the chain's own order that are looked at first.
_COARSE_CUTS = 256
_NO_LIMIT = 1 << 62
#: Where there are more, a band of so many is searched.
BAND_SETS = 4_000
#: Where the answer is proven to be this near the least there is, no more bands are searched: costs are known no better.
TOLERANCE = 0.01
#: Bands around the order of what is held, at most.
_BANDS = 4
#: Work of one search over all orders: about a minute of one core.
BUDGET = 3_000_000_000


@dataclass(frozen=True)
class Found:
    """A plan.

    Attributes:
        stages: Blocks of each stage, ascending; between any two nested closed sets of the block graph.
        classes: Device class of each stage.
        objective: The slowest stage's milliseconds (or most bytes too many), but for rounding.
        lower_bound: No plan under the same constraints can have less.
    """

    stages: tuple[tuple[int, ...], ...]
    classes: tuple[int, ...]
    objective: float
    lower_bound: float

    @property
    def order(self) -> tuple[int, ...]:
        """All blocks in the order of the stages."""
        return tuple(block for stage in self.stages for block in stage)

    @property
    def cuts(self) -> tuple[tuple[int, int], ...]:
        """The stages as intervals of ``order``."""
        ends = np.cumsum([0, *map(len, self.stages)])
        return tuple((int(lo), int(hi)) for lo, hi in pairwise(ends))


@dataclass(frozen=True)
class Search:
    """The search for one (chain, group); the in-flight counts are given per call.

    Attributes:
        line: Cuts of the chain's own order (or the cut by hand).
        coarse: Some of them, evenly chosen, where there are many.
        graph: Cuts at closed sets; None if the blocks have one order only.
        complete: Whether those are all closed sets.
        budget: Work for each search over ``graph``.
        merged, rest: Where they are not: cuts between merged blocks, and what is left without the light ones, where
            there is such a choice.
    """

    chain: BlockChain
    classes: DeviceClasses
    memory_rule: MemoryRule
    line: CutSpace
    coarse: CutSpace | None
    graph: CutSpace | None
    complete: bool
    budget: int
    merged: CutSpace | None = None
    rest: CutSpace | None = None
    _sums: dict[tuple[int, ...], StageSums] = field(default_factory=dict, repr=False)

    @property
    def lower_bound_ms(self) -> float:
        """From computation alone: see `work_bound`."""
        return self.line.lower_bound_ms

    def fastest(self, nm: int, rule: InFlightRule) -> Found | None:
        """The plan with the least bottleneck whose stages fit in memory; None if there is none.

        Raises:
            PlanningError: HP308, none was found, but not everything could be searched.
        """
        if self.graph is not None and self.complete and self.coarse is not None:
            # All orders hold the chain's own: of that, where blocks are many, every so-manieth cut is a start.
            least, start = self._fastest_of(self.coarse, nm, rule)
            return self._over_all_orders(self.graph, nm, rule, start, least)
        least, held = self._best_in_order(nm, rule)
        if self.graph is None:
            return None if held is None else Found(held.stages, held.classes, least, least)
        search_orders = self._over_all_orders if self.complete else self._over_some_orders
        return search_orders(self.graph, nm, rule, held, least)

    def least_overflow(self, nm: int, rule: InFlightRule) -> Found | None:
        """The plan in the chain's order whose worst stage exceeds its device's memory least; None if there is none."""
        cut = self.line.least_overflow(nm, rule)
        return None if cut is None else Found(cut.stages, cut.classes, cut.objective, cut.objective)

    def sums(self, stage: tuple[int, ...]) -> StageSums:
        """`stage_sums` of these blocks."""
        if stage not in self._sums:
            self._sums[stage] = stage_sums(self.chain, stage)
        return self._sums[stage]

    def recomputes(self, stage: tuple[int, ...], device_class: int, in_flight: int, nm: int) -> bool:
        """Whether that class runs the forward of the stage again before its backward."""
        return recomputes(self.sums(stage), in_flight, self.classes.kinds[device_class], self.memory_rule, nm)

    def recompute_flags(self, plan: Found, in_flight: tuple[int, ...], nm: int) -> tuple[bool, ...]:
        """Whether each stage of ``plan`` does."""
        stages = zip(plan.stages, plan.classes, in_flight, strict=True)
        return tuple(self.recomputes(stage, at, w, nm) for stage, at, w in stages)

    def fits_alone(self, stage: tuple[int, ...], device_class: int, in_flight: int, nm: int) -> bool:
        """Whether that class has room for the stage with so many minibatches in flight."""
        kind = self.classes.kinds[device_class]
        available = kind.memory_bytes - reserve_bytes(self.chain, kind)
        return total_bytes(self.sums(stage), in_flight, kind, self.memory_rule, nm) <= available

    def fits(self, plan: Found, in_flight: tuple[int, ...], nm: int) -> bool:
        """Whether every stage of ``plan`` has room for its minibatches in flight."""
        stages = zip(plan.stages, plan.classes, in_flight, strict=True)
        return all(self.fits_alone(stage, at, w, nm) for stage, at, w in stages)

    def recomputing(self, recompute: Recompute) -> Search:
        """The same search where other stages recompute."""
        if recompute is self.memory_rule.recompute:
            return self
        rule = replace(self.memory_rule, recompute=recompute)
        return replace(
            self,
            memory_rule=rule,
            line=replace(self.line, rule=rule),
            coarse=None if self.coarse is None else replace(self.coarse, rule=rule),
            graph=None if self.graph is None else replace(self.graph, rule=rule),
            merged=None if self.merged is None else replace(self.merged, rule=rule),
            rest=None if self.rest is None else replace(self.rest, rule=_bounding(rule)),
        )

    def least_in_order(self, nm: int, rule: InFlightRule) -> float:
        """The least bottleneck of a plan in the chain's own order; infinite if none fits."""
        return self._fastest_in_order(nm, rule)[0]

    def _fastest_in_order(self, nm: int, rule: InFlightRule) -> tuple[float, Cut | None]:
        """The same with some plan that reaches it."""
        caps = _caps(self.lower_bound_ms, float("inf"))
        if self.coarse is not None:
            # One of every so-manieth cut is one of a finer choice too. Where those have none, the others hardly have
            # one, and one long sweep without a cap tells.
            least, _ = self._fastest_of(self.coarse, nm, rule)
            caps = [*([least * (1 + ROUNDING)] if np.isfinite(least) else []), caps[-1]]
        return self._fastest_of(self.line, nm, rule, caps)

    def _fastest_of(
        self, space: CutSpace, nm: int, rule: InFlightRule, caps: list[float] | None = None
    ) -> tuple[float, Cut | None]:
        """The least bottleneck in ``space`` and some plan that reaches it; ``caps`` are tried in turn."""
        for cap_ms in caps or _caps(self.lower_bound_ms, float("inf")):
            least, cut, _ = space.fastest_within(nm, rule, cap_ms, _NO_LIMIT)
            if cut is not None:
                return least, cut
        return float("inf"), None

    def _best_in_order(self, nm: int, rule: InFlightRule) -> tuple[float, Cut | None]:
        """The same with the first in (communication, memory) of the plans that reach it."""
        least, cut = self._fastest_in_order(nm, rule)
        bound = least * (1 + ROUNDING)
        return least, None if cut is None else self.line.best_within(nm, rule, bound, _NO_LIMIT)[0]

    def _over_all_orders(
        self, space: CutSpace, nm: int, rule: InFlightRule, held: Cut | None, least: float
    ) -> Found | None:
        """The best over ``space``, given one in the chain's order, ``held``, whose bottleneck is ``least``."""
        below, first_cap, work = bracket(space, nm, rule, least, self.budget)
        if np.isinf(below):
            return None
        start, proven, budget = held, below, self.budget - work
        try:
            for cap in sorted({first_cap, *_caps(below, least, space.most_ms)} - {least}):
                reached, cut, work = space.fastest_within(nm, rule, cap, budget)
                budget -= work
                if cut is not None:
                    least, held = reached, cut
                    break
                proven = cap
            if held is None:
                return None
            proven = least
            # A sweep for the tie-break takes about as much work as the last one: not begun where it cannot end.
            if budget > work // 2:
                best, _ = space.best_within(nm, rule, least * (1 + ROUNDING), budget)
                held = best if _better(best, held) else held
        except OutOfBudgetError:
            pass
        if held is start and self.coarse is not None:
            # The work did not do: the chain's own order by every cut holds more than every so-manieth.
            least, held = self._best_in_order(nm, rule)
        if held is None:
            raise self._unknown(nm)
        return Found(held.stages, held.classes, least, min(proven, least))

    def _over_some_orders(
        self, band: CutSpace, nm: int, rule: InFlightRule, held: Cut | None, least: float
    ) -> Found | None:
        """The best found where not all closed sets can be searched; arguments as `_over_all_orders`'s."""
        proven, budget = self.lower_bound_ms, self.budget
        if self.rest is not None:
            below, _, work = bracket(self.rest, nm, rule, least, budget)
            if np.isinf(below):
                return None
            proven, budget = max(proven, below), budget - work
        spaces = [band] if self.merged is None else [band, self.merged]
        bands = 0
        while spaces and least > proven * (1 + NEAR):
            reached, cut, work = _below(spaces.pop(0), nm, rule, least, budget)
            budget -= work
            if cut is not None:
                least, held = reached, cut
            if cut is not None and not spaces and bands < _BANDS and least > proven * (1 + TOLERANCE):
                spaces, bands = [self._band_around(cut)], bands + 1
        if held is None:
            raise self._unknown(nm)
        return Found(held.stages, held.classes, least, min(proven, least))

    def _band_around(self, held: Cut) -> CutSpace:
        """Cuts that differ little from the order of the blocks in ``held``."""
        assert self.graph is not None
        order = [block for stage in held.stages for block in stage]
        chain = self.chain.permuted(order)
        graph = block_graph(chain)
        sets = widest_band(graph, BAND_SETS)
        space = cut_space(
            chain,
            graph,
            sets,
            self.classes,
            self.graph.tails,
            self.memory_rule,
            overlapped=self.graph.overlapped,
            relaxed=True,
        )
        members = tuple(tuple(sorted(order[block] for block in blocks)) for blocks in graph.members)
        return replace(space, graph=replace(graph, members=members))

    def _unknown(self, nm: int) -> PlanningError:
        return PlanningError(
            "HP308",
            f"no cut of {self.chain.name} that fits with Nm = {nm} was found, but not all orders of its"
            f" {len(self.chain)} blocks could be searched",
            where="virtual worker of " + ", ".join(d.id for members in self.classes.members for d in members),
            hint="make larger virtual workers, try a smaller batch, or cut by hand with --split",
        )


def _below(space: CutSpace, nm: int, rule: InFlightRule, least: float, budget: int) -> tuple[float, Cut | None, int]:
    """A plan of ``space`` below ``least``, its bottleneck, and the work done (half of ``budget`` if given up)."""
    below, first_cap, spent = bracket(space, nm, rule, least, budget)
    if np.isinf(below):
        return least, None, spent
    try:
        for cap in sorted({first_cap, *_caps(below, least, space.most_ms)} - {least}):
            reached, cut, work = space.fastest_within(nm, rule, cap, budget - spent)
            spent += work
            if cut is not None:
                return reached, cut, spent
    except OutOfBudgetError:
        return least, None, budget // 2
    return least, None, spent


def _bounding(rule: MemoryRule) -> MemoryRule:
    """Recomputing where it is needed costs no more time than always, and needs no more memory."""
    return replace(rule, recompute=Recompute.WHERE_NEEDED) if rule.recompute is Recompute.ALWAYS else rule


def _better(a: Cut, b: Cut) -> bool:
    """Of two plans with the same bottleneck: whether ``a`` moves less, or as much with less memory."""
    return b.moved_ms > a.moved_ms * (1 + ROUNDING) or b.memory > a.memory


def _caps(lower: float, held: float, most: float = float("inf")) -> list[float]:
    """Caps to try in turn, all below ``held``; the last is ``most`` where nothing is held."""
    if np.isinf(held):
        return [*(cap * lower for cap in _CAPS if cap * lower < most), most]
    if held <= lower * (1 + ROUNDING):
        return []
    return [*(lower + share * (held - lower) for share in _SHARES), held * (1 - ROUNDING)]


def search(
    chain: BlockChain,
    classes: DeviceClasses,
    memory_rule: MemoryRule,
    boundaries: tuple[int, ...] | None = None,
    *,
    overlapped: bool = False,
    max_sets: int = MAX_SETS,
    budget: int = BUDGET,
    orders: Orders | None = None,
) -> Search:
    """Prepare the search over a group's plans.

    Args:
        boundaries: First blocks of stages 1, 2, ...: these are the stages, and only the devices' order is searched.
        overlapped: A stage's time is the longer of its computation and its transfers, not their sum.
        max_sets, budget: Above these, the answer may be no optimum; its `Found.lower_bound` says so. With
            ``max_sets`` = 0 only the chain's own order is searched.
        orders: `chain_orders` of the chain and ``max_sets``, where they are known.

    Raises:
        PlanningError: HP302, the group is too varied to search; HP303, ``boundaries`` part what must stay together.
    """
    line = block_graph(chain, linear=True) if boundaries is None else _cut_by_hand(chain, boundaries)
    pipelines = tails(classes, len(line))

    def space(graph: BlockGraph, sets: ClosedSets | None = None, *, relaxed: bool = False) -> CutSpace:
        sets = sets or closed_sets(graph, len(graph) + 1)
        assert sets is not None
        return cut_space(
            chain,
            graph,
            sets,
            classes,
            pipelines,
            memory_rule,
            overlapped=overlapped,
            exact_stages=0 if boundaries is None else len(boundaries) + 1,
            relaxed=relaxed,
        )

    coarse = _every_so_manieth_cut(chain, line) if boundaries is None and len(line) >= 2 * _COARSE_CUTS else None
    orders = orders or chain_orders(chain, max_sets if boundaries is None else 0)
    graph, every, light = orders.graph, orders.every, orders.light
    cuts = merged = rest = None
    if graph is not None:
        cuts = space(graph, every or widest_band(graph, min(BAND_SETS, max_sets)), relaxed=True)
    if light is not None:
        merged = space(light.merged, light.merged_sets, relaxed=True)
        rest = cut_space(
            light.rest,
            light.rest_graph,
            light.rest_sets,
            over_the_fastest_link(classes),
            pipelines,
            _bounding(memory_rule),
            overlapped=overlapped,
            relaxed=True,
        )
    return Search(
        chain=chain,
        classes=classes,
        memory_rule=memory_rule,
        line=space(line),
        coarse=space(coarse) if coarse is not None else None,
        graph=cuts,
        complete=every is not None,
        budget=budget,
        merged=merged,
        rest=rest,
    )


def _cut_by_hand(chain: BlockChain, boundaries: tuple[int, ...]) -> BlockGraph:
    """A node for each stage that begins at 0 and at ``boundaries``."""
    merged = [range(lo, hi) for lo, hi in pairwise((0, *boundaries, len(chain)))]
    line = block_graph(chain, merged=merged, linear=True)
    if len(line) < len(merged):
        raise PlanningError(
            "HP303",
            f"the cut parts blocks that must share a stage: {_parted(chain, boundaries)}",
            where="--split",
            hint="cut before the first of them, or after the last",
        )
    return line


def _every_so_manieth_cut(chain: BlockChain, line: BlockGraph) -> BlockGraph:
    """The chain's own order with `_COARSE_CUTS` nodes, each a run of nodes of ``line``."""
    borders = [len(line) * at // _COARSE_CUTS for at in range(_COARSE_CUTS + 1)]
    runs = [line.members[lo:hi] for lo, hi in pairwise(borders)]
    return block_graph(chain, merged=[[b for node in run for b in node] for run in runs], linear=True)


def _parted(chain: BlockChain, boundaries: tuple[int, ...]) -> str:
    for group in chain.colocate:
        if any(group[0] < boundary <= group[-1] for boundary in boundaries):
            return ", ".join(chain.blocks[b].name for b in group)
    return "blocks that a value ties together"
