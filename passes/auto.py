"""Policy ``auto``: search for the grouping of devices into virtual workers that trains the most samples a second.

Under WSP all virtual workers keep the pace of the slowest, so N of them make ``N x batch / (slowest period)``.

1. For each number of virtual workers several groupings are dealt: equal shares of every kind, equal power with the
   strongest device first, and runs of neighbours; each with all devices, and without the weakest kinds.
2. Each is *estimated*: a virtual worker's period by the bottleneck of a shortened chain in its own order, 1F1B in
   memory. Virtual workers of the same structure are estimated once.
3. The best estimates are improved: a device leaves the group with power to spare for the slowest one, or two devices
   change places, while the estimate gains.
4. The best of these are *planned*, where a chain is long with its blocks merged into fewer. NP, ED, HD and the best
   other are planned as a compilation would. The best of NP, ED and HD wins, or the other if it is more than 0.1 %
   better. So ``auto`` is never below any of the three.

Steps 1 to 3 are a heuristic. What no grouping can exceed is known: see `rate_bound`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hetpipe_compiler.errors import PlanningError
from hetpipe_compiler.ir.blocks import BlockChain
from hetpipe_compiler.ir.cluster import Cluster, Device
from hetpipe_compiler.passes.allocate import Allocation, Group, RunnerUp, allocate
from hetpipe_compiler.passes.block_graph import block_graph
from hetpipe_compiler.passes.concurrency import PlannedWorker
from hetpipe_compiler.passes.device_classes import device_classes
from hetpipe_compiler.passes.in_flight import InFlightRule
from hetpipe_compiler.passes.multilevel import shorten_chain
from hetpipe_compiler.passes.partition_search import search
from hetpipe_compiler.passes.stage_memory import MemoryRule, Recompute
from hetpipe_compiler.passes.work_bound import work_bound

PlanWorkers = Callable[[Allocation], tuple[PlannedWorker, ...]]
Groups = tuple[tuple[Device, ...], ...]
_Rated = tuple[Allocation, float]

#: Policies that are always planned, in this order.
BASELINES = ("NP", "ED", "HD")
#: Blocks of the chain that estimates are made with.
_ESTIMATE_BLOCKS = 48
#: Devices in one virtual worker at most.
_LARGEST_GROUP = 16
#: Structures of virtual workers that are estimated at most.
_ESTIMATES = 1500
#: Groupings that are improved, and that are planned.
_IMPROVED, _PLANNED = 6, 6
#: Other candidates than the baselines must be better by this factor.
_GAIN = 1e-3


def auto_allocation(
    chain: BlockChain,
    cluster: Cluster,
    plan: PlanWorkers,
    *,
    quick: PlanWorkers | None = None,
    staleness: int = 0,
    overlapped: bool = False,
    recompute: Recompute = Recompute.NEVER,
) -> Allocation:
    """The best allocation found, with the runners-up.

    Args:
        plan: Plans the virtual workers of an allocation, as the compilation will.
        quick: Plans nearly as well in less time; None: ``plan``.

    Raises:
        PlanningError: HP301 and others, if nothing fits: what the first policy raises.
    """
    estimator = _Estimator(chain, cluster, MemoryRule.of(chain, staleness, recompute=recompute), overlapped)
    candidates = [allocate(cluster, policy) for policy in BASELINES]
    seen = {_shape(tuple(g.devices for g in a.groups), estimator) for a in candidates}
    for groups in _promising(cluster, estimator):
        shape = _shape(groups, estimator)
        if shape not in seen and len(seen) < len(BASELINES) + _PLANNED:
            seen.add(shape)
            used = {device.id for group in groups for device in group}
            unused = tuple(device for device in cluster.devices if device.id not in used)
            candidates.append(Allocation(_name(groups), tuple(map(Group, groups)), unused))
    others: list[_Rated] = []
    if quick is not None:
        ranked, _ = _rated(candidates[len(BASELINES) :], quick)
        ranked.sort(key=_rate, reverse=True)
        candidates = [*candidates[: len(BASELINES)], *(allocation for allocation, _ in ranked[:1])]
        others = ranked[1:]
    rated, failure = _rated(candidates, plan)
    if not rated:
        assert failure is not None
        raise failure
    best = rated[0]
    for other in rated[1:]:
        needed = best[1] if other[0].policy in BASELINES else best[1] * (1 + _GAIN)
        best = other if other[1] > needed else best
    others += [item for item in rated if item is not best]
    runners_up = tuple(RunnerUp(item[0].policy, item[1]) for item in sorted(others, key=_rate, reverse=True))
    return replace(
        best[0],
        policy=f"auto ({best[0].policy})",
        runners_up=runners_up,
        bound_samples_per_s=rate_bound(chain, cluster),
    )


def _rated(candidates: Iterable[Allocation], plan: PlanWorkers) -> tuple[list[_Rated], PlanningError | None]:
    """Samples a second of those that can be planned, and why the first that cannot be cannot."""
    rated: list[_Rated] = []
    failure: PlanningError | None = None
    for candidate in candidates:
        try:
            workers = plan(candidate)
        except PlanningError as error:
            failure = failure or error
            continue
        rated.append((candidate, len(workers) * min(worker.samples_per_s for worker in workers)))
    return rated, failure


def _rate(item: _Rated) -> float:
    return item[1]


def rate_bound(chain: BlockChain, cluster: Cluster) -> float:
    """Samples a second that no grouping of the cluster's devices can exceed, from computation alone.

    With the prices of `work_bound` for all devices at once, a virtual worker whose slowest stage takes P has devices
    worth the whole model's worth W over P at least. So N workers need N W / P <= 1: the rate N / P is at most 1 / W.
    """
    kinds = Counter(device.kind.name for device in cluster.devices)
    graph = block_graph(chain, linear=True)
    node_ms = np.stack([graph.node_ms(chain.forward_ms[kind] + chain.backward_ms[kind]) for kind in kinds])
    worth = float(work_bound(node_ms, np.array([*kinds.values()])).worth.sum())
    return chain.batch_size * 1e3 / worth if worth > 0 else float("inf")


def _name(groups: Groups) -> str:
    """Make-up of the groups, most frequent first: ``4 x (titan-v + rtx-2060)``."""
    made = Counter(
        " + ".join(f"{n} {kind}" if n > 1 else kind for kind, n in sorted(Counter(d.kind.name for d in group).items()))
        for group in groups
    )
    return ", ".join(
        f"{count} x ({what})" for what, count in sorted(made.items(), key=lambda item: (-item[1], item[0]))
    )


@dataclass(frozen=True)
class _Estimator:
    """Estimated periods of virtual workers; each structure is computed once."""

    chain: BlockChain
    cluster: Cluster
    rule: MemoryRule
    overlapped: bool
    _short: list[BlockChain] = field(default_factory=list)
    _known: dict[Hashable, float] = field(default_factory=dict)
    _keys: dict[tuple[str, ...], Hashable] = field(default_factory=dict)

    def power(self, device: Device) -> float:
        """Whole models a millisecond."""
        name = device.kind.name
        whole_ms = float(self.chain.forward_ms[name].sum() + self.chain.backward_ms[name].sum())
        return 1.0 / whole_ms if whole_ms > 0 else 1e9

    def key(self, group: tuple[Device, ...]) -> Hashable:
        """Equal for groups with the same plans."""
        ids = tuple(device.id for device in group)
        if ids not in self._keys:
            self._keys[ids] = device_classes(Group(group), self.cluster, self.chain).key
        return self._keys[ids]

    def period_ms(self, group: tuple[Device, ...]) -> float:
        """Infinite where nothing fits, or there is no room for more estimates."""
        key = self.key(group)
        if key not in self._known:
            self._known[key] = self._estimated(group) if len(self._known) < _ESTIMATES else float("inf")
        return self._known[key]

    def rate(self, groups: Groups) -> float:
        """Minibatches a millisecond of all together."""
        slowest = max(map(self.period_ms, groups))
        return len(groups) / slowest if slowest > 0 else float("inf")

    def _estimated(self, group: tuple[Device, ...]) -> float:
        if not self._short:
            self._short.append(shorten_chain(self.chain, _ESTIMATE_BLOCKS))
        try:
            classes = device_classes(Group(group), self.cluster, self._short[0])
            space = search(self._short[0], classes, self.rule, overlapped=self.overlapped, max_sets=0)
            return space.least_in_order(min(4, len(group)), InFlightRule(1.0))
        except PlanningError:
            return float("inf")


def _shape(groups: Groups, estimator: _Estimator) -> Hashable:
    return frozenset(Counter(estimator.key(group) for group in groups).items())


def _promising(cluster: Cluster, estimator: _Estimator) -> list[Groups]:
    """Groupings, best estimate first."""
    found: dict[Hashable, tuple[float, Groups]] = {}

    def consider(groups: Groups) -> None:
        shape = _shape(groups, estimator)
        if shape not in found:
            found[shape] = (estimator.rate(groups), groups)

    for devices in _subsets(cluster, estimator):
        for count in _counts(len(devices)):
            for groups in _dealt(devices, count, estimator):
                if max(map(len, groups)) <= _LARGEST_GROUP:
                    consider(groups)
    ranked = sorted(found.values(), key=lambda item: -item[0])
    for rate, groups in ranked[:_IMPROVED]:
        if rate > 0:
            consider(_improved(groups, estimator))
    ranked = sorted(found.values(), key=lambda item: -item[0])
    return [groups for rate, groups in ranked if rate > 0]


def _subsets(cluster: Cluster, estimator: _Estimator) -> Iterable[tuple[Device, ...]]:
    """All devices, then without the weakest kind, the two weakest, ..."""
    kinds = sorted(cluster.kinds(), key=lambda kind: next(
        estimator.power(d) for d in cluster.devices if d.kind.name == kind.name
    ))  # fmt: skip
    for skipped in range(len(kinds)):
        left_out = {kind.name for kind in kinds[:skipped]}
        yield tuple(device for device in cluster.devices if device.kind.name not in left_out)


def _counts(devices: int) -> list[int]:
    """Numbers of virtual workers to try: every one of a few devices; of many, those that divide them well."""
    least = -(-devices // _LARGEST_GROUP)
    if devices <= 32:
        return [*range(least, devices + 1)]
    return sorted({max(least, devices // size) for size in range(1, _LARGEST_GROUP + 1)})


def _dealt(devices: tuple[Device, ...], count: int, estimator: _Estimator) -> Iterable[Groups]:
    strongest = sorted(devices, key=lambda device: -estimator.power(device))
    # Equal shares of every kind: round after round, forth and back.
    rounds: list[list[Device]] = [[] for _ in range(count)]
    for at, device in enumerate(strongest):
        turn, place = divmod(at, count)
        rounds[place if turn % 2 == 0 else count - 1 - place].append(device)
    yield _sorted(rounds, devices)
    # Equal power, the next device to the weakest group.
    powers = [0.0] * count
    even: list[list[Device]] = [[] for _ in range(count)]
    for device in strongest:
        weakest = powers.index(min(powers))
        even[weakest].append(device)
        powers[weakest] += estimator.power(device)
    yield _sorted(even, devices)
    # Neighbours: cut the file's order where the power is shared out.
    total, reached = sum(map(estimator.power, devices)), 0.0
    runs: list[list[Device]] = [[] for _ in range(count)]
    for at, device in enumerate(devices):
        middle = reached + estimator.power(device) / 2
        place = min(count - 1, int(middle / total * count), at)
        place = max(place, count - (len(devices) - at))
        runs[place].append(device)
        reached += estimator.power(device)
    if all(runs):
        yield _sorted(runs, devices)


def _sorted(groups: Sequence[Sequence[Device]], devices: tuple[Device, ...]) -> Groups:
    at = {device.id: index for index, device in enumerate(devices)}
    return tuple(tuple(sorted(group, key=lambda device: at[device.id])) for group in groups if group)


def _improved(groups: Groups, estimator: _Estimator) -> Groups:
    """Move a device to the slowest group, or swap two, while the slowest gets faster."""
    held = estimator.rate(groups)
    for _ in range(4 * len(groups)):
        slowest = max(range(len(groups)), key=lambda at: estimator.period_ms(groups[at]))
        better = next(
            (moved for moved in _moves(groups, slowest, estimator) if estimator.rate(moved) > held * (1 + _GAIN)), None
        )
        if better is None:
            return groups
        groups, held = better, estimator.rate(better)
    return groups


def _moves(groups: Groups, slowest: int, estimator: _Estimator) -> Iterable[Groups]:
    """One move for each distinct (group, kind and node of the devices) that could help the slowest group."""
    tried: set[Hashable] = set()
    mine = groups[slowest]
    for other in sorted(range(len(groups)), key=lambda at: estimator.period_ms(groups[at])):
        if other == slowest:
            continue
        for given in groups[other]:
            kept = tuple(d for d in groups[other] if d is not given)
            for back in (None, *mine):
                if back is not None and estimator.power(back) >= estimator.power(given):
                    continue
                what = (estimator.key(groups[other]), given.kind.name, given.node, back and (back.kind.name, back.node))
                if what in tried or (back is None and (not kept or len(mine) == _LARGEST_GROUP)):
                    continue
                tried.add(what)
                changed = list(groups)
                changed[slowest] = (*(d for d in mine if d is not back), given)
                changed[other] = kept if back is None else (*kept, back)
                yield tuple(changed)
