"""Policy auto: never below NP, ED and HD, legal, and close to the best of all groupings of a few devices."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_check import OBJECTIVES
from planner_cases import FAST, MIB, SLOW, chain_of, chains, cluster_of, clusters, kind

from hetpipe_compiler.errors import PlanningError
from hetpipe_compiler.ir.cluster import Link
from hetpipe_compiler.passes.allocate import Allocation, Group, allocate
from hetpipe_compiler.passes.auto import auto_allocation, rate_bound
from hetpipe_compiler.passes.planning import PlannerOptions, plan_workers
from hetpipe_compiler.passes.stage_memory import Recompute

BIG, SMALL = kind("big", 400 * MIB), kind("small", 120 * MIB)


def a_chain(seed=0, n=12):
    rng = np.random.default_rng(seed)
    work = rng.uniform(1, 4, n)
    return chain_of(
        {"big": list(work), "small": list(2.5 * work)},
        {"big": list(2 * work), "small": list(5 * work)},
        activation_bytes=2_000_000,
        parameters=[2 * MIB] * n,
        saved=[3 * MIB] * n,
        batch_size=8,
    )


def rate_of(chain, cluster, allocation, options=None):
    try:
        workers = plan_workers(chain, cluster, allocation, options)
    except PlanningError:
        return 0.0
    return len(workers) * min(worker.samples_per_s for worker in workers)


def auto(chain, cluster):
    return auto_allocation(chain, cluster, lambda allocation: plan_workers(chain, cluster, allocation))


CLUSTERS = [
    cluster_of([[BIG] * 4, [SMALL] * 4], FAST, SLOW),
    cluster_of([[BIG, SMALL], [BIG, SMALL, SMALL], [SMALL]], FAST, Link("net", 3.0, 5.0)),
    cluster_of([[BIG]], FAST, SLOW),
]


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("seed", [0, 1])
def test_never_below_the_papers_policies_and_never_above_the_bound(cluster, seed):
    chain = a_chain(seed)
    found = auto(chain, cluster)
    rate = rate_of(chain, cluster, found)
    for policy in ("NP", "ED", "HD"):
        assert rate >= rate_of(chain, cluster, allocate(cluster, policy)) * (1 - 1e-9), policy
    assert rate <= found.bound_samples_per_s * (1 + 1e-9)
    assert found.bound_samples_per_s == rate_bound(chain, cluster)
    used = [device.id for group in found.groups for device in group.devices]
    assert sorted([*used, *(device.id for device in found.unused)]) == sorted(d.id for d in cluster.devices)
    assert found.policy.startswith("auto (")
    rates = [other.samples_per_s for other in found.runners_up]
    assert rates == sorted(rates, reverse=True)
    assert all(other <= rate * (1 + 1e-3) for other in rates)
    assert auto(chain, cluster) == found


@settings(max_examples=15, deadline=None)
@given(chains(most=6), clusters(), OBJECTIVES, st.sampled_from(Recompute), st.integers(0, 2))
def test_never_below_the_papers_policies_under_any_objective(chain, cluster, objective, recompute, staleness):
    options = PlannerOptions(objective=objective, recompute=recompute, staleness=staleness)
    by_hand = {policy: rate_of(chain, cluster, allocate(cluster, policy), options) for policy in ("NP", "ED", "HD")}
    try:
        found = auto_allocation(
            chain, cluster, partial(plan_workers, chain, cluster, options=options), staleness=staleness,
            overlapped=objective == "overlapped", recompute=recompute,
        )  # fmt: skip
    except PlanningError:
        assert not any(by_hand.values())
        return
    rate = rate_of(chain, cluster, found, options)
    assert rate >= max(by_hand.values()) * (1 - 1e-9)
    assert rate <= found.bound_samples_per_s * (1 + 1e-9)


def groupings(devices):
    """Every way to put some of the devices into groups."""
    if not devices:
        yield []
        return
    first, *rest = devices
    for groups in groupings(rest):
        yield groups
        yield [[first], *groups]
        for at in range(len(groups)):
            yield [*groups[:at], [first, *groups[at]], *groups[at + 1 :]]


@pytest.mark.parametrize(("memory", "seed"), [(120, 0), (60, 1), (60, 2)])
def test_close_to_the_best_of_all_groupings(memory, seed):
    small = kind("small", memory * MIB)
    cluster = cluster_of([[BIG, BIG], [small, small]], FAST, Link("net", 3.0, 5.0))
    chain = a_chain(seed, n=8)
    best = 0.0
    for groups in groupings(list(cluster.devices)):
        if groups:
            candidate = Allocation("all", tuple(Group(tuple(group)) for group in groups), ())
            best = max(best, rate_of(chain, cluster, candidate))
    assert math.isfinite(best)
    assert rate_of(chain, cluster, auto(chain, cluster)) >= 0.97 * best


def test_kinds_that_only_hold_the_others_back_are_left_out():
    crawling = kind("small", 400 * MIB)
    cluster = cluster_of([[BIG] * 2, [crawling] * 2], FAST, Link("net", 0.001, 5000.0))
    chain = chain_of({"big": [1.0] * 6, "small": [100.0] * 6}, activation_bytes=2_000_000, batch_size=4)
    rate = rate_of(chain, cluster, auto(chain, cluster))
    assert rate == pytest.approx(2 * 4 / 6.0 * 1e3)
    assert rate > 10 * rate_of(chain, cluster, allocate(cluster, "NP"))


def test_nothing_fits():
    tiny = kind("tiny", MIB)
    cluster = cluster_of([[tiny] * 2, [tiny] * 2], FAST, SLOW)
    with pytest.raises(PlanningError) as caught:
        auto(chain_of({"tiny": [1.0] * 4}, parameters=[MIB] * 4), cluster)
    assert caught.value.code == "HP301"
