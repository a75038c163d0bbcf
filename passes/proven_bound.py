"""How fast a plan can be at best, proven without searching for one: bisection over what the relaxation rules out.

That is quick enough for the atomic components themselves, of which there may be ten times as many as blocks. So it
tells what merging them into blocks costs at most, against the best partition of the components.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hetpipe_compiler.ir.blocks import BlockChain
from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.passes.allocate import Group
from hetpipe_compiler.passes.block_graph import BlockGraph, block_graph
from hetpipe_compiler.passes.closed_sets import ClosedSets, closed_sets
from hetpipe_compiler.passes.cut_space import CutSpace, cut_space
from hetpipe_compiler.passes.device_classes import device_classes, tails
from hetpipe_compiler.passes.in_flight import LEANEST, InFlightRule
from hetpipe_compiler.passes.stage_memory import MemoryRule
from hetpipe_compiler.passes.work_bound import work_bound

#: The relaxation's first cap lies so far above the lower bound, and its last two caps so near each other (relative).
_FIRST_STEP, NEAR = 0.01, 5e-4
#: Caps that the relaxation tries at most.
_STEPS = 60
#: Larger graphs of components, and those with more closed sets, are bounded by computation alone.
MAX_COMPONENTS, MAX_SETS = 10_000, 200_000
#: Work of the relaxation on them: some ten seconds of one core.
_BUDGET = 400_000_000


def bracket(space: CutSpace, nm: int, rule: InFlightRule, least: float, budget: int) -> tuple[float, float, int]:
    """Two caps: no plan is within the first; the second may allow one, or is ``least``. And the work done.

    Where nothing is held and the relaxation allows no plan at all both are infinite.
    """
    below, above, step, work = space.lower_bound_ms, least, _FIRST_STEP, 0
    if np.isinf(least):
        some, work = space.may_reach(nm, rule, space.most_ms)
        below, above = (below, space.most_ms) if some else (least, least)
    for _ in range(_STEPS):
        if below * (1 + NEAR) >= above or work > budget:
            break
        cap = min(below * (1 + step), (below + above) / 2) or above / 2
        some, done = space.may_reach(nm, rule, cap)
        work += done
        below, above = (below, cap) if some else (cap, above)
        step *= 2
    return below, above, work


def uncoarsened_bounds_ms(
    whole: BlockChain,
    held: Sequence[tuple[Group, int, float]],
    cluster: Cluster,
    rule: MemoryRule,
    *,
    overlapped: bool = False,
) -> tuple[float, ...]:
    """`uncoarsened_bound_ms` for several (group, nm, held_ms); groups that are alike are bounded once."""
    space = ComponentSpace(whole)
    known: dict[Hashable, float] = {}
    bounds = []
    for group, nm, held_ms in held:
        key = (device_classes(group, cluster, whole).key, nm, held_ms)
        if key not in known:
            known[key] = uncoarsened_bound_ms(
                whole, group, cluster, nm, rule, held_ms, overlapped=overlapped, among=space
            )
        bounds.append(known[key])
    return tuple(bounds)


@dataclass(frozen=True)
class ComponentSpace:
    """The components' graph and its closed sets, where there are not too many: found when first asked for."""

    whole: BlockChain

    @cached_property
    def graph(self) -> BlockGraph | None:
        """None where there are too many components."""
        return block_graph(self.whole) if len(self.whole) <= MAX_COMPONENTS else None

    @cached_property
    def sets(self) -> ClosedSets | None:
        """None where there are too many."""
        return closed_sets(self.graph, MAX_SETS) if self.graph is not None else None


def uncoarsened_bound_ms(
    whole: BlockChain,
    group: Group,
    cluster: Cluster,
    nm: int,
    rule: MemoryRule,
    held_ms: float,
    *,
    overlapped: bool = False,
    among: ComponentSpace | None = None,
) -> float:
    """No partition of ``whole`` (a block a component) with ``nm`` in flight has a smaller bottleneck, of any rule.

    ``held_ms``: the bottleneck of some such partition, so the result is at most that.
    """
    counts = Counter(device.kind.name for device in group.devices)
    node_ms = np.stack([whole.forward_ms[kind] + whole.backward_ms[kind] for kind in counts])
    bound_ms = work_bound(node_ms, np.array([*counts.values()])).bottleneck_ms
    among = among or ComponentSpace(whole)
    graph, sets = among.graph, among.sets
    if graph is not None and sets is not None:
        classes = device_classes(group, cluster, whole)
        pipelines = tails(classes, len(graph))
        space = cut_space(whole, graph, sets, classes, pipelines, rule, overlapped=overlapped, relaxed=True)
        bound_ms = max(bound_ms, bracket(space, nm, LEANEST, held_ms, _BUDGET)[0])
    return min(bound_ms, held_ms)
