"""Why a plan is as it is: ``--explain-plan``. Plain text, computed by solving again with something changed.

For each distinct virtual worker: its bottleneck and what it is made of, how far from the proven least, what limits Nm,
what another order of the blocks or of the devices would cost. For the whole plan: what one more GB of memory or GB/s of
bandwidth would bring, and what ``--policy auto`` planned besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from hetpipe_compiler.errors import PlanningError
from hetpipe_compiler.ir.blocks import BlockChain
from hetpipe_compiler.ir.cluster import Cluster, Link
from hetpipe_compiler.passes.allocate import Allocation, Group
from hetpipe_compiler.passes.concurrency import PlannedWorker
from hetpipe_compiler.passes.device_classes import device_classes
from hetpipe_compiler.passes.in_flight import LEANEST
from hetpipe_compiler.passes.partition_search import Search, search
from hetpipe_compiler.passes.stage_memory import MemoryRule

#: Plans an allocation on a changed cluster, with so many minibatches in flight (None: as many as are best).
Replan = Callable[[Cluster, Allocation, int | None], tuple[PlannedWorker, ...]]

_GB = 10**9
#: Orders of devices that are solved again at most.
_ORDERS = 120


@dataclass(frozen=True)
class Explained:
    """What the explanation is about.

    Attributes:
        replan: With the other options of the compilation.
        asked_nm: Whether Nm was given by hand.
    """

    chain: BlockChain
    cluster: Cluster
    allocation: Allocation
    workers: tuple[PlannedWorker, ...]
    replan: Replan
    staleness: int
    overlapped: bool
    asked_nm: bool


def explain_plan(about: Explained) -> str:
    """The whole text."""
    lines: list[str] = []
    for at in _distinct(about.workers):
        lines += [*_worker_lines(about, at), ""]
    lines += [_what_limits_nm(about), "", *_marginal_lines(about)]
    if about.allocation.runners_up:
        lines += ["", f"allocation: {about.allocation.policy}, {_rate(about.workers):.1f} samples/s; planned besides:"]
        lines += [f"  {other.samples_per_s:10.1f} samples/s  {other.policy}" for other in about.allocation.runners_up]
    if about.allocation.bound_samples_per_s is not None:
        lines.append(f"  {about.allocation.bound_samples_per_s:10.1f} samples/s  no allocation exceeds this")
    return "\n".join(lines)


def _distinct(workers: Sequence[PlannedWorker]) -> list[int]:
    """The first of each run of workers with the same plan on like devices."""
    seen: dict[object, int] = {}
    for at, worker in enumerate(workers):
        stages = tuple((s.device.kind.name, s.blocks, s.stage_ms, s.in_flight) for s in worker.stages)
        seen.setdefault((stages, worker.order), at)
    return [*seen.values()]


def _worker_lines(about: Explained, at: int) -> Iterator[str]:
    worker = about.workers[at]
    slowest = max(range(len(worker.stages)), key=lambda s: worker.stages[s].stage_ms)
    stage = worker.stages[slowest]
    yield f"vw{at} on {', '.join(s.device.id for s in worker.stages)}: {worker.samples_per_s:.1f} samples/s"
    yield (
        f"  bottleneck: stage {slowest} on {stage.device.id} ({stage.device.kind.name}), {stage.stage_ms:.3f} ms"
        f" = {stage.forward_ms:.3f} forward, {stage.backward_ms:.3f} backward, {stage.receive_ms:.3f} receiving"
    )
    space = _search(about, about.allocation.groups[at])
    if worker.optimal:
        yield f"  bound: proven, no partition of these devices with Nm = {worker.nm} has a smaller bottleneck"
    else:
        above = f"at most {100 * worker.gap:.2f} % above the least there is"
        yield f"  bound: {above}; proven: {worker.lower_bound_ms:.3f} ms"
    yield f"  computation alone, shared out at will, would take {space.lower_bound_ms:.3f} ms"
    in_order = space.least_in_order(worker.nm, LEANEST)
    if worker.order == tuple(range(len(about.chain))):
        yield "  blocks: in the model's own order"
    else:
        yield f"  blocks: in another order; the model's own reaches {in_order:.3f} ms at best"
    yield f"  devices: {_other_orders(about, at)}"
    if worker.unused:
        yield f"  unused: {', '.join(d.id for d in worker.unused)}: no partition with them has a smaller bottleneck"


def _search(about: Explained, group: Group) -> Search:
    classes = device_classes(group, about.cluster, about.chain)
    rule = MemoryRule.of(about.chain, about.staleness)
    return search(about.chain, classes, rule, overlapped=about.overlapped, max_sets=0)


def _what_limits_nm(about: Explained) -> str:
    nm = about.workers[0].nm
    if about.asked_nm:
        return f"Nm = {nm}: as asked for"
    held = _rate(about.workers)
    try:
        more = _rate(about.replan(about.cluster, about.allocation, nm + 1))
    except PlanningError as error:
        return f"Nm = {nm}, limited by memory: {error.message}"
    return f"Nm = {nm}: one more would bring {100 * (more / held - 1):+.2f} % and staler weights"


def _other_orders(about: Explained, at: int) -> str:
    """The best bottleneck with the used devices in another order."""
    worker = about.workers[at]
    used = [stage.device for stage in worker.stages]
    mine = tuple((d.kind.name, d.node) for d in used)
    if len(used) == 1:
        return "one"
    orders: dict[tuple[tuple[str, str], ...], Group] = {}
    swaps = ([*used[:i], used[i + 1], used[i], *used[i + 2 :]] for i in range(len(used) - 1))
    for order in permutations(used) if len(used) <= 5 else swaps:
        kinds = tuple((d.kind.name, d.node) for d in order)
        if kinds != mine and len(orders) < _ORDERS:
            orders.setdefault(kinds, Group(tuple(order), True))
    solved = [(_search(about, group).least_in_order(worker.nm, LEANEST), kinds) for kinds, group in orders.items()]
    if not solved:
        return "all alike, so their order does not matter"
    least, kinds = min(solved)
    if least == float("inf"):
        return "no other order fits in memory"
    names = ", ".join(kind for kind, _ in kinds)
    compared = "as good" if least <= worker.bottleneck_ms * (1 + 1e-9) else f"{least:.3f} ms"
    return f"second best order: {names} (or some of these): {compared} with the blocks in the model's own order"


def _marginal_lines(about: Explained) -> Iterator[str]:
    held = _rate(about.workers)
    yield f"one more of anything, everything planned anew ({held:.1f} samples/s now):"
    for kind in about.cluster.kinds():
        larger = replace(kind, memory_bytes=kind.memory_bytes + _GB)
        nodes = tuple(
            replace(n, devices=tuple(replace(d, kind=larger) if d.kind == kind else d for d in n.devices))
            for n in about.cluster.nodes
        )
        yield _gain(about, f"1 GB of memory on each {kind.name}", replace(about.cluster, nodes=nodes))
    links = {node.link: node.link.name for node in about.cluster.nodes if len(node.devices) > 1}
    for link, name in links.items():
        nodes = tuple(replace(n, link=_wider(n.link)) if n.link == link else n for n in about.cluster.nodes)
        yield _gain(about, f"1 GB/s on {name} inside nodes", replace(about.cluster, nodes=nodes))
    if len(about.cluster.nodes) > 1:
        wider = replace(about.cluster, network=_wider(about.cluster.network))
        yield _gain(about, f"1 GB/s on {about.cluster.network.name} between nodes", wider)


def _wider(link: Link) -> Link:
    return replace(link, bandwidth_gb_s=link.bandwidth_gb_s + 1.0)


def _gain(about: Explained, what: str, cluster: Cluster) -> str:
    groups = tuple(
        replace(group, devices=tuple(cluster.device(d.id) for d in group.devices)) for group in about.allocation.groups
    )
    try:
        nm = about.workers[0].nm if about.asked_nm else None
        rate = _rate(about.replan(cluster, replace(about.allocation, groups=groups), nm))
    except PlanningError as error:  # pragma: no cover - more of anything still fits
        return f"  {what}: {error.message}"
    return f"  {what}: {rate - _rate(about.workers):+.1f} samples/s"


def _rate(workers: Sequence[PlannedWorker]) -> float:
    return len(workers) * min(worker.samples_per_s for worker in workers)
