"""How fast a plan can be at best, proven without searching for one: bisection over what the relaxation rules out.

That is quick enough for the atomic components themselves, of which there may be ten times as many as blocks. So it
tells what merging them into blocks costs at most, against the best partition of the components.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from hetpipe_compiler.ir.blocks import BlockChain
from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.passes.allocate import Group
from hetpipe_compiler.passes.block_graph import block_graph
from hetpipe_compiler.passes.closed_sets import closed_sets
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


def uncoarsened_bound_ms(
    whole: BlockChain,
    group: Group,
    cluster: Cluster,
    nm: int,
    rule: MemoryRule,
    held_ms: float,
    *,
    overlapped: bool = False,
) -> float:
    """No partition of ``whole`` (a block a component) with ``nm`` in flight has a smaller bottleneck, of any rule.

    ``held_ms``: the bottleneck of some such partition, so the result is at most that.
    """
    counts = Counter(device.kind.name for device in group.devices)
    node_ms = np.stack([whole.forward_ms[kind] + whole.backward_ms[kind] for kind in counts])
    bound_ms = work_bound(node_ms, np.array([*counts.values()])).bottleneck_ms
    graph = block_graph(whole) if len(whole) <= MAX_COMPONENTS else None
    sets = closed_sets(graph, MAX_SETS) if graph is not None else None
    if graph is not None and sets is not None:
        classes = device_classes(group, cluster, whole)
        pipelines = tails(classes, len(graph))
        space = cut_space(whole, graph, sets, classes, pipelines, rule, overlapped=overlapped, relaxed=True)
        bound_ms = max(bound_ms, bracket(space, nm, LEANEST, held_ms, _BUDGET)[0])
    return min(bound_ms, held_ms)
