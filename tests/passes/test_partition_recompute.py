"""Stages that recompute: the search against brute force, and by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.partition import in_flight, least_bottleneck, least_overflow, stage_bytes
from partition_check import OBJECTIVES, check
from planner_cases import FAST, SLOW, chain_of, chains, cluster_of, clusters, kind

from hetpipe_compiler.errors import PlanningError
from hetpipe_compiler.passes.allocate import Group
from hetpipe_compiler.passes.device_classes import device_classes
from hetpipe_compiler.passes.in_flight import LEANEST, RULES, InFlightRule
from hetpipe_compiler.passes.partition import partition
from hetpipe_compiler.passes.partition_search import search
from hetpipe_compiler.passes.stage_memory import MemoryRule, Recompute


@st.composite
def saving_chains(draw, most=7, least=1):
    """Much is saved, so that memory binds where several minibatches are in flight."""
    chain = draw(chains(most=most, least=least))
    factor = draw(st.sampled_from([1, 3, 8]))
    return replace(chain, saved=tuple(replace(item, bytes=item.bytes * factor) for item in chain.saved))


def check_flags(plan, chain, recompute, nm):
    """A stage recomputes where it must (``always``: where that needs less memory), and nowhere else."""
    moved = chain.permuted(plan.order)
    for stage in plan.stages:
        plain = stage_bytes(moved, stage.blocks, stage.in_flight, stage.device, nm)
        less = stage_bytes(moved, stage.blocks, stage.in_flight, stage.device, nm, recompute=True)
        wanted = recompute is Recompute.ALWAYS or plain > stage.device.kind.memory_bytes
        assert stage.recompute == (stage.in_flight > 1 and wanted and less < plain)


@settings(max_examples=80, deadline=None)
@given(
    saving_chains(), clusters(), st.integers(2, 5), st.sampled_from(RULES), st.booleans(), OBJECTIVES,
    st.sampled_from([Recompute.WHERE_NEEDED] * 3 + [Recompute.ALWAYS]),
)  # fmt: skip
def test_equals_brute_force(chain, cluster, nm, rule, ordered, objective, recompute):
    options = {"nm": nm, "growth": rule.growth, "ordered": ordered, "objective": objective}
    oracle = least_bottleneck(chain, cluster, cluster.devices, recompute=recompute.value, **options)
    group = Group(cluster.devices, ordered)
    options = {"nm": nm, "in_flight_rule": rule, "objective": objective, "recompute": recompute}
    if math.isinf(oracle[0]):
        with pytest.raises(PlanningError) as caught:
            partition(chain, group, cluster, **options)
        assert caught.value.code == "HP301"
        return
    plan = partition(chain, group, cluster, **options)
    check(plan, chain, cluster, oracle, w=in_flight(nm, len(plan.stages), rule.growth), nm=nm, objective=objective)
    check_flags(plan, chain, recompute, nm)


@settings(max_examples=30, deadline=None)
@given(saving_chains(least=2), clusters(), st.integers(2, 5))
def test_the_best_attempt_exceeds_memory_least(chain, cluster, nm):
    classes = device_classes(Group(cluster.devices, False), cluster, chain)
    space = search(replace(chain, colocate=()), classes, MemoryRule.of(chain, recompute=Recompute.WHERE_NEEDED))
    attempt = space.least_overflow(nm, LEANEST)
    assert attempt is not None
    assert attempt.objective == least_overflow(chain, cluster.devices, nm=nm, recompute=True)


#: Two devices with room for 120 bytes; the first stage holds what two minibatches save.
SMALL = kind("k", 120)
SAVING = {"saved": [40, 40, 10, 10], "replay": [5, 0, 0, 0], "activation_bytes": 1}


def test_a_stage_without_room_takes_its_forward_twice():
    """[0, 1] plain would hold 2 x 80 + 1; recomputing 80 + 2 x 5 + 1."""
    chain = chain_of({"k": [2.0, 2.0, 3.0, 3.0]}, {"k": [4.0, 4.0, 6.0, 6.0]}, **SAVING)
    cluster = cluster_of([[SMALL] * 2], FAST, SLOW)
    options = {"nm": 2, "in_flight_rule": InFlightRule(1.0)}
    plan = partition(chain, Group(cluster.devices, False), cluster, recompute=Recompute.WHERE_NEEDED, **options)
    first, last = plan.stages
    assert (first.blocks, first.recompute, last.recompute) == ((0, 2), True, False)
    assert (first.forward_ms, first.backward_ms) == (4.0, 12.0)
    assert first.memory["activations"] == 80
    assert first.memory["replay"] == 10
    assert first.memory["total"] == 91
    assert plan.optimal
    # Without, the first stage is one block: 2 x 40 + 1.
    plain = partition(chain, Group(cluster.devices, False), cluster, **options)
    assert [stage.blocks for stage in plain.stages] == [(0, 1), (1, 4)]
    assert plain.bottleneck_ms > plan.bottleneck_ms


def test_plenty_of_memory_is_never_paid_for():
    chain = chain_of({"k": [2.0, 2.0, 3.0, 3.0]}, {"k": [4.0, 4.0, 6.0, 6.0]}, **SAVING)
    cluster = cluster_of([[kind("k", 1000)] * 2], FAST, SLOW)
    options = {"nm": 2, "in_flight_rule": InFlightRule(1.0)}
    plans = [
        partition(chain, Group(cluster.devices, False), cluster, recompute=recompute, **options)
        for recompute in (Recompute.NEVER, Recompute.WHERE_NEEDED)
    ]
    assert plans[0] == plans[1]


def test_where_replaying_needs_as_much_it_is_no_way_out():
    chain = chain_of({"k": [2.0, 2.0]}, saved=[40, 10], replay=[40, 0])
    cluster = cluster_of([[kind("k", 79)] * 2], FAST, SLOW)
    options = {"nm": 2, "in_flight_rule": InFlightRule(1.0), "recompute": Recompute.WHERE_NEEDED}
    plan = partition(chain, Group(cluster.devices, False), cluster, **options)
    assert [stage.blocks for stage in plan.stages] == [(0, 2)]
