"""Concurrency: Nm, and for every virtual worker its partition and in-flight vector.

Rule:
    1. For each Nm from 1 on (or the one that is asked for), each virtual worker is partitioned under several in-flight
       rules, from memory-lean to memory-rich. Each distinct partition then gets the in-flight vector with the shortest
       simulated period among those that fit in memory; within 0.1 % the one with the fewest minibatches in flight.
    2. Nm is the same in all virtual workers, so the first Nm that does not fit in one of them ends the search.
    3. Under WSP all virtual workers do the same number of minibatches, so N of them together make
       N x batch / (period of the slowest). The smallest Nm within 1 % of the best such rate wins. The search ends early
       where a stage of the slowest computes 99 % of the time: more in flight leaves partitions less memory, and no
       stalls are left to fill.
    4. Virtual workers whose devices are alike get the same plan.
    5. Where stages may recompute, partitions with and without are tried (`partition_finder`), each with all vectors; a
       stage recomputes where its vector leaves no room otherwise. So recomputation is chosen where nothing fits
       without, or where more minibatches in flight, or a better balance, gain more than the repeated forwards cost.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from hetpipe_compiler.errors import PlanningError
from hetpipe_compiler.ir.blocks import BlockChain
from hetpipe_compiler.ir.cluster import Cluster, Device
from hetpipe_compiler.passes.allocate import Allocation, Group
from hetpipe_compiler.passes.device_classes import DeviceClasses, device_classes
from hetpipe_compiler.passes.in_flight import LEANEST, vectors
from hetpipe_compiler.passes.infeasible import does_not_fit
from hetpipe_compiler.passes.orders import MAX_SETS, chain_orders
from hetpipe_compiler.passes.own_partitioner import OwnPartitioner
from hetpipe_compiler.passes.partition import Bounded, PlannedStage, message_ms, planned_stages
from hetpipe_compiler.passes.partition_finder import Finder, finder_of
from hetpipe_compiler.passes.partition_problem import PartitionProblem
from hetpipe_compiler.passes.partition_search import Found, Search, search
from hetpipe_compiler.passes.simulate.pipeline import PipelineCosts, WaveExchange, steady_period_ms
from hetpipe_compiler.passes.split import split_boundaries
from hetpipe_compiler.passes.stage_memory import MemoryRule, Recompute

#: A richer vector or another partition must be faster than what is held by this factor.
_PERIOD_GAIN = 1e-3
#: A larger Nm must bring more than this.
_NM_GAIN = 1e-2

#: Milliseconds of pushing and pulling one wave: (device of the stage, trainable bytes of the stage) -> ms.
ExchangeMs = Callable[[Device, int], float]


@dataclass(frozen=True)
class PlannedWorker(Bounded):
    """The plan of one virtual worker.

    Attributes:
        nm: Minibatches in flight in the worker (the same in all).
        bottleneck_ms: The slowest stage's ``stage_ms``.
        lower_bound_ms: Proven: no partition's bottleneck on these devices can be less with ``nm`` in flight.
        order: The chain's blocks in the order of the stages, which are intervals of it.
        period_ms: Simulated milliseconds per minibatch in the long run, with every real message.
        samples_per_s: Of this worker alone.
        unused: Devices of the group that no stage uses.
        searched: The cuts that the search chose from: see `orders`.
    """

    stages: tuple[PlannedStage, ...]
    nm: int
    bottleneck_ms: float
    lower_bound_ms: float
    period_ms: float
    samples_per_s: float
    unused: tuple[Device, ...] = ()
    order: tuple[int, ...] = ()
    searched: str = ""

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The vector w."""
        return tuple(stage.in_flight for stage in self.stages)


def choose_concurrency(
    chain: BlockChain,
    cluster: Cluster,
    allocation: Allocation,
    *,
    nm: int | None = None,
    staleness: int = 0,
    reproducible: bool = False,
    splits: Sequence[Sequence[str | int]] | None = None,
    exchange_ms: ExchangeMs | None = None,
    objective: str = "hetpipe",
    recompute: Recompute = Recompute.NEVER,
    partitioner: OwnPartitioner | None = None,
) -> tuple[PlannedWorker, ...]:
    """Plan every virtual worker, with the ``nm`` that is given or the best one.

    Args:
        splits: Cuts by hand, one for each virtual worker or one for all (see `split`).
        exchange_ms: Time of a wave's push and pull; None: free. Only the gated forward of a wave waits for it. Workers
            that share a plan share the first one's times.
        objective: What each partition minimises: see `partition.partition`.
        recompute: Which stages keep their inputs only and run their forward again.
        partitioner: Makes the stages in place of our search, which then says how good they are. It is asked once for
            each structure of virtual workers and Nm.

    Raises:
        PlanningError: HP301 a virtual worker cannot hold one minibatch, HP302 too many orders to search, HP303 and
            HP306 a wrong split, HP304 no times for a device kind, HP305 ``nm`` is too large for memory, HP307 ``nm``
            below 1, HP311-HP315 the partitioner.
    """
    if nm is not None and nm < 1:
        raise PlanningError("HP307", f"Nm = {nm} minibatches in flight", where="--nm", hint="give 1 or more")
    rule = MemoryRule.of(chain, staleness, reproducible, recompute)
    planners: dict[Hashable, _Planner] = {}
    orders = chain_orders(chain)
    members: list[tuple[_Planner, DeviceClasses, Group]] = []
    for group, split in zip(allocation.groups, _splits_per_group(splits, len(allocation.groups)), strict=True):
        classes = device_classes(group, cluster, chain)
        boundaries = split_boundaries(chain, split) if split is not None else None
        key = (classes.key, boundaries)
        if key not in planners:
            free = finder_of(search(chain, classes, rule, overlapped=objective == "overlapped", orders=orders))
            finder = free
            if boundaries is not None:
                finder = finder_of(search(chain, classes, rule, boundaries, overlapped=objective == "overlapped"))
            ask = None
            if partitioner is not None:
                ask = partial(
                    _ask, partitioner, PartitionProblem(chain, cluster, group, 0, objective, rule), free.space
                )
            by_hand = boundaries is not None
            planners[key] = _Planner(chain, cluster, finder, free, by_hand, ask, exchange_ms, str(orders))
        members.append((planners[key], classes, group))
    largest = max(len(group.devices) for group in allocation.groups)
    candidates = range(1, 2 * largest + 3) if nm is None else range(nm, nm + 1)
    chosen = _choose(list(planners.values()), candidates)
    return tuple(_worker_of(planner, chosen, classes, group) for planner, classes, group in members)


@dataclass(frozen=True)
class WorkerChoice:
    """A virtual worker that is decided already.

    Attributes:
        devices, stages, in_flight, recompute: Of each stage its device, its blocks, w_s, and whether it recomputes.
    """

    group: Group
    devices: tuple[Device, ...]
    stages: Sequence[tuple[int, ...]]
    in_flight: tuple[int, ...]
    recompute: tuple[bool, ...]


def cost_choices(
    chain: BlockChain,
    cluster: Cluster,
    choices: Sequence[WorkerChoice],
    *,
    nm: int,
    staleness: int = 0,
    exchange_ms: ExchangeMs | None = None,
    objective: str = "hetpipe",
    recompute: Recompute = Recompute.NEVER,
    bound: bool = True,
) -> tuple[PlannedWorker, ...]:
    """Virtual workers as they are decided, whether or not they fit in memory; arguments as `choose_concurrency`'s.

    ``recompute`` counts for the lower bound alone; ``bound``: whether to search all orders of the blocks for that, not
    the chain's own alone.
    """
    rule = MemoryRule.of(chain, staleness, recompute=recompute)
    known: dict[Hashable, PlannedWorker] = {}
    orders, line_only = chain_orders(chain, MAX_SETS if bound else 0), chain_orders(chain, 0)
    workers = []
    for choice in choices:
        group = choice.group
        line = device_classes(Group(choice.devices, ordered=True), cluster, chain)
        free = device_classes(group, cluster, chain)
        key = (line.key, free.key, tuple(choice.stages), choice.in_flight, choice.recompute)
        if key not in known:
            every, mine = (
                search(chain, classes, rule, overlapped=objective == "overlapped", orders=among)
                for classes, among in ((free, orders), (line, line_only))
            )
            planner = _Planner(chain, cluster, finder_of(mine), finder_of(every), True, None, exchange_ms, str(orders))
            found = Found(tuple(choice.stages), tuple(range(len(choice.stages))), 0.0, 0.0)
            known[key] = planner.with_best_vector(found, nm, [choice.in_flight], choice.recompute)
        worker = known[key]
        stages = tuple(
            replace(stage, device=device, memory=dict(stage.memory))
            for stage, device in zip(worker.stages, choice.devices, strict=True)
        )
        unused = tuple(device for device in group.devices if device not in choice.devices)
        workers.append(replace(worker, stages=stages, unused=unused))
    return tuple(workers)


def _ask(partitioner: OwnPartitioner, problem: PartitionProblem, space: Search, nm: int) -> Found | PlanningError:
    return partitioner.find(replace(problem, nm=nm), space)


def _splits_per_group(
    splits: Sequence[Sequence[str | int]] | None, groups: int
) -> Sequence[Sequence[str | int] | None]:
    if not splits:
        return [None] * groups
    if len(splits) not in (1, groups):
        raise PlanningError(
            "HP303",
            f"{len(splits)} cuts for {groups} virtual workers",
            where="--split",
            hint="give one for all virtual workers, or one for each",
        )
    return list(splits) * (groups // len(splits))


def _choose(planners: list[_Planner], candidates: range) -> int:
    """The Nm of rule 3; the planners then hold their best worker for it."""
    periods: dict[int, float] = {}
    for nm in candidates:
        workers = []
        for planner in planners:
            worker = planner.best(nm)
            if worker is None:
                break
            workers.append(worker)
        if len(workers) < len(planners):
            if periods:
                break
            planner = planners[len(workers)]
            raise planner.refusal(nm) or does_not_fit(
                planner.chain, planner.space, nm, by_hand=planner.by_hand, largest_nm=_largest_nm(planners, nm)
            )
        slowest = max(workers, key=lambda worker: worker.period_ms)
        periods[nm] = slowest.period_ms
        busiest_ms = max(stage.forward_ms + stage.backward_ms for stage in slowest.stages)
        if slowest.period_ms <= busiest_ms * (1 + _NM_GAIN):
            break
    enough = min(periods.values()) * (1 + _NM_GAIN)
    return next(nm for nm, period in periods.items() if period <= enough)


def _largest_nm(planners: list[_Planner], below: int) -> int:
    """The largest Nm under ``below`` that fits in every virtual worker, 0 if none does. Fitting is monotone in Nm."""
    low, high = 0, below
    while high - low > 1:
        middle = (low + high) // 2
        if all(planner.space.fastest(middle, LEANEST) is not None for planner in planners):
            low = middle
        else:
            high = middle
    return low


def _worker_of(planner: _Planner, nm: int, classes: DeviceClasses, group: Group) -> PlannedWorker:
    """The planner's worker for ``nm`` with the devices of ``group`` in it."""
    worker = planner.best(nm)
    assert worker is not None
    mine = dict(zip(_in_class_order(planner.space.classes), _in_class_order(classes), strict=True))
    stages = tuple(replace(stage, device=mine[stage.device], memory=dict(stage.memory)) for stage in worker.stages)
    used = {stage.device for stage in stages}
    return replace(worker, stages=stages, unused=tuple(device for device in group.devices if device not in used))


def _in_class_order(classes: DeviceClasses) -> list[Device]:
    return [device for devices in classes.members for device in devices]


@dataclass(frozen=True)
class _Planner:
    """Plans virtual workers of one structure; remembers what it found.

    Attributes:
        finder: Over the partitions that are asked for.
        free: Over all partitions, for the lower bound; the same unless the cut is by hand.
        by_hand: Whether the cut is.
        ask: Makes the partition for an Nm in place of ``finder``, or says why it has none.
        searched: See `PlannedWorker`.
    """

    chain: BlockChain
    cluster: Cluster
    finder: Finder
    free: Finder
    by_hand: bool
    ask: Callable[[int], Found | PlanningError] | None
    exchange_ms: ExchangeMs | None
    searched: str
    _asked: dict[int, Found | PlanningError] = field(default_factory=dict)
    _best: dict[int, PlannedWorker | None] = field(default_factory=dict)

    @property
    def space(self) -> Search:
        """What costs and memory are computed with."""
        return self.finder.space

    def best(self, nm: int) -> PlannedWorker | None:
        """The fastest plan with ``nm`` minibatches in flight; None if none fits."""
        if nm not in self._best:
            held: PlannedWorker | None = None
            for found in self._partitions(nm):
                worker = self.with_best_vector(found, nm)
                if held is None or worker.period_ms < held.period_ms * (1 - _PERIOD_GAIN):
                    held = worker
            self._best[nm] = held
        return self._best[nm]

    def refusal(self, nm: int) -> PlanningError | None:
        """Why a partitioner of the user's has nothing for ``nm``."""
        answer = self._asked.get(nm)
        return answer if isinstance(answer, PlanningError) else None

    def _partitions(self, nm: int) -> list[Found]:
        """The distinct optimal partitions under each in-flight rule, leanest first; or the one that ``ask`` makes."""
        if self.ask is not None:
            answer = self._asked[nm] = self.ask(nm)
            return [] if isinstance(answer, PlanningError) else [answer]
        distinct: dict[tuple[object, object], Found] = {}
        for found in self.finder.under_each_rule(nm):
            distinct.setdefault((found.stages, found.classes), found)
        return list(distinct.values())

    def with_best_vector(
        self,
        found: Found,
        nm: int,
        candidates: Sequence[tuple[int, ...]] | None = None,
        recompute: tuple[bool, ...] | None = None,
    ) -> PlannedWorker:
        """``found`` with the vector of the shortest period: of those that fit in memory, or of ``candidates``.

        ``recompute``: per stage; None: as the rule says.
        """
        space = self.space
        stages = planned_stages(space, found, LEANEST.vector(nm, len(found.stages)), nm)
        activation_ms, gradient_ms = message_ms(self.chain.permuted(found.order), stages, self.cluster)
        forward_ms = np.array([stage.forward_ms for stage in stages])
        backward_ms = np.array(
            [space.sums(blocks).backward_ms[s.device.kind.name] for blocks, s in zip(found.stages, stages, strict=True)]
        )
        exchange = self._exchange(found, stages, nm)
        floor_ms = float((forward_ms + backward_ms).max())
        if candidates is None:
            limits = tuple(
                max(w for w in range(1, nm + 1) if w == 1 or space.fits_alone(stage, index, w, nm))
                for stage, index in zip(found.stages, found.classes, strict=True)
            )
            candidates = vectors(nm, limits)
        best: tuple[int, ...] = ()
        period_ms = np.inf
        for vector in candidates:
            again = recompute or space.recompute_flags(found, vector, nm)
            costs = PipelineCosts(
                forward_ms, backward_ms + np.where(again, forward_ms, 0.0), activation_ms, gradient_ms
            )
            candidate_ms = steady_period_ms(costs, vector)
            if exchange is not None and candidate_ms < period_ms * (1 - _PERIOD_GAIN):
                # Waiting for servers can only slow the pipeline, and costs more to simulate.
                candidate_ms = steady_period_ms(costs, vector, exchange)
            if candidate_ms < period_ms * (1 - _PERIOD_GAIN):
                best, period_ms = vector, candidate_ms
            if period_ms <= floor_ms * (1 + _PERIOD_GAIN):
                break
        stages = planned_stages(space, found, best, nm, recompute)
        return PlannedWorker(
            stages=stages,
            nm=nm,
            bottleneck_ms=max(stage.stage_ms for stage in stages),
            lower_bound_ms=self.free.lower_bound_ms(nm),
            order=found.order,
            searched=self.searched,
            period_ms=float(period_ms),
            samples_per_s=self.chain.batch_size * 1e3 / float(period_ms) if period_ms > 0 else float("inf"),
        )

    def _exchange(self, found: Found, stages: tuple[PlannedStage, ...], nm: int) -> WaveExchange | None:
        if self.exchange_ms is None:
            return None
        trainable = [self.space.sums(blocks).parameters for blocks in found.stages]
        per_stage = [self.exchange_ms(stage.device, size) for stage, size in zip(stages, trainable, strict=True)]
        staleness = self.space.memory_rule.staleness
        return WaveExchange(nm, staleness, np.array(per_stage)) if any(per_stage) else None
