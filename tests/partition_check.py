"""Is a partition legal, are its figures right, is it as good as an oracle's?"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import strategies as st
from oracles.partition import stage_bytes, stage_ms

OBJECTIVES = st.sampled_from(["hetpipe", "overlapped"])


def check(plan, chain, cluster, oracle, *, w, nm, objective="hetpipe", clocks=0):
    """The plan is legal, its figures are right, and it is as good as the oracle's (time, communication, memory)."""
    least, least_moved, least_memory = oracle
    devices, cuts = [stage.device for stage in plan.stages], [stage.blocks for stage in plan.stages]
    moved = chain.permuted(plan.order)
    assert sorted(plan.order) == list(range(len(chain)))
    assert plan.bottleneck_ms == pytest.approx(least, rel=1e-9, abs=1e-9)
    assert plan.optimal
    assert plan.lower_bound_ms == pytest.approx(plan.bottleneck_ms, rel=1e-9, abs=1e-9)
    assert tuple(stage.in_flight for stage in plan.stages) == w
    assert [stage.stage_ms for stage in plan.stages] == pytest.approx(
        [stage_ms(moved, cluster, devices, cuts, s, objective, plan.stages[s].recompute) for s in range(len(cuts))]
    )
    for stage in plan.stages:
        assert stage.memory["total"] == stage_bytes(
            moved, stage.blocks, stage.in_flight, stage.device, nm, clocks, stage.recompute
        )
        assert stage.memory["total"] <= stage.memory["capacity"] == stage.device.kind.memory_bytes
    assert cuts[0][0] == 0
    assert cuts[-1][1] == len(chain)
    assert all(lo < hi for lo, hi in cuts)
    assert all(a[1] == b[0] for a, b in pairwise(cuts))
    home = {block: s for s, (lo, hi) in enumerate(cuts) for block in plan.order[lo:hi]}
    assert all(len({home[b] for b in group}) == 1 for group in chain.colocate)
    if chain.ends_fixed:
        assert home[0] == 0
        assert home[len(chain) - 1] == len(cuts) - 1
    assert len({d.id for d in devices}) == len(devices)
    assert {d.id for d in devices} | {d.id for d in plan.unused} == {d.id for d in cluster.devices}
    # Ties go to less communication, then less memory. (All figures are small multiples of powers of two: exact.)
    assert sum(stage.receive_ms for stage in plan.stages) == pytest.approx(least_moved, abs=1e-9)
    reserved = sum(stage.memory["reserve"] for stage in plan.stages)
    assert sum(stage.memory["total"] for stage in plan.stages) - reserved == least_memory
