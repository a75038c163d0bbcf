"""Light nodes out of the way: what is left is legal, and bounds the graph from both sides."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.partition import closed_masks, least_bottleneck
from partition_check import OBJECTIVES
from planner_cases import chain_of, chains, cluster_of, clusters, kind

from hetpipe_compiler.errors import PlanningError
from hetpipe_compiler.ir.blocks import CrossingValue
from hetpipe_compiler.ir.cluster import Link
from hetpipe_compiler.passes import orders, partition_search
from hetpipe_compiler.passes.allocate import Group
from hetpipe_compiler.passes.block_graph import block_graph
from hetpipe_compiler.passes.closed_sets import closed_sets
from hetpipe_compiler.passes.in_flight import RULES, InFlightRule
from hetpipe_compiler.passes.light_nodes import left_out, lightened
from hetpipe_compiler.passes.orders import chain_orders
from hetpipe_compiler.passes.partition import partition
from hetpipe_compiler.passes.stage_memory import Recompute

LINK = Link("l", 1.0, 0.0)


def ladder(rungs: int):
    """Between a first block and a last, ``rungs`` independent ones of 1, 2, 3, ... ms: 2 ** rungs + 2 closed sets."""
    values = [CrossingValue("in", 0, tuple(range(1, rungs + 1)), 1000, 1000)]
    values += [CrossingValue(f"v{at}", at, (rungs + 1,), 1000, 1000) for at in range(1, rungs + 1)]
    return chain_of({"k": [1.0, *(float(at + 1) for at in range(rungs)), 1.0]}, values=values)


def test_the_lightest_join_what_reads_them_and_no_more_than_must():
    chain = ladder(6)
    found = lightened(chain, block_graph(chain), 20)
    assert found is not None
    assert [list(blocks) for blocks in found.merged.members] == [[0], [3], [4], [5], [6], [1, 2, 7]]
    assert len(found.merged_sets) == len(found.rest_sets) == 2**4 + 2
    assert found.rest.forward_ms["k"].tolist() == [1.0, 3.0, 4.0, 5.0, 6.0, 1.0]
    assert lightened(chain, block_graph(chain), 2) is None


def test_what_is_left_out_keeps_the_others_in_order():
    """0 feeds 1 and 2, 1 feeds 3, 2 feeds 4, 3 feeds 5: without 1 and 3, 5 still comes after 0, and not after 2."""
    values = [CrossingValue(f"v{a}", a, to, 8, 8) for a, to in ((0, (1, 2)), (1, (3,)), (2, (4,)), (3, (5,)))]
    rest = left_out(chain_of({"k": [1.0] * 6}, values=values, saved=[1] * 6), [range(1, 2), range(3, 4)])
    assert [(v.producer, v.consumers, v.forward_bytes) for v in rest.values] == [
        (0, (1,), 8),
        (1, (2,), 8),
        (0, (3,), 0),
    ]
    assert [block.name for block in rest.blocks] == ["layer0", "layer2", "layer4", "layer5"]
    assert [item.blocks for item in rest.saved] == [(0,), (1,), (2,), (3,)]


@settings(max_examples=60, deadline=None)
@given(
    chains(least=4, most=9), clusters(), st.integers(1, 4), st.sampled_from(RULES), OBJECTIVES,
    st.sampled_from(Recompute), st.floats(0, 1, exclude_max=True),
)  # fmt: skip
def test_bounds_from_both_sides(chain, cluster, nm, rule, objective, recompute, share):
    """Merged, a plan of the graph; with light nodes left out, none is worse than the graph's best."""
    chain = replace(chain, ends_fixed=True)
    every = closed_masks(chain)
    max_sets = 3 + int(share * (len(every) - 3))
    found = lightened(chain, block_graph(chain), max_sets)
    assert found is not None
    assert len(found.merged_sets) <= len(found.rest_sets) <= max_sets
    assert sorted(b for blocks in found.merged.members for b in blocks) == list(range(len(chain)))
    masks = set(every)
    for index in range(len(found.merged_sets)):
        blocks = [b for node in found.merged_sets.nodes(index) for b in found.merged.members[node]]
        assert sum(1 << b for b in blocks) in masks
    options = {"nm": nm, "in_flight_rule": rule, "objective": objective, "recompute": recompute}
    try:
        best = partition(chain, Group(cluster.devices), cluster, **options)
    except PlanningError:
        return
    bounded = partition(chain, Group(cluster.devices), cluster, **options, max_sets=max_sets)
    assert bounded.lower_bound_ms <= best.bottleneck_ms * (1 + 1e-9) + 1e-9
    assert bounded.bottleneck_ms >= best.bottleneck_ms * (1 - 1e-9) - 1e-9


def test_a_graph_with_too_many_closed_sets_is_bounded_closely():
    """4 layers of 7 branches of 2 (8,750 closed sets), one in two nearly free: 100 are searched, 1 % is proven."""
    rng = np.random.default_rng(1)
    values, times, at = [], [20.0], 0
    for _ in range(4):
        branches = [(at + 1 + 2 * b, at + 2 + 2 * b) for b in range(7)]
        values.append(CrossingValue(f"v{at}", at, tuple(a for a, _ in branches), 1000, 1000))
        values += [CrossingValue(f"v{a}", a, (b,), 1000, 1000) for a, b in branches]
        values += [CrossingValue(f"v{b}", b, (at + 15,), 1000, 1000) for _, b in branches]
        for branch in range(7):
            times += [0.01, float(rng.uniform(3, 6)) if branch < 4 else 0.02]
        times.append(20.0)
        at += 15
    chain = chain_of({"a": times, "b": [1.5 * ms for ms in times]}, values=values)
    assert len(closed_sets(block_graph(chain), 10_000)) == 8750
    cluster = cluster_of([[kind("a")] * 2, [kind("b")]], LINK, LINK)
    options = {"nm": 2, "in_flight_rule": InFlightRule(1.0)}
    exact = partition(chain, Group(cluster.devices), cluster, **options)
    bounded = partition(chain, Group(cluster.devices), cluster, **options, max_sets=100)
    assert exact.optimal
    assert bounded.lower_bound_ms <= exact.bottleneck_ms <= bounded.bottleneck_ms
    assert 0 < bounded.gap < 0.01
    assert bounded.bottleneck_ms < exact.bottleneck_ms * 1.005


def test_what_is_held_within_the_bounds_own_nearness_is_not_searched_for(monkeypatch):
    """One block decides: the chain's own order comes within 0.02 % of what any order must take."""
    chain = replace(ladder(6), ends_fixed=True)
    heavy = chain_of({"k": [0.001, *[0.003] * 3, 50.0, *[0.003] * 3]}, values=chain.values)
    cluster = cluster_of([[kind("k")] * 3], LINK, LINK)
    options = {"nm": 1, "in_flight_rule": InFlightRule(1.0), "max_sets": 20}
    monkeypatch.setattr(partition_search, "_below", None)  # calling it raises
    found = partition(heavy, Group(cluster.devices), cluster, **options)
    assert 0 < found.gap < 5e-4


@pytest.mark.parametrize(
    ("chain", "most", "text"),
    [
        (chain_of({"k": [1.0] * 5}), 200_000, "5 blocks in their one order"),
        (ladder(3), 200_000, "all 10 closed sets of 5 blocks"),
        (
            ladder(6),
            20,
            "all 18 closed sets of 6 blocks, 2 light ones merged into these: over 20 would not all be searched",
        ),
        (ladder(6), 2, "closed sets near the order of 8 blocks: over 2 would not all be searched"),
    ],
    ids=["line", "all", "merged", "band"],
)
def test_what_was_searched_is_said(monkeypatch, chain, most, text):
    monkeypatch.setattr(orders, "MAX_SETS", most)
    assert str(chain_orders(chain, most)) == text


def test_a_stage_of_a_light_block_alone_may_bring_its_neighbour_a_faster_link():
    """The block of no time on the small device lets the middle one receive inside its node: no bound may forbid it."""
    values = [CrossingValue("large", 0, (2,), 10**6, 0), CrossingValue("b", 0, (1,), 1, 0)]
    values += [CrossingValue("c", 1, (3,), 0, 0), CrossingValue("d", 2, (3,), 0, 0)]
    times = {"big": [5.0, 0.0, 9000.0, 0.0], "mid": [9000.0, 0.0, 5.0, 0.0], "small": [9000.0, 0.0, 9000.0, 0.0]}
    chain = replace(chain_of(times, values=values), ends_fixed=True)
    slow, fast = Link("slow", 0.001, 0.0), Link("fast", 1e3, 0.0)
    cluster = cluster_of([[kind("big")], [kind("mid"), kind("small")]], fast, slow)
    least = least_bottleneck(chain, cluster, cluster.devices, nm=1, growth=0.0)[0]
    assert least < 6
    options = {"nm": 1, "in_flight_rule": InFlightRule(0.0)}
    assert partition(chain, Group(cluster.devices), cluster, **options, max_sets=4).lower_bound_ms <= least
