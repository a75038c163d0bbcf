"""Brute force for the partitioner: every order of every subset of the devices, every cut, costs summed value by value.

Plain Python written from the specification (graph-format.md, spec sections 2 and 4); shares no code with the passes.
"""

from __future__ import annotations

import math
from itertools import combinations, pairwise, permutations

INFINITE = math.inf


def stage_ms(chain, cluster, devices, cuts, stage):
    """Forward + backward on the stage's device, and what it receives from its neighbours over the actual links."""
    lo, hi = cuts[stage]
    device = devices[stage]
    kind = device.kind.name
    total = sum(float(chain.forward_ms[kind][b]) + float(chain.backward_ms[kind][b]) for b in range(lo, hi))
    received = sum(v.forward_bytes for v in chain.values if v.producer < lo and any(lo <= c < hi for c in v.consumers))
    returned = sum(
        v.backward_bytes for v in chain.values if lo <= v.producer < hi and any(c >= hi for c in v.consumers)
    )
    if received:
        total += _transfer_ms(cluster, devices[stage - 1], device, received)
    if returned:
        total += _transfer_ms(cluster, devices[stage + 1], device, returned)
    return total


def _transfer_ms(cluster, a, b, n_bytes):
    link = next(node.link for node in cluster.nodes if node.name == a.node) if a.node == b.node else cluster.network
    return n_bytes / (link.bandwidth_gb_s * 1e6) + link.latency_us / 1e3


def stage_bytes(chain, cut, in_flight, device, own_sums=2):
    """Memory of a stage, from the table of parts in the specification of the planner."""
    if chain.resident is not None:
        return sum(chain.resident[b] for b in range(*cut))
    lo, hi = cut
    held = lambda items: sum(i.bytes for i in items if any(lo <= b < hi for b in i.blocks))  # noqa: E731
    parameters = held(chain.parameters)
    read = [v for v in chain.values if v.producer < lo and any(lo <= c < hi for c in v.consumers)]
    made = [v for v in chain.values if lo <= v.producer < hi and v.consumers[-1] >= hi]
    total = device.kind.reserve_bytes + held(chain.frozen)
    total += parameters * (1 + 1 + own_sums) + math.ceil(parameters * chain.optimizer_factor)
    if in_flight > 1:
        total += parameters * in_flight
    total += in_flight * (held(chain.saved) + sum(v.forward_bytes for v in read))
    return total + sum(v.backward_bytes for v in read) + sum(v.backward_bytes for v in made)


def in_flight(nm, stages, growth):
    """Nm on the first stage, 1 on the last, in between ``1 + growth x distance to the last`` up to Nm."""
    if stages == 1:
        return (1,)
    middle = [
        min(nm, 1 + math.ceil(growth * (stages - 1 - s))) if growth < INFINITE else nm for s in range(1, stages - 1)
    ]
    return (nm, *middle, 1)


def all_plans(chain, devices, *, ordered=False, boundaries=None):
    """(devices in stage order, cuts) of every possible pipeline."""
    n = len(chain.blocks)
    for count in range(1, min(n, len(devices)) + 1):
        orders = combinations(devices, count) if ordered else permutations(devices, count)
        for order in orders:
            for inner in combinations(range(1, n), count - 1):
                if boundaries is None or inner == tuple(boundaries):
                    edges = (0, *inner, n)
                    yield order, tuple(pairwise(edges))


def least_bottleneck(chain, cluster, devices, *, nm, growth, own_sums=2, ordered=False, boundaries=None):
    """The least bottleneck in ms (infinite if nothing fits) and the least communication in ms among its plans."""
    best = []
    for order, cuts in all_plans(chain, devices, ordered=ordered, boundaries=boundaries):
        w = in_flight(nm, len(cuts), growth)
        sizes = [stage_bytes(chain, c, k, d, own_sums) for c, k, d in zip(cuts, w, order, strict=True)]
        if any(size > d.kind.memory_bytes for size, d in zip(sizes, order, strict=True)):
            continue
        times = [stage_ms(chain, cluster, order, cuts, s) for s in range(len(cuts))]
        compute = sum(
            float(chain.forward_ms[d.kind.name][b] + chain.backward_ms[d.kind.name][b])
            for d, c in zip(order, cuts, strict=True)
            for b in range(*c)
        )
        best.append((max(times), sum(times) - compute))
    if not best:
        return INFINITE, INFINITE
    least = min(best)[0]
    return least, min(moved for time, moved in best if time <= least * (1 + 1e-12))


def least_overflow(chain, devices, *, nm):
    """The fewest bytes by which some stage must exceed its device, with as few minibatches in flight as Nm allows."""
    return min(
        max(
            stage_bytes(chain, c, k, d) - d.kind.memory_bytes
            for c, k, d in zip(cuts, in_flight(nm, len(cuts), 0), order, strict=True)
        )
        for order, cuts in all_plans(chain, devices)
    )


def least_bottleneck_by_orders(chain, cluster, devices, *, nm, growth):
    """The same least bottleneck for longer chains: for each order of devices the recurrence of spec section 4."""
    n = len(chain.blocks)
    cuts = [(lo, hi) for lo in range(n) for hi in range(lo + 1, n + 1)]
    compute = {
        (kind, lo, hi): float(sum(chain.forward_ms[kind][lo:hi]) + sum(chain.backward_ms[kind][lo:hi]))
        for kind in {d.kind.name for d in devices}
        for lo, hi in cuts
    }
    received, returned, fits = {}, {}, {}
    for lo, hi in cuts:
        reads = [v for v in chain.values if v.producer < lo and any(lo <= c < hi for c in v.consumers)]
        received[lo, hi] = sum(v.forward_bytes for v in reads)
        returned[lo, hi] = sum(v.backward_bytes for v in chain.values if lo <= v.producer < hi <= v.consumers[-1])
        for w in range(1, nm + 1):
            for device in {d.kind.name: d for d in devices}.values():
                fits[lo, hi, w, device.kind.name] = stage_bytes(chain, (lo, hi), w, device) <= device.kind.memory_bytes
    least = INFINITE
    for count in range(1, min(n, len(devices)) + 1):
        w = in_flight(nm, count, growth)
        for order in permutations(devices, count):
            best = [0.0] + [INFINITE] * n
            for stage, device in enumerate(order):
                after = [INFINITE] * (n + 1)
                for lo, hi in cuts:
                    if best[lo] == INFINITE or not fits[lo, hi, w[stage], device.kind.name]:
                        continue
                    time = compute[device.kind.name, lo, hi]
                    if received[lo, hi]:
                        time += _transfer_ms(cluster, order[stage - 1], device, received[lo, hi])
                    if returned[lo, hi] and stage + 1 < count:
                        time += _transfer_ms(cluster, order[stage + 1], device, returned[lo, hi])
                    after[hi] = min(after[hi], max(best[lo], time))
                best = after
            least = min(least, best[n])
    return least
