"""Brute force for the partitioner: every order of every subset of the devices, every nest of closed sets of blocks.

Costs are summed value by value, straight from docs/graph-format.md; shares no
code with the passes. Only the enumeration itself is compiled.
"""

from __future__ import annotations

import math
from itertools import combinations, pairwise, permutations

import numba
import numpy as np

INFINITE = math.inf


def stage_ms(chain, cluster, devices, cuts, stage, objective="hetpipe", recompute=False):
    """Forward + backward on the stage's device, and what it receives from its neighbours over the actual links.

    ``recompute``: the forward twice.
    """
    lo, hi = cuts[stage]
    device = devices[stage]
    kind = device.kind.name
    compute = sum(float(chain.forward_ms[kind][b]) + float(chain.backward_ms[kind][b]) for b in range(lo, hi))
    if recompute:
        compute += sum(float(chain.forward_ms[kind][b]) for b in range(lo, hi))
    received = sum(v.forward_bytes for v in chain.values if v.producer < lo and any(lo <= c < hi for c in v.consumers))
    returned = sum(
        v.backward_bytes for v in chain.values if lo <= v.producer < hi and any(c >= hi for c in v.consumers)
    )
    moved = 0.0
    if received:
        moved += _transfer_ms(cluster, devices[stage - 1], device, received)
    if returned:
        moved += _transfer_ms(cluster, devices[stage + 1], device, returned)
    return max(compute, moved) if objective == "overlapped" else compute + moved


def _transfer_ms(cluster, a, b, n_bytes):
    link = next(node.link for node in cluster.nodes if node.name == a.node) if a.node == b.node else cluster.network
    return n_bytes / (link.bandwidth_gb_s * 1e6) + link.latency_us / 1e3


def stage_bytes(chain, cut, in_flight, device, nm, clocks=0, recompute=False):
    """Memory of a stage, part by part.

    ``recompute``: what is saved once, but for each minibatch in flight what the forward needs to run again.
    """
    if chain.resident is not None:
        return sum(chain.resident[b] for b in range(*cut))
    lo, hi = cut
    held = lambda items: sum(i.bytes for i in items if any(lo <= b < hi for b in i.blocks))  # noqa: E731
    parameters = held(chain.parameters)
    read = [v for v in chain.values if v.producer < lo and any(lo <= c < hi for c in v.consumers)]
    made = [v for v in chain.values if lo <= v.producer < hi and v.consumers[-1] >= hi]
    total = device.kind.reserve_bytes + held(chain.frozen)
    total += parameters * (1 + 1 + _own_sums(nm - in_flight, clocks)) + math.ceil(parameters * chain.optimizer_factor)
    if in_flight > 1:
        total += parameters * in_flight
    total += in_flight * sum(v.forward_bytes for v in read) + (1 if recompute else in_flight) * held(chain.saved)
    total += in_flight * sum(chain.replay[lo:hi]) if recompute else 0
    total += _moment_bytes(
        chain, range(lo, hi), parameters, held(chain.saved), device.kind.name, clocks or nm > in_flight
    )
    return total + sum(v.backward_bytes for v in read) + sum(v.backward_bytes for v in made)


def _own_sums(updates, clocks):
    """Sums of waves kept, and the update being made. ``updates``: between a push and the forward that needs its answer;
    ``clocks``: D + 1 of a reproducible run, or 0."""
    return clocks + 1 if clocks else 2 + (updates >= 2)


def _moment_bytes(chain, blocks, parameters, saved, kind, pulls):
    """What is held for a moment only, or (pulled weights) on a CPU only."""
    workspace = max((chain.workspace[b] for b in blocks), default=0) if chain.workspace else 0
    if kind != "cpu":
        return max(workspace, math.ceil(parameters * chain.step_factor) - saved)
    largest = max((p.bytes for p in chain.parameters if {*p.blocks} & {*blocks}), default=0)
    return max(workspace, math.ceil(largest * chain.loop_factor) - saved) + (parameters if pulls else 0)


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


def closed_masks(chain):
    """Every set of blocks, as bits, that holds what its members read and parts no colocated blocks from a stage."""
    n = len(chain.blocks)
    needs = [0] * n
    for v in chain.values:
        for c in v.consumers:
            needs[c] |= 1 << v.producer
    if chain.ends_fixed:
        for b in range(1, n):
            needs[b] |= 1
            needs[n - 1] |= 1 << (b - 1)
    together = [sum(1 << b for b in group) for group in chain.colocate]
    masks = []
    for mask in range(1 << n):
        closed = all(needs[b] & ~mask == 0 for b in range(n) if mask >> b & 1)
        if closed and all(mask & group in (0, group) for group in together):
            masks.append(mask)
    return masks


def _mask_bytes(chain, before, after, in_flight, kind, nm, clocks, recompute):
    mine = after & ~before
    if chain.resident is not None:
        return sum(size for b, size in enumerate(chain.resident) if mine >> b & 1)
    held = lambda items: sum(i.bytes for i in items if any(mine >> b & 1 for b in i.blocks))  # noqa: E731
    parameters = held(chain.parameters)
    read = [v for v in chain.values if before >> v.producer & 1 and any(mine >> c & 1 for c in v.consumers)]
    made = [v for v in chain.values if mine >> v.producer & 1 and any(not after >> c & 1 for c in v.consumers)]
    total = (
        kind.reserve_bytes
        + held(chain.frozen)
        + parameters * (2 + _own_sums(nm - in_flight, clocks))
        + math.ceil(parameters * chain.optimizer_factor)
    )
    if in_flight > 1:
        total += parameters * in_flight
    total += in_flight * sum(v.forward_bytes for v in read) + (1 if recompute else in_flight) * held(chain.saved)
    if recompute:
        total += in_flight * sum(size for b, size in enumerate(chain.replay) if mine >> b & 1)
    blocks = [b for b in range(len(chain.blocks)) if mine >> b & 1]
    total += _moment_bytes(chain, blocks, parameters, held(chain.saved), kind.name, clocks or nm > in_flight)
    return total + sum(v.backward_bytes for v in read) + sum(v.backward_bytes for v in made)


def least_bottleneck(
    chain,
    cluster,
    devices,
    *,
    nm,
    growth,
    clocks=0,
    ordered=False,
    boundaries=None,
    objective="hetpipe",
    recompute="never",
):
    """The least bottleneck in ms (infinite if nothing fits); then the least communication, then memory (no reserve).

    ``recompute``: ``auto``: a stage that does not fit may take its forward time twice and keep less; ``always``: all
    do for which that means less memory.
    """
    n = len(chain.blocks)
    if boundaries is None:
        masks = closed_masks(chain)
    else:
        masks = [(1 << b) - 1 for b in (0, *boundaries, n)]
    count = len(masks)
    kinds = {d.kind.name: d.kind for d in devices}
    compute = {k: np.zeros((count, count)) for k in kinds}
    again = {k: np.zeros((count, count)) for k in kinds}
    received, returned = np.zeros((count, count), dtype=np.int64), np.zeros((count, count), dtype=np.int64)
    nested = np.zeros((count, count), dtype=np.bool_)
    for i, before in enumerate(masks):
        for j, after in enumerate(masks):
            if before == after or before & ~after:
                continue
            nested[i, j] = True
            mine = after & ~before
            for v in chain.values:
                if before >> v.producer & 1 and any(mine >> c & 1 for c in v.consumers):
                    received[i, j] += v.forward_bytes
                if mine >> v.producer & 1 and any(not after >> c & 1 for c in v.consumers):
                    returned[i, j] += v.backward_bytes
            for k in kinds:
                per_block = chain.forward_ms[k] + chain.backward_ms[k]
                compute[k][i, j] = sum(float(per_block[b]) for b in range(n) if mine >> b & 1)
                if recompute != "never":
                    again[k][i, j] = sum(float(chain.forward_ms[k][b]) for b in range(n) if mine >> b & 1)
    sizes = {}

    def bytes_table(w, kind, recomputed):
        if (w, kind, recomputed) not in sizes:
            table = np.zeros((count, count), dtype=np.int64)
            for i, j in zip(*np.nonzero(nested), strict=True):
                table[i, j] = _mask_bytes(chain, masks[i], masks[j], w, kind, nm, clocks, recomputed)
            sizes[w, kind, recomputed] = table
        return sizes[w, kind, recomputed]

    pipelines = []
    for length in range(1, min(n, len(devices)) + 1):
        if boundaries is not None and length != len(boundaries) + 1:
            continue
        for order in combinations(devices, length) if ordered else permutations(devices, length):
            w = in_flight(nm, length, growth)
            times, moved, memory = [], [], []
            for s, device in enumerate(order):
                transfers = np.zeros((count, count))
                if s > 0:
                    transfers = _over(cluster, order[s - 1], device, received)
                if s + 1 < length:
                    transfers = transfers + _over(cluster, order[s + 1], device, returned)
                held = bytes_table(w[s], device.kind, False)
                twice = np.zeros((count, count), dtype=np.bool_)
                if recompute != "never" and w[s] > 1 and chain.resident is None:
                    less = bytes_table(w[s], device.kind, True)
                    twice = ((held > device.kind.memory_bytes) | (recompute == "always")) & (less < held)
                    held = np.where(twice, less, held)
                mine = compute[device.kind.name] + np.where(twice, again[device.kind.name], 0.0)
                time = np.maximum(mine, transfers) if objective == "overlapped" else mine + transfers
                times.append(np.where(nested & (held <= device.kind.memory_bytes), time, INFINITE))
                moved.append(transfers)
                memory.append(held - (0 if chain.resident is not None else device.kind.reserve_bytes))
            pipelines.append((np.stack(times), np.stack(moved), np.stack(memory)))
    start, end = masks.index(0), masks.index((1 << n) - 1)
    least = min((_enumerate(*tables, 0, start, end, INFINITE)[0] for tables in pipelines), default=INFINITE)
    if least == INFINITE:
        return INFINITE, INFINITE, 0
    best = [_enumerate(*tables, 0, start, end, least * (1 + 1e-12))[1:] for tables in pipelines]
    return least, *min(best)


def _over(cluster, a, b, n_bytes):
    return np.where(n_bytes > 0, np.vectorize(lambda size: _transfer_ms(cluster, a, b, size))(n_bytes), 0.0)


@numba.njit(cache=True)
def _enumerate(times, moved, memory, stage, at, end, bound):
    """Every way on from closed set ``at``: least (slowest stage), and least (communication, memory) within bound."""
    if stage == times.shape[0]:
        return (0.0, 0.0, 0) if at == end else (np.inf, np.inf, 0)
    least, least_moved, least_memory = np.inf, np.inf, 0
    for after in range(times.shape[1]):
        time = times[stage, at, after]
        if time > bound or time == np.inf:
            continue
        rest = _enumerate(times, moved, memory, stage + 1, after, end, bound)
        if rest[0] == np.inf:
            continue
        least = min(least, max(time, rest[0]))
        total, held = moved[stage, at, after] + rest[1], memory[stage, at, after] + rest[2]
        if total < least_moved or (total == least_moved and held < least_memory):
            least_moved, least_memory = total, held
    return least, least_moved, least_memory


def least_overflow(chain, devices, *, nm, recompute=False):
    """The fewest bytes by which some stage must exceed its device, with as few minibatches in flight as Nm allows.

    ``recompute``: stages may where they do not fit otherwise.
    """

    def over(cut, w, device):
        plain = stage_bytes(chain, cut, w, device, nm) - device.kind.memory_bytes
        if plain <= 0 or w == 1 or not recompute:
            return plain
        return min(plain, stage_bytes(chain, cut, w, device, nm, recompute=True) - device.kind.memory_bytes)

    return min(
        max(over(c, k, d) for c, k, d in zip(cuts, in_flight(nm, len(cuts), 0), order, strict=True))
        for order, cuts in all_plans(chain, devices)
    )


def least_bottleneck_by_orders(chain, cluster, devices, *, nm, growth):
    """The same least bottleneck for longer chains: for each order of devices the plain recurrence."""
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
                fits[lo, hi, w, device.kind.name] = (
                    stage_bytes(chain, (lo, hi), w, device, nm) <= device.kind.memory_bytes
                )
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
