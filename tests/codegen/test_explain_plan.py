"""What --explain-plan says, on plans small enough to check by hand."""

from __future__ import annotations

import re

import pytest
from planner_cases import MIB, chain_of, cluster_of, kind

from hetpipe_compiler.codegen.explain_plan import Explained, explain_plan
from hetpipe_compiler.ir.blocks import CrossingValue
from hetpipe_compiler.ir.cluster import Link
from hetpipe_compiler.passes.allocate import Allocation, Group, RunnerUp
from hetpipe_compiler.passes.planning import PlannerOptions, plan_workers


def text_of(chain, cluster, *, nm=None, runners_up=(), bound=None):
    groups = (Group(cluster.devices),)
    allocation = Allocation("test", groups, (), tuple(runners_up), bound)

    def replan(changed, wanted, nm):
        return plan_workers(chain, changed, wanted, PlannerOptions(nm=nm))

    workers = replan(cluster, allocation, nm)
    return explain_plan(
        Explained(chain, cluster, allocation, workers, replan, staleness=0, overlapped=False, asked_nm=nm is not None)
    )


def test_bottleneck_bound_orders_and_network():
    chain = chain_of(
        {"a": [4.0, 2.0], "b": [8.0, 4.0]}, {"a": [8.0, 4.0], "b": [16.0, 8.0]}, activation_bytes=2_000_000
    )
    cluster = cluster_of([[kind("a")], [kind("b")]], Link("pcie", 10.0, 0.0), Link("net", 1.0, 0.0))
    text = text_of(chain, cluster, nm=2)
    # a takes the first block: 12 ms + 2 ms for the gradient; b the second: 12 ms + 2 ms. The other way round: 24 + 2.
    assert "bottleneck: stage 0 on n0:0 (a), 14.000 ms = 4.000 forward, 8.000 backward, 2.000 receiving" in text
    assert "bound: proven" in text
    assert "computation alone, shared out at will, would take 12.000 ms" in text
    assert "Nm = 2: as asked for" in text
    assert "blocks: in the model's own order" in text
    assert "second best order: b, a (or some of these): 18.000 ms" in text
    assert re.search(r"1 GB/s on net between nodes: \+\d+\.\d samples/s", text)
    assert "1 GB of memory on each a: +0.0 samples/s" in text


def test_memory_limits_nm_and_has_a_price():
    card = kind("k", 75 * MIB)
    chain = chain_of({"k": [10.0] * 4}, {"k": [20.0] * 4}, activation_bytes=5_000_000, saved=[30 * MIB] * 4)
    cluster = cluster_of([[card] * 2], Link("l", 1.0, 0.0), Link("l", 1.0, 0.0))
    text = text_of(chain, cluster)
    assert re.search(r"Nm = 1, limited by memory: toy does not fit with Nm = 2: .* over by \d+\.\d MiB", text)
    gain = re.search(r"1 GB of memory on each k: \+(\d+\.\d) samples/s", text)
    assert float(gain[1]) > 0
    assert "devices: all alike" in text


def test_another_order_of_blocks_and_the_rest_of_auto():
    values = [CrossingValue(f"v{i}", i, (i + 2,), 8_000_000, 8_000_000) for i in range(4)]
    chain = chain_of({"k": [10.0] * 6}, values=values)
    cluster = cluster_of([[kind("k")] * 2], Link("l", 1.0, 0.0), Link("l", 1.0, 0.0))
    text = text_of(chain, cluster, nm=2, runners_up=[RunnerUp("NP", 12.5)], bound=99.0)
    assert "blocks: in another order; the model's own reaches 46.000 ms at best" in text
    assert re.search(r"12\.5 samples/s  NP", text)
    assert re.search(r"99\.0 samples/s  no allocation exceeds this", text)


@pytest.mark.parametrize("count", [1, 3])
def test_devices_left_out_are_named(count):
    chain = chain_of({"good": [1.0], "bad": [50.0]})
    cluster = cluster_of([[kind("good")], [kind("bad")] * count], Link("l", 1.0, 0.0), Link("l", 1.0, 0.0))
    text = text_of(chain, cluster)
    assert f"unused: {', '.join(f'n1:{i}' for i in range(count))}" in text
    assert "devices: one" in text
