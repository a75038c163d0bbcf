"""The bound on the components' best partition, against that partition itself."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles.partition import least_bottleneck
from planner_cases import chain_of, chains, cluster_of, clusters, kind

from hetpipe_compiler.errors import PlanningError
from hetpipe_compiler.ir.blocks import CrossingValue
from hetpipe_compiler.ir.cluster import Link
from hetpipe_compiler.passes import proven_bound
from hetpipe_compiler.passes.allocate import Group
from hetpipe_compiler.passes.in_flight import LEANEST
from hetpipe_compiler.passes.multilevel import shorten_chain
from hetpipe_compiler.passes.partition import partition
from hetpipe_compiler.passes.proven_bound import uncoarsened_bound_ms
from hetpipe_compiler.passes.stage_memory import MemoryRule


@settings(max_examples=40)
@given(chains(least=4), clusters(), st.integers(1, 4), st.sampled_from(["hetpipe", "overlapped"]))
def test_between_nothing_and_the_optimum_of_the_components(chain, cluster, nm, objective):
    options = {"nm": nm, "growth": LEANEST.growth, "objective": objective}
    least = least_bottleneck(chain, cluster, cluster.devices, **options)[0]
    assume(math.isfinite(least))
    group, blocks = Group(cluster.devices), shorten_chain(chain, len(chain) // 2)
    try:
        plan = partition(blocks, group, cluster, nm=nm, in_flight_rule=LEANEST, objective=objective)
    except PlanningError:
        assume(False)
    overlapped = objective == "overlapped"
    rule = MemoryRule.of(chain)
    bound_ms = uncoarsened_bound_ms(chain, group, cluster, nm, rule, plan.bottleneck_ms, overlapped=overlapped)
    assert bound_ms <= least * (1 + 1e-9) + 1e-9
    assert bound_ms <= plan.bottleneck_ms


@pytest.mark.parametrize("most", [proven_bound.MAX_COMPONENTS, 10])
def test_what_merging_costs(monkeypatch, most):
    """20 components of 1 ms each in 3 blocks on 2 devices: at least 13 against 10 ms, and 1 ms to receive."""
    monkeypatch.setattr(proven_bound, "MAX_COMPONENTS", most)
    values = [CrossingValue(f"v{i}", i, (i + 1,), 1_000_000, 0) for i in range(19)]
    chain = chain_of({"k": [1.0] * 20}, values=values)
    cluster = cluster_of([[kind("k")] * 2], Link("l", 1.0, 0.0), Link("l", 1.0, 0.0))
    group, rule = Group(cluster.devices), MemoryRule.of(chain)
    options = {"nm": 1, "in_flight_rule": LEANEST}
    blocks = partition(shorten_chain(chain, 3), group, cluster, **options)
    best = partition(chain, group, cluster, **options)
    assert best.bottleneck_ms == 11.0 < blocks.bottleneck_ms
    bound_ms = uncoarsened_bound_ms(chain, group, cluster, 1, rule, blocks.bottleneck_ms)
    # Where there are too many to relax, computation alone is left.
    assert bound_ms == pytest.approx(10.0 if most == 10 else 11.0, rel=proven_bound.NEAR)
    assert bound_ms <= best.bottleneck_ms
    assert uncoarsened_bound_ms(replace(chain, values=()), group, cluster, 1, rule, 10.0) == pytest.approx(10.0)
