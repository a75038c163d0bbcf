"""The partition of a block graph over unlike devices as an integer program, solved by scipy (HiGHS).

For clusters whose links are all alike and without latency and devices that are no CPUs, Nm = 1, bytes
that one block holds, and no workspace. The
variables: block b in stage s on device d; value v received by stage s; gradient of v returned to stage s; bottleneck.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix


def least_bottleneck_ms(chain, cluster, *, own_sums=2, seconds=600):
    """The least bottleneck in milliseconds; None if nothing fits."""
    devices = cluster.devices
    n, count, values = len(chain.blocks), len(devices), chain.values
    per_ms = cluster.network.bandwidth_gb_s * 1e6

    def x(b, s, d):
        return (b * count + s) * count + d

    place = n * count * count

    def z(s, d):
        return place + s * count + d

    read = place + count * count

    def r(v, s):
        return read + v * count + s

    back = read + len(values) * count

    def q(v, s):
        return back + v * count + s

    bottleneck = back + len(values) * count
    rows, low, high = [], [], []

    def add(terms, at_least=-np.inf, at_most=np.inf):
        rows.append(terms)
        low.append(at_least)
        high.append(at_most)

    def inside(b, s, sign=1):
        return [(x(b, s, d), sign) for d in range(count)]

    for b in range(n):
        add([(x(b, s, d), 1) for s in range(count) for d in range(count)], 1, 1)
        for s in range(count):
            for d in range(count):
                add([(x(b, s, d), 1), (z(s, d), -1)], at_most=0)
    for i in range(count):
        add([(z(i, d), 1) for d in range(count)], at_most=1)
        add([(z(s, i), 1) for s in range(count)], at_most=1)
    edges = {(v.producer, c) for v in values for c in v.consumers}
    if chain.ends_fixed:
        edges |= {(0, b) for b in range(1, n)} | {(b, n - 1) for b in range(n - 1)}
    for a, b in edges:
        add([t for s in range(count) for t in (*inside(a, s, s), *inside(b, s, -s))], at_most=0)
    for group in chain.colocate:
        for a, b in pairwise(group):
            for s in range(count):
                add([*inside(a, s), *inside(b, s, -1)], 0, 0)
    for at, v in enumerate(values):
        for s in range(count):
            for c in v.consumers:
                add([(r(at, s), 1), *inside(c, s, -1), *inside(v.producer, s)], at_least=0)
                add([(q(at, s), 1), *inside(v.producer, s, -1), *inside(c, s)], at_least=0)
    for s in range(count):
        terms = [(bottleneck, -1)]
        terms += [(r(at, s), v.forward_bytes / per_ms) for at, v in enumerate(values)]
        terms += [(q(at, s), v.backward_bytes / per_ms) for at, v in enumerate(values)]
        for d, device in enumerate(devices):
            ms = chain.forward_ms[device.kind.name] + chain.backward_ms[device.kind.name]
            terms += [(x(b, s, d), float(ms[b])) for b in range(n)]
        add(terms, at_most=0)
        held = _held(chain, own_sums)
        room = [(x(b, s, d), held[b]) for b in range(n) for d in range(count)]
        if chain.resident is None:
            room += [(r(at, s), v.forward_bytes + v.backward_bytes) for at, v in enumerate(values)]
            room += [(q(at, s), v.backward_bytes) for at, v in enumerate(values)]
        capacity = [
            (z(s, d), -(device.kind.memory_bytes - (device.kind.reserve_bytes if chain.resident is None else 0)))
            for d, device in enumerate(devices)
        ]
        add([*room, *capacity], at_most=0)
    matrix = lil_matrix((len(rows), bottleneck + 1))
    for at, terms in enumerate(rows):
        for column, factor in terms:
            matrix[at, column] += factor
    integral = np.zeros(bottleneck + 1)
    integral[:read] = 1
    upper = np.ones(bottleneck + 1)
    upper[bottleneck] = np.inf
    cost = np.zeros(bottleneck + 1)
    cost[bottleneck] = 1
    found = milp(
        cost,
        constraints=LinearConstraint(matrix.tocsr(), low, high),
        integrality=integral,
        bounds=Bounds(0, upper),
        options={"mip_rel_gap": 1e-9, "time_limit": seconds},
    )
    if found.status == 2:
        return None
    assert found.status == 0, found.message
    return float(found.fun)


def _held(chain, own_sums):
    """Bytes of each block with one minibatch in flight; optimizer factor whole, so that rounding up changes nothing."""
    if chain.resident is not None:
        return [float(size) for size in chain.resident]
    held = np.zeros(len(chain.blocks))
    for items, factor in (
        (chain.parameters, 2 + own_sums + chain.optimizer_factor),
        (chain.frozen, 1),
        (chain.saved, 1),
    ):
        for item in items:
            (block,) = item.blocks
            held[block] += factor * item.bytes
    return held.tolist()
