"""Why a plan is as it is: ``--explain-plan``. Plain text, computed by solving again with something changed.

For the whole plan: what sets the pace. For each distinct virtual worker: its bottleneck and what it is made of, how far
from the proven least, what memory and links cost it, what another order of the blocks or of the devices would. Then
what limits Nm, what one more GB of memory, GB/s of bandwidth or a faster kind of device would bring, and alternatives.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations

from hetpipe_compiler.errors import PlanningError
from hetpipe_compiler.ir.blocks import BlockChain
from hetpipe_compiler.ir.cluster import Cluster, DeviceKind, Link
from hetpipe_compiler.passes.allocate import Allocation, Group
from hetpipe_compiler.passes.auto import rate_bound
from hetpipe_compiler.passes.concurrency import PlannedWorker
from hetpipe_compiler.passes.device_classes import device_classes
from hetpipe_compiler.passes.in_flight import LEANEST
from hetpipe_compiler.passes.partition import relative_gap
from hetpipe_compiler.passes.partition_search import Search, search
from hetpipe_compiler.passes.stage_memory import MemoryRule, Recompute, stage_memory
from hetpipe_compiler.passes.stage_sums import stage_sums

_GB = 10**9
#: Orders of devices that are solved again at most.
_ORDERS = 120
#: Columns of a terminal, at least.
_WIDTH = 80
#: A device kind is imagined faster by this factor.
_FASTER = 1.1
#: Percent that are worth a line.
_WORTH = 0.05


@dataclass(frozen=True)
class Asked:
    """What is planned again with what changed; None stands for what the compilation had.

    Attributes:
        by_search: With our search making the stages, whoever made the plan's.
    """

    chain: BlockChain | None = None
    cluster: Cluster | None = None
    nm: int | None = None
    objective: str | None = None
    by_search: bool = False


@dataclass(frozen=True)
class Explained:
    """What the explanation is about.

    Attributes:
        whole: The chain before components were merged into blocks; None where none were.
        uncoarsened_bounds_ms: Per virtual worker, what no partition of the components can better.
        replan: Plans the allocation again with something changed, all else as in the compilation.
        recost: Costs the plan as it stands with something changed.
        asked_nm: Whether Nm was given by hand.
        made_by: Who made the stages: ``search`` or another.
        fixed: Whether nothing was left to plan.
    """

    chain: BlockChain
    cluster: Cluster
    allocation: Allocation
    workers: tuple[PlannedWorker, ...]
    replan: Callable[[Asked], tuple[PlannedWorker, ...]]
    recost: Callable[[Asked], tuple[PlannedWorker, ...]]
    staleness: int
    objective: str
    asked_nm: bool
    recompute: Recompute = Recompute.WHERE_NEEDED
    made_by: str = "search"
    fixed: bool = False
    whole: BlockChain | None = None
    uncoarsened_bounds_ms: tuple[float, ...] = ()

    @property
    def overlapped(self) -> bool:
        """Whether a stage's time is the longer of computation and transfers."""
        return self.objective == "overlapped"


def explain_plan(about: Explained) -> str:
    """The whole text, no line wider than a small terminal unless a name is."""
    lines = [*_pace_lines(about), ""]
    for at in _distinct(about.workers):
        lines += [*_worker_lines(about, at), ""]
    lines += [_what_limits_nm(about), "", *_marginal_lines(about), "", *_alternative_lines(about)]
    return "\n".join(wrapped for line in lines for wrapped in _wrapped(line))


def _wrapped(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]


def _pace_lines(about: Explained) -> Iterator[str]:
    """Under WSP all virtual workers keep the pace of the slowest."""
    rates = [worker.samples_per_s for worker in about.workers]
    slowest = rates.index(min(rates))
    yield f"{about.allocation.policy}: {_rate(about.workers):.1f} samples/s"
    if len(rates) > 1:
        others = [1 - min(rates) / rate for rate in rates if rate > min(rates) * (1 + _WORTH / 100)]
        idle = (
            f"; {len(others)} faster ones wait for it up to {100 * max(others):.0f} % of their time" if others else ""
        )
        yield f"  pace: {len(rates)} x {min(rates):.1f}, as vw{slowest} is the slowest{idle}"
    bound = rate_bound(about.chain, about.cluster)
    yield f"  bound: no grouping of these devices exceeds {bound:.1f} samples/s (computation alone)"


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
    yield f"  period: {worker.period_ms:.3f} ms a minibatch, {_busy(worker)}"
    yield from _recompute_lines(about, worker)
    space = _search(about, about.allocation.groups[at])
    if worker.optimal:
        yield f"  bound: proven, no partition of these devices with Nm = {worker.nm} has a smaller bottleneck"
    else:
        above = f"at most {100 * worker.gap:.2f} % above the least there is"
        yield f"  bound: {above}; proven: {worker.lower_bound_ms:.3f} ms"
    yield f"  searched: {worker.searched}"
    in_order = space.least_in_order(worker.nm, LEANEST)
    yield (
        f"  why not faster: {_limits(about, at, in_order)};"
        f" with computation shared out at will and nothing else {space.lower_bound_ms:.3f} ms"
    )
    if worker.order == tuple(range(len(about.chain))):
        yield "  blocks: in the model's own order"
    else:
        yield f"  blocks: in another order; the model's own reaches {in_order:.3f} ms at best"
    if about.whole is not None:
        yield f"  coarsening: {_coarsening(about, about.whole, at)}"
    yield f"  devices: {_other_orders(about, at)}"
    yield f"  memory: {_fullest(worker)}"
    if worker.unused:
        why = "no partition with them has a smaller bottleneck" if worker.optimal else "the best plan found needs none"
        yield f"  unused: {', '.join(d.id for d in worker.unused)}: {why}"


def _recompute_lines(about: Explained, worker: PlannedWorker) -> Iterator[str]:
    """Which stages run their forward again, and what they would need without."""
    rule = MemoryRule.of(about.chain, about.staleness)
    for at, stage in enumerate(worker.stages):
        if not stage.recompute:
            continue
        sums = stage_sums(about.chain, worker.order[slice(*stage.blocks)])
        plain = stage_memory(sums, stage.in_flight, stage.device.kind, rule, worker.nm)["total"]
        yield (
            f"  recompute: stage {at} runs its forward again ({stage.forward_ms:.3f} ms of its backward) to hold"
            f" {stage.memory['total'] / _GB:.2f} GB instead of {plain / _GB:.2f};"
            f" {stage.device.id} has {stage.memory['capacity'] / _GB:.2f}"
        )


def _busy(worker: PlannedWorker) -> str:
    """How much of its time the busiest stage computes."""
    compute_ms = [stage.forward_ms + stage.backward_ms for stage in worker.stages]
    busiest = compute_ms.index(max(compute_ms))
    share = max(compute_ms) / worker.period_ms if worker.period_ms > 0 else 1.0
    if share > 1 - _WORTH / 100:
        return f"in which stage {busiest} computes all the time"
    return f"in which stage {busiest} computes {100 * share:.1f} % and waits for other stages and servers the rest"


def _limits(about: Explained, at: int, in_order: float) -> str:
    """What the least bottleneck would be with memory, or with links, for nothing."""
    nm, group = about.workers[at].nm, about.allocation.groups[at]
    roomy = _changed_kinds(about.cluster, lambda kind: replace(kind, memory_bytes=1 << 60))
    free = Link("free", float("inf"), 0.0)
    nodes = tuple(replace(node, link=free) for node in about.cluster.nodes)
    linked = replace(about.cluster, nodes=nodes, network=free)
    least = {}
    for name, cluster in (("memory", roomy), ("links", linked)):
        least[name] = _search(about, _of(cluster, group), cluster).least_in_order(nm, LEANEST)
    texts = (f"{ms:.3f} ms" if ms < in_order * (1 - 1e-9) else "the same" for ms in least.values())
    return "without limits of memory {}; with free links {}".format(*texts)


def _fullest(worker: PlannedWorker) -> str:
    share = [stage.memory["total"] / max(1, stage.memory["capacity"]) for stage in worker.stages]
    at = share.index(max(share))
    stage = worker.stages[at]
    used, capacity = (stage.memory[name] / _GB for name in ("total", "capacity"))
    return f"fullest is stage {at} on {stage.device.id}: {used:.2f} of {capacity:.2f} GB ({100 * share[at]:.0f} %)"


def _changed_kinds(cluster: Cluster, change: Callable[[DeviceKind], DeviceKind]) -> Cluster:
    nodes = tuple(
        replace(node, devices=tuple(replace(device, kind=change(device.kind)) for device in node.devices))
        for node in cluster.nodes
    )
    return replace(cluster, nodes=nodes)


def _of(cluster: Cluster, group: Group) -> Group:
    """The same devices of another version of the cluster."""
    return replace(group, devices=tuple(cluster.device(device.id) for device in group.devices))


def _coarsening(about: Explained, whole: BlockChain, at: int) -> str:
    """What a plan of blocks costs at most against the best plan of the components in them."""
    bound_ms = about.uncoarsened_bounds_ms[at]
    above = relative_gap(about.workers[at].bottleneck_ms, bound_ms)
    return (
        f"{len(about.chain)} blocks of {len(whole)} components; costs at most {100 * above:.2f} %:"
        f" no partition of the components has a bottleneck below {bound_ms:.3f} ms"
    )


def _search(about: Explained, group: Group, cluster: Cluster | None = None) -> Search:
    classes = device_classes(group, cluster or about.cluster, about.chain)
    rule = MemoryRule.of(about.chain, about.staleness, recompute=about.recompute)
    return search(about.chain, classes, rule, overlapped=about.overlapped, max_sets=0)


def _what_limits_nm(about: Explained) -> str:
    nm = about.workers[0].nm
    if about.asked_nm:
        return f"Nm = {nm}: as asked for"
    try:
        more = _rate(about.replan(Asked(nm=nm + 1)))
    except PlanningError as error:
        return f"Nm = {nm}, limited by memory: {error.message}"
    return f"Nm = {nm}: one more would bring {100 * (more / _rate(about.workers) - 1):+.2f} % and staler weights"


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
    """What more of something would bring, where everything may be planned anew or left as it is."""
    cluster = about.cluster
    memory, bandwidth, speed = "1 GB of memory on each", "1 GB/s on", f"{100 * _FASTER - 100:.0f} % more speed of each"
    changes: dict[tuple[str, str], Asked] = {}
    for kind in cluster.kinds():
        changes[memory, kind.name] = Asked(cluster=_changed_kinds(cluster, partial(_larger, kind)))
    for link in dict.fromkeys(node.link for node in cluster.nodes if len(node.devices) > 1):
        nodes = tuple(replace(n, link=_wider(n.link)) if n.link == link else n for n in cluster.nodes)
        changes[bandwidth, f"{link.name} inside nodes"] = Asked(cluster=replace(cluster, nodes=nodes))
    if len(cluster.nodes) > 1:
        wider = replace(cluster, network=_wider(cluster.network))
        changes[bandwidth, f"{cluster.network.name} between nodes"] = Asked(cluster=wider)
    for kind in cluster.kinds():
        changes[speed, kind.name] = Asked(chain=_faster(about.chain, kind))
    held = _rate(about.workers)
    yield f"one more of anything, with the plan kept{'' if about.fixed else ' or made anew'}:"
    nothing: dict[str, list[str]] = {}
    for (what, where), asked in changes.items():
        gain = _best_rate(about, asked) - held
        if gain > held * _WORTH / 100:
            yield f"  {what} {where}: {gain:+.1f} samples/s"
        else:
            nothing.setdefault(what, []).append(where)
    if nothing:
        listed = (f"{what} {', '.join(where)}" for what, where in nothing.items())
        yield f"  nothing: {'; '.join(listed)}"


def _best_rate(about: Explained, asked: Asked) -> float:
    kept = _rate(about.recost(asked))
    if about.fixed:
        return kept
    try:
        return max(kept, _rate(about.replan(asked)))
    except PlanningError:  # pragma: no cover - more of anything still fits
        return kept


def _faster(chain: BlockChain, kind: DeviceKind) -> BlockChain:
    forward_ms, backward_ms = (
        {name: ms / _FASTER if name == kind.name else ms for name, ms in times.items()}
        for times in (chain.forward_ms, chain.backward_ms)
    )
    return replace(chain, forward_ms=forward_ms, backward_ms=backward_ms)


def _alternative_lines(about: Explained) -> Iterator[str]:
    yield "instead:"
    other = "hetpipe" if about.overlapped else "overlapped"
    asked = {f"--objective {other}": Asked(objective=other)}
    if about.made_by != "search":
        asked = {"stages by our search": Asked(by_search=True)}
    for what, changed in asked.items():
        try:
            yield f"  {_rate(about.replan(changed)):10.1f} samples/s  {what}"
        except PlanningError as error:
            yield f"  {what}: {error.message}"
    for runner_up in about.allocation.runners_up:
        yield f"  {runner_up.samples_per_s:10.1f} samples/s  {runner_up.policy}"


def _larger(kind: DeviceKind, other: DeviceKind) -> DeviceKind:
    """``other``, with one GB more if it is ``kind``."""
    return replace(kind, memory_bytes=kind.memory_bytes + _GB) if other == kind else other


def _wider(link: Link) -> Link:
    return replace(link, bandwidth_gb_s=link.bandwidth_gb_s + 1.0)


def _rate(workers: Sequence[PlannedWorker]) -> float:
    return len(workers) * min(worker.samples_per_s for worker in workers)
