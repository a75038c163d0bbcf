"""What --explain-plan says, on plans small enough to check by hand."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from planner_cases import MIB, chain_of, cluster_of, kind

from hetpipe_compiler.codegen.explain_plan import Explained, explain_plan
from hetpipe_compiler.ir.blocks import CrossingValue
from hetpipe_compiler.ir.cluster import Link
from hetpipe_compiler.passes.allocate import Allocation, Group, RunnerUp, allocate
from hetpipe_compiler.passes.decided import decided_workers, decisions_of
from hetpipe_compiler.passes.multilevel import shorten_chain
from hetpipe_compiler.passes.planning import PlannerOptions, plan_workers
from hetpipe_compiler.passes.stage_memory import Recompute


def text_of(chain, cluster, *, nm=None, runners_up=(), recompute=Recompute.WHERE_NEEDED, **more):
    """The explanation on one line."""
    groups = (Group(cluster.devices),)
    allocation = Allocation("test", groups, (), tuple(runners_up))
    given = PlannerOptions(nm=nm, recompute=recompute)
    workers = plan_workers(chain, cluster, allocation, given)

    def with_groups(changed):
        devices = tuple(changed.device(device.id) for device in cluster.devices)
        return replace(allocation, groups=(Group(devices),))

    def replan(asked):
        changed = asked.cluster or cluster
        options = replace(given, nm=asked.nm or nm, objective=asked.objective or "hetpipe")
        return plan_workers(asked.chain or chain, changed, with_groups(changed), options)

    decisions = decisions_of(
        chain, allocation, workers, partitioner="search", objective="hetpipe", staleness=0, placement="local",
        recompute=recompute, update_scale=None,
    )  # fmt: skip

    def recost(asked):
        changed = asked.cluster or cluster
        return decided_workers(asked.chain or chain, changed, with_groups(changed), decisions)

    text = explain_plan(
        Explained(
            chain, cluster, allocation, workers, replan, recost, staleness=0, objective="hetpipe",
            asked_nm=nm is not None, recompute=recompute, **more,
        )
    )  # fmt: skip
    assert max(map(len, text.splitlines())) <= 80
    return " ".join(text.split())


def test_bottleneck_bound_orders_and_network():
    chain = chain_of(
        {"a": [4.0, 2.0], "b": [8.0, 4.0]}, {"a": [8.0, 4.0], "b": [16.0, 8.0]}, activation_bytes=2_000_000
    )
    cluster = cluster_of([[kind("a")], [kind("b")]], Link("pcie", 10.0, 0.0), Link("net", 1.0, 0.0))
    text = text_of(chain, cluster, nm=2)
    # a takes the first block: 12 ms + 2 ms for the gradient; b the second: 12 ms + 2 ms. The other way round: 24 + 2.
    assert "bottleneck: stage 0 on n0:0 (a), 14.000 ms = 4.000 forward, 8.000 backward, 2.000 receiving" in text
    assert "bound: proven" in text
    assert "without limits of memory the same; with free links 12.000 ms; with computation shared out at will" in text
    assert "nothing else 12.000 ms" in text
    assert "Nm = 2: as asked for" in text
    assert "blocks: in the model's own order" in text
    assert "second best order: b, a (or some of these): 18.000 ms" in text
    # Two minibatches go round in 12 + 2 + 12 + 2 ms; 1 ms a message at twice the bandwidth.
    assert "period: 14.000 ms a minibatch, in which stage 0 computes 85.7 % and waits for other stages" in text
    assert "1 GB/s on net between nodes: +5.5 samples/s" in text
    assert "10 % more speed of each a: +2.9 samples/s" in text
    assert "nothing: 1 GB of memory on each a, b instead:" in text
    assert re.search(r"instead: \d+\.\d samples/s --objective overlapped", text)


def test_memory_limits_nm_and_has_a_price():
    card = kind("k", 75 * MIB)
    chain = chain_of({"k": [10.0] * 4}, {"k": [20.0] * 4}, activation_bytes=5_000_000, saved=[30 * MIB] * 4)
    cluster = cluster_of([[card] * 2], Link("l", 1.0, 0.0), Link("l", 1.0, 0.0))
    text = text_of(chain, cluster)
    assert (
        "recompute: stage 0 runs its forward again (20.000 ms of its backward) to hold 0.07 GB instead of 0.13;"
        " n0:0 has 0.08" in text
    )
    text = text_of(chain, cluster, recompute=Recompute.NEVER)
    assert "recompute" not in text
    assert re.search(r"Nm = 1, limited by memory: toy does not fit with Nm = 2: .* over by \d+\.\d MiB", text)
    gain = re.search(r"1 GB of memory on each k: \+(\d+\.\d) samples/s", text)
    assert float(gain[1]) > 0
    assert "devices: all alike" in text


def test_another_order_of_blocks_and_the_rest_of_auto():
    values = [CrossingValue(f"v{i}", i, (i + 2,), 8_000_000, 8_000_000) for i in range(4)]
    chain = chain_of({"k": [10.0] * 6}, values=values)
    cluster = cluster_of([[kind("k")] * 2], Link("l", 1.0, 0.0), Link("l", 1.0, 0.0))
    text = text_of(chain, cluster, nm=2, runners_up=[RunnerUp("NP", 12.5)])
    assert "blocks: in another order; the model's own reaches 46.000 ms at best" in text
    assert "12.5 samples/s NP" in text
    # 60 ms of computation on two devices.
    assert "no grouping of these devices exceeds 33.3 samples/s" in text


def test_what_merging_into_blocks_costs_at_most():
    """20 components of 1 ms in 3 blocks on 2 devices: 5 + 10 + 5, or the like, against 10 + 10."""
    whole = chain_of({"k": [1.0] * 20})
    cluster = cluster_of([[kind("k")] * 2], Link("l", 1.0, 0.0), Link("l", 1.0, 0.0))
    text = text_of(shorten_chain(whole, 3), cluster, whole=whole, uncoarsened_bounds_ms=(10.0,))
    found = re.search(
        r"coarsening: 3 blocks of 20 components; costs at most ([\d.]+) %: no partition .* below 10.000 ms", text
    )
    assert found is not None
    assert 19 < float(found[1]) < 61
    assert "coarsening" not in text_of(whole, cluster)


@pytest.mark.parametrize("count", [1, 3])
def test_devices_left_out_are_named(count):
    chain = chain_of({"good": [1.0], "bad": [50.0]})
    cluster = cluster_of([[kind("good")], [kind("bad")] * count], Link("l", 1.0, 0.0), Link("l", 1.0, 0.0))
    text = text_of(chain, cluster)
    assert f"unused: {', '.join(f'n1:{i}' for i in range(count))}" in text
    assert "devices: one" in text


def test_more_bandwidth_has_a_price_where_transfers_count():
    chain = chain_of({"k": [30.0] * 4}, activation_bytes=20_000_000)
    cluster = cluster_of([[kind("k")], [kind("k")]], Link("l", 1.0, 0.0), Link("net", 1.0, 0.0))
    for fixed in (False, True):
        text = text_of(chain, cluster, nm=1, fixed=fixed)
        assert ("with the plan kept: " if fixed else "with the plan kept or made anew: ") in text
        gain = re.search(r"1 GB/s on net between nodes: \+(\d+\.\d) samples/s", text)
        assert gain is not None
        assert float(gain[1]) > 0


def test_what_our_search_would_do_stands_beside_stages_by_others():
    chain = chain_of({"k": [1.0] * 4})
    cluster = cluster_of([[kind("k")] * 2], Link("l", 1.0, 0.0), Link("l", 1.0, 0.0))
    assert "500.0 samples/s stages by our search" in text_of(chain, cluster, nm=2, made_by="even")


def test_the_slowest_worker_sets_the_pace():
    chain = chain_of({"slow": [2.0] * 4, "fast": [1.0] * 4})
    cluster = cluster_of([[kind("slow")], [kind("fast")]], Link("l", 1.0, 0.0), Link("l", 1.0, 0.0))
    allocation = allocate(cluster, "NP")
    workers = plan_workers(chain, cluster, allocation)

    def replan(_):
        return workers

    about = Explained(chain, cluster, allocation, workers, replan, replan, 0, "hetpipe", asked_nm=True)
    text = " ".join(explain_plan(about).split())
    assert "NP: 250.0 samples/s" in text
    assert "pace: 2 x 125.0, as vw0 is the slowest; 1 faster ones wait for it up to 50 % of their time" in text
