"""The partition pass against brute force, and its errors."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles.partition import (
    all_plans,
    closed_masks,
    in_flight,
    least_bottleneck,
    least_bottleneck_by_orders,
    least_overflow,
    stage_ms,
)
from partition_check import OBJECTIVES, check
from planner_cases import FAST, MIB, SLOW, chain_of, chains, cluster_of, clusters, kind

from hetpipe_compiler.errors import PlanningError
from hetpipe_compiler.ir.blocks import CrossingValue, SharedBytes
from hetpipe_compiler.ir.cluster import Link
from hetpipe_compiler.passes.allocate import Group
from hetpipe_compiler.passes.device_classes import device_classes
from hetpipe_compiler.passes.in_flight import LEANEST, RICHEST, RULES, InFlightRule
from hetpipe_compiler.passes.partition import partition
from hetpipe_compiler.passes.partition_search import search
from hetpipe_compiler.passes.stage_memory import MemoryRule

ONE_F_ONE_B = InFlightRule(1.0)


@settings(max_examples=80, deadline=None)
@given(
    chains(), clusters(), st.integers(1, 5), st.sampled_from(RULES), st.booleans(), st.integers(0, 2), st.booleans(),
    OBJECTIVES,
)  # fmt: skip
def test_equals_brute_force(chain, cluster, nm, rule, ordered, staleness, reproducible, objective):
    clocks = staleness + 1 if reproducible else 0
    options = {"nm": nm, "growth": rule.growth, "clocks": clocks, "ordered": ordered, "objective": objective}
    oracle = least_bottleneck(chain, cluster, cluster.devices, **options)
    group = Group(cluster.devices, ordered)
    options = {"nm": nm, "in_flight_rule": rule, "staleness": staleness, "reproducible": reproducible}
    if math.isinf(oracle[0]):
        with pytest.raises(PlanningError) as caught:
            partition(chain, group, cluster, objective=objective, **options)
        assert caught.value.code == "HP301"
        return
    plan = partition(chain, group, cluster, objective=objective, **options)
    w = in_flight(nm, len(plan.stages), rule.growth)
    check(plan, chain, cluster, oracle, w=w, objective=objective, clocks=clocks, nm=nm)
    if ordered:
        devices = [stage.device for stage in plan.stages]
        assert devices == sorted(devices, key=cluster.devices.index)


@settings(max_examples=6, deadline=None)
@given(chains(least=8, most=11), clusters(), st.integers(1, 5), st.sampled_from(RULES), OBJECTIVES)
def test_larger_graphs_equal_brute_force(chain, cluster, nm, rule, objective):
    assume(len(closed_masks(chain)) <= 300)
    options = {"nm": nm, "growth": rule.growth, "objective": objective}
    oracle = least_bottleneck(chain, cluster, cluster.devices, **options)
    assume(math.isfinite(oracle[0]))
    group = Group(cluster.devices, False)
    plan = partition(chain, group, cluster, nm=nm, in_flight_rule=rule, objective=objective)
    w = in_flight(nm, len(plan.stages), rule.growth)
    check(plan, chain, cluster, oracle, w=w, nm=nm, objective=objective)


@settings(max_examples=25, deadline=None)
@given(chains(least=8, most=20, linear=True), clusters(), st.integers(1, 5), st.sampled_from(RULES))
def test_one_order_equals_the_recurrence_over_every_order_of_devices(chain, cluster, nm, rule):
    chain = replace(chain, colocate=())
    least = least_bottleneck_by_orders(chain, cluster, cluster.devices, nm=nm, growth=rule.growth)
    assume(math.isfinite(least))
    plan = partition(chain, Group(cluster.devices, False), cluster, nm=nm, in_flight_rule=rule)
    assert plan.bottleneck_ms == pytest.approx(least, rel=1e-9, abs=1e-9)
    assert plan.order == tuple(range(len(chain)))


@settings(max_examples=25, deadline=None)
@given(chains(least=3), clusters(), st.integers(1, 3), st.integers(2, 40), st.integers(0, 2000))
def test_bounded_searches_tell_the_truth(chain, cluster, nm, max_sets, budget):
    """With too little work or too few closed sets allowed the plan is legal and the bound it states holds."""
    least = least_bottleneck(chain, cluster, cluster.devices, nm=nm, growth=1.0)[0]
    options = {"nm": nm, "in_flight_rule": ONE_F_ONE_B, "max_sets": max_sets, "budget": budget}
    try:
        plan = partition(chain, Group(cluster.devices, False), cluster, **options)
    except PlanningError as error:
        assert error.code == ("HP308" if math.isfinite(least) else error.code)  # noqa: PT017
        assert error.code in ("HP301", "HP308")  # noqa: PT017
        return
    assert plan.lower_bound_ms <= least * (1 + 1e-9) + 1e-9
    assert plan.bottleneck_ms >= least * (1 - 1e-9) - 1e-9
    if plan.optimal:
        assert plan.bottleneck_ms == pytest.approx(least, rel=1e-9, abs=1e-9)
    else:
        assert plan.gap == pytest.approx(plan.bottleneck_ms / plan.lower_bound_ms - 1)
    moved, devices = chain.permuted(plan.order), [stage.device for stage in plan.stages]
    cuts = [stage.blocks for stage in plan.stages]
    assert [s.stage_ms for s in plan.stages] == pytest.approx(
        [stage_ms(moved, cluster, devices, cuts, s) for s in range(len(cuts))]
    )


@settings(max_examples=60, deadline=None)
@given(chains(), clusters(), st.integers(1, 3), st.data())
def test_split_by_hand_equals_brute_force_over_orders(chain, cluster, nm, data):
    inner = (
        tuple(sorted(data.draw(st.sets(st.integers(1, max(1, len(chain) - 1)), max_size=3)))) if len(chain) > 1 else ()
    )
    chain = replace(chain, colocate=())
    least = least_bottleneck(chain, cluster, cluster.devices, nm=nm, growth=1.0, boundaries=inner)[0]
    named = [data.draw(st.sampled_from([b, f"op{b}", f"layer{b}", str(b)])) for b in inner]
    options = {"nm": nm, "in_flight_rule": ONE_F_ONE_B, "split": named}
    if math.isinf(least):
        with pytest.raises(PlanningError) as caught:
            partition(chain, Group(cluster.devices, False), cluster, **options)
        assert caught.value.code == ("HP306" if len(inner) >= len(cluster.devices) else "HP301")
        return
    plan = partition(chain, Group(cluster.devices, False), cluster, **options)
    assert tuple(stage.blocks[0] for stage in plan.stages[1:]) == inner
    assert plan.bottleneck_ms == pytest.approx(least, rel=1e-9, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(chains(most=5, linear=True), clusters(most=3), st.integers(1, 3))
def test_the_best_attempt_exceeds_memory_least(chain, cluster, nm):
    chain = replace(chain, colocate=())
    group = Group(cluster.devices, False)
    space = search(chain, device_classes(group, cluster, chain), MemoryRule.of(chain))
    expected = least_overflow(chain, cluster.devices, nm=nm)
    attempt = space.least_overflow(nm, LEANEST)
    assert attempt.objective == expected
    assert (space.fastest(nm, LEANEST) is None) == (expected > 0)


@settings(max_examples=40, deadline=None)
@given(chains(), clusters(), st.integers(1, 4))
def test_equal_inputs_give_equal_plans_and_group_order_is_free(chain, cluster, nm):
    assume(least_bottleneck(chain, cluster, cluster.devices, nm=nm, growth=1.0)[0] < math.inf)
    options = {"nm": nm, "in_flight_rule": ONE_F_ONE_B}
    plan = partition(chain, Group(cluster.devices, False), cluster, **options)
    assert partition(chain, Group(cluster.devices, False), cluster, **options) == plan
    turned = partition(chain, Group(cluster.devices[::-1], False), cluster, **options)
    structure = [(s.device.kind.name, s.device.node, s.blocks, s.stage_ms) for s in plan.stages]
    assert [(s.device.kind.name, s.device.node, s.blocks, s.stage_ms) for s in turned.stages] == structure


def test_another_order_of_the_blocks_is_found():
    """Two branches side by side: the model runs them in turn, the best plan gives each device one branch."""
    values = [CrossingValue(f"v{i}", i, (i + 2,), 8_000_000, 8_000_000) for i in range(4)]
    chain = chain_of({"k": [10.0] * 6}, values=values)
    cluster = cluster_of([[kind("k")] * 2], Link("l", 1.0, 0.0), SLOW)
    plan = partition(chain, Group(cluster.devices, False), cluster, nm=1, in_flight_rule=ONE_F_ONE_B)
    assert plan.order == (0, 2, 4, 1, 3, 5)
    assert [s.blocks for s in plan.stages] == [(0, 3), (3, 6)]
    assert plan.bottleneck_ms == 30.0
    assert plan.optimal
    tied = partition(
        replace(chain, colocate=((0, 1),)), Group(cluster.devices, False), cluster, nm=1, in_flight_rule=ONE_F_ONE_B
    )
    assert {*tied.order[slice(*tied.stages[0].blocks)]} >= {0, 1}
    assert tied.bottleneck_ms > 30.0


def test_the_models_own_order_is_kept_where_it_is_as_good():
    chain = chain_of({"k": [1.0] * 6}, values=[CrossingValue("v", 0, (5,), 8, 8)])
    cluster = cluster_of([[kind("k")] * 3], FAST, SLOW)
    plan = partition(chain, Group(cluster.devices, False), cluster, nm=1, in_flight_rule=ONE_F_ONE_B)
    assert plan.bottleneck_ms < 2.01


def test_order_of_unlike_devices_is_searched():
    """The fast device belongs at the heavy end, but the first block fits on the other one only."""
    fast, slow = kind("fast", 10 * MIB), kind("slow", 1000 * MIB)
    chain = chain_of({"fast": [1, 1, 4], "slow": [2, 2, 8]}, parameters=[20 * MIB, MIB, MIB])
    cluster = cluster_of([[fast], [slow]], FAST, SLOW)
    plan = partition(chain, Group(cluster.devices, False), cluster, nm=2, in_flight_rule=ONE_F_ONE_B)
    assert [(s.device.id, s.blocks) for s in plan.stages] == [("n1:0", (0, 2)), ("n0:0", (2, 3))]
    held = partition(chain, Group(cluster.devices, True), cluster, nm=2, in_flight_rule=ONE_F_ONE_B)
    assert [(s.device.id, s.blocks) for s in held.stages] == [("n1:0", (0, 3))]
    assert [d.id for d in held.unused] == ["n0:0"]


def test_links_between_the_actual_neighbours_count():
    """Two devices on one node and one apart: the large value goes over the node's link."""
    same = kind("k")
    values = [CrossingValue("large", 0, (1,), 10_000_000, 10_000_000), CrossingValue("small", 1, (2,), 1000, 1000)]
    cluster = cluster_of([[same], [same, same]], Link("pcie", 10.0, 0.0), Link("net", 1.0, 0.0))
    chain = chain_of({"k": [10.0, 10.0, 10.0]}, values=values)
    plan = partition(chain, Group(cluster.devices, False), cluster, nm=1, in_flight_rule=ONE_F_ONE_B)
    assert [s.device.node for s in plan.stages] == ["n1", "n1", "n0"]
    assert plan.stages[1].receive_ms == pytest.approx(1.0 + 0.001)
    assert plan.bottleneck_ms == pytest.approx(11.001)


def test_value_is_counted_once_and_skips_are_charged_to_the_reader():
    value = CrossingValue("x", 0, (1, 2, 3), 4_000_000, 2_000_000)
    same = kind("k")
    cluster = cluster_of([[same, same, same]], Link("l", 1.0, 0.0), SLOW)
    chain = chain_of({"k": [50.0, 25.0, 25.0, 50.0]}, values=[value])
    plan = partition(chain, Group(cluster.devices, False), cluster, nm=1, in_flight_rule=ONE_F_ONE_B)
    assert [s.blocks for s in plan.stages] == [(0, 1), (1, 3), (3, 4)]
    assert [s.receive_ms for s in plan.stages] == pytest.approx([2.0, 4.0, 4.0])
    assert [s.receives_bytes for s in plan.stages] == [2_000_000, 4_000_000, 4_000_000]


def test_ties_go_to_less_memory():
    """Both cuts take 2 ms and move nothing; a storage that two blocks share is held once if they stay together."""
    chain = chain_of({"k": [1.0, 1.0, 1.0]}, values=[])
    cluster = cluster_of([[kind("k")] * 2], FAST, SLOW)
    for shared, cut in (((0, 1), 2), ((1, 2), 1)):
        tied = replace(chain, saved=(SharedBytes("x", 1000, shared),))
        plan = partition(tied, Group(cluster.devices, False), cluster, nm=1, in_flight_rule=ONE_F_ONE_B)
        assert [s.blocks for s in plan.stages] == [(0, cut), (cut, 3)]


def test_useless_devices_stay_idle_and_are_reported():
    cluster = cluster_of([[kind("good")], [kind("bad")]], FAST, SLOW)
    chain = chain_of({"good": [1.0, 1.0], "bad": [50.0, 50.0]}, activation_bytes=1000)
    plan = partition(chain, Group(cluster.devices, False), cluster, nm=1, in_flight_rule=ONE_F_ONE_B)
    assert [s.device.id for s in plan.stages] == ["n0:0"]
    assert [d.id for d in plan.unused] == ["n1:0"]


def test_more_in_flight_never_helps_the_bottleneck():
    small = kind("k", 60 * MIB)
    chain = chain_of({"k": [1, 2, 3, 4, 3, 2.0]}, parameters=[MIB] * 6, saved=[5 * MIB] * 6, activation_bytes=MIB)
    cluster = cluster_of([[small] * 4], FAST, SLOW)
    group = Group(cluster.devices, False)
    least = [partition(chain, group, cluster, nm=n, in_flight_rule=LEANEST).bottleneck_ms for n in (1, 2, 3, 4)]
    richest = [partition(chain, group, cluster, nm=n, in_flight_rule=RICHEST).bottleneck_ms for n in (1, 2, 3, 4)]
    assert least == sorted(least)
    assert richest == sorted(richest)
    assert all(a <= b for a, b in zip(least, richest, strict=True))


def test_too_large_a_model_names_the_device_the_amount_and_the_way_out():
    tiny = kind("tiny", 10 * MIB, MIB)
    chain = chain_of({"tiny": [1.0, 1.0]}, parameters=[3 * MIB, 3 * MIB], batch_size=8)
    cluster = cluster_of([[tiny, tiny]], FAST, SLOW)
    with pytest.raises(PlanningError) as caught:
        partition(chain, Group(cluster.devices, False), cluster, nm=2, in_flight_rule=ONE_F_ONE_B)
    error = caught.value
    # Stage 0: 3 MiB x (weights 1 + versions 2 + gradients 1 + own sums 2) + 1 MiB reserve = 19 of 10 MiB.
    assert error.code == "HP301"
    assert error.where == "virtual worker of n0:0, n0:1"
    assert error.message == (
        "toy does not fit with Nm = 2: in the best cut, stage 0 (layer0 to layer0) on n0:0 (tiny) is over by 9.0 MiB,"
        " its largest part being versions; all stages need 32 MiB, the devices have 20 MiB"
    )
    assert (
        error.hint
        == "try a batch smaller than 8, an --nm below 2, or another --policy that puts larger devices together"
    )


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (["nope"], "is no node and no block"),
        (["op1b"], "lies inside block 1 (layer1)"),
        ([5], "has blocks 0 to 3"),
        (["-1"], "is no node"),
        ([0], "begins at block 0"),
        ([2, 1], "does not come after"),
        ([2, "layer2"], "does not come after"),
    ],
)
def test_wrong_splits(split, message):
    cluster = cluster_of([[kind("k")] * 3], FAST, SLOW)
    with pytest.raises(PlanningError) as caught:
        partition(
            chain_of({"k": [1.0] * 4}),
            Group(cluster.devices, False),
            cluster,
            nm=1,
            in_flight_rule=ONE_F_ONE_B,
            split=split,
        )
    assert caught.value.code == "HP303"
    assert message in caught.value.message
    assert caught.value.where == "--split"


def test_missing_times_of_a_kind():
    cluster = cluster_of([[kind("k"), kind("other")]], FAST, SLOW)
    with pytest.raises(PlanningError, match="no times for device kind 'other'") as caught:
        partition(chain_of({"k": [1.0]}), Group(cluster.devices, False), cluster, nm=1, in_flight_rule=ONE_F_ONE_B)
    assert caught.value.code == "HP304"


def test_too_many_unlike_devices_are_refused_at_once():
    kinds = [kind(f"k{i}") for i in range(20)]
    cluster = cluster_of([[k] for k in kinds], FAST, SLOW)
    chain = chain_of({k.name: [1.0] * 40 for k in kinds})
    with pytest.raises(PlanningError, match="20 devices in 20 classes") as caught:
        partition(chain, Group(cluster.devices, False), cluster, nm=1, in_flight_rule=ONE_F_ONE_B)
    assert caught.value.code == "HP302"
    plan = partition(chain, Group(cluster.devices, True), cluster, nm=1, in_flight_rule=ONE_F_ONE_B)
    assert plan.bottleneck_ms == 2.0


def test_zero_compute_and_infinite_links():
    cluster = cluster_of([[kind("k")] * 2], Link("inf", math.inf, 0.0), SLOW)
    plan = partition(
        chain_of({"k": [0.0] * 3}, activation_bytes=5),
        Group(cluster.devices, False),
        cluster,
        nm=3,
        in_flight_rule=ONE_F_ONE_B,
    )
    assert plan.bottleneck_ms == 0.0
    assert len(plan.stages) == 1


def test_oracle_enumerates_all_orders_and_cuts():
    """Guard for the guard: 4 devices and 4 blocks have sum over k of P(4, k) C(3, k - 1) = 136 pipelines."""
    chain = chain_of({"k": [1.0] * 4})
    devices = cluster_of([[kind("k")] * 4], FAST, SLOW).devices
    assert sum(1 for _ in all_plans(chain, devices)) == 4 + 12 * 3 + 24 * 3 + 24
    assert np.isfinite(least_bottleneck(chain, cluster_of([[kind("k")] * 4], FAST, SLOW), devices, nm=1, growth=1.0)[0])


@pytest.mark.parametrize("objective", ["hetpipe", "overlapped"])
def test_nothing_takes_any_time(objective):
    chain = chain_of({"k": [0.0] * 4}, values=[CrossingValue("v", 0, (1, 2), 0, 0), CrossingValue("w", 1, (3,), 0, 0)])
    cluster = cluster_of([[kind("k")] * 2], FAST, SLOW)
    for max_sets in (3, 100):
        options = {"nm": 1, "in_flight_rule": LEANEST, "objective": objective, "max_sets": max_sets}
        assert partition(chain, Group(cluster.devices), cluster, **options).bottleneck_ms == 0.0
