"""Recomputation and Nm: taken where nothing fits without or where it is faster; no search where memory is plenty."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.partition import stage_bytes
from planner_cases import FAST, SLOW, chain_of, chains, cluster_of, clusters, kind

from hetpipe_compiler.errors import PlanningError
from hetpipe_compiler.passes.allocate import Allocation, Group
from hetpipe_compiler.passes.concurrency import choose_concurrency
from hetpipe_compiler.passes.partition_search import Search
from hetpipe_compiler.passes.stage_memory import Recompute


def plan(chain, cluster, recompute, **options):
    allocation = Allocation("test", (Group(cluster.devices),), ())
    return choose_concurrency(chain, cluster, allocation, recompute=recompute, **options)[0]


@settings(max_examples=25, deadline=None)
@given(chains(most=6), clusters(), st.sampled_from([1, 4, 8]), st.none() | st.integers(1, 4))
def test_never_slower_than_without_and_always_within_memory(chain, cluster, factor, nm):
    chain = replace(chain, saved=tuple(replace(item, bytes=item.bytes * factor) for item in chain.saved))
    try:
        worker = plan(chain, cluster, Recompute.WHERE_NEEDED, nm=nm)
    except PlanningError:
        with pytest.raises(PlanningError):
            plan(chain, cluster, Recompute.NEVER, nm=nm)
        return
    moved = chain.permuted(worker.order)
    for stage in worker.stages:
        needs = stage_bytes(moved, stage.blocks, stage.in_flight, stage.device, worker.nm, recompute=stage.recompute)
        assert needs == stage.memory["total"] <= stage.memory["capacity"]
        plain = stage_bytes(moved, stage.blocks, stage.in_flight, stage.device, worker.nm)
        assert stage.recompute == (plain > stage.memory["capacity"])
    assert worker.lower_bound_ms <= worker.bottleneck_ms * (1 + 1e-9)
    try:
        without = plan(chain, cluster, Recompute.NEVER, nm=nm)
    except PlanningError:
        assert any(stage.recompute for stage in worker.stages)
        return
    # A smaller Nm within 1 % of the best is preferred.
    assert worker.period_ms <= without.period_ms * (1.0011 if nm else 1.0111)
    assert worker.lower_bound_ms <= without.lower_bound_ms * (1 + 1e-9)


#: Two equal stages; the first saves 80 bytes a minibatch and reads 5.
TWO = chain_of({"k": [2.0] * 4}, {"k": [4.0] * 4}, saved=[40, 40, 10, 10], replay=[5, 0, 0, 0], activation_bytes=1)


def two(memory_bytes):
    return cluster_of([[kind("k", memory_bytes)] * 2], FAST, SLOW)


def test_what_does_not_fit_otherwise_fits():
    chain = replace(TWO, colocate=((0, 1), (2, 3)))
    with pytest.raises(PlanningError) as caught:
        plan(chain, two(99), Recompute.NEVER, nm=2)
    assert caught.value.code == "HP305"
    worker = plan(chain, two(99), Recompute.WHERE_NEEDED, nm=2)
    assert [(stage.in_flight, stage.recompute) for stage in worker.stages] == [(2, True), (1, False)]
    with pytest.raises(PlanningError) as caught:
        plan(chain, two(90), Recompute.WHERE_NEEDED, nm=2)
    assert caught.value.code == "HP305"
    assert "--nm 1 fits" in caught.value.hint


def test_a_larger_nm_is_worth_a_forward():
    """One in flight: 24 ms a minibatch, each device idle half the time. Two: 12 + 4 ms of the first stage."""
    chain = replace(TWO, colocate=((0, 1), (2, 3)))
    without = plan(chain, two(99), Recompute.NEVER)
    worker = plan(chain, two(99), Recompute.WHERE_NEEDED)
    assert (without.nm, worker.nm) == (1, 2)
    assert without.period_ms == pytest.approx(24.0, abs=0.1)
    assert worker.period_ms == pytest.approx(16.0, abs=0.1)


def test_a_forward_that_costs_more_than_it_gains_is_not_repeated():
    """The first stage computes nearly all the time as it is: Nm = 1 stays."""
    chain = replace(TWO, forward_ms={"k": TWO.forward_ms["k"] * [20, 20, 0.1, 0.1]}, colocate=((0, 1), (2, 3)))
    assert plan(chain, two(99), Recompute.WHERE_NEEDED).nm == 1


def test_where_memory_is_plenty_nothing_more_is_searched(monkeypatch):
    searched = []
    fastest = Search.fastest

    def noted(self, nm, rule):
        searched.append(self.memory_rule.recompute)
        return fastest(self, nm, rule)

    monkeypatch.setattr(Search, "fastest", noted)
    assert plan(TWO, two(1000), Recompute.WHERE_NEEDED) == plan(TWO, two(1000), Recompute.NEVER)
    assert {*searched} == {Recompute.NEVER}
    plan(TWO, two(99), Recompute.WHERE_NEEDED)
    assert Recompute.WHERE_NEEDED in searched
