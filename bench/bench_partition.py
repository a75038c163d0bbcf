"""Planner benchmarks: ``make bench`` or ``pytest bench/bench_partition.py``. Compilation by numba is not counted."""

from __future__ import annotations

import pytest
from planner_workloads import inception_graph, large_cluster, operator_graph, paper_cluster, residual_chain

from hetpipe_compiler.passes.allocate import Allocation, Group, allocate
from hetpipe_compiler.passes.auto import auto_allocation
from hetpipe_compiler.passes.concurrency import choose_concurrency
from hetpipe_compiler.passes.in_flight import InFlightRule
from hetpipe_compiler.passes.partition import partition
from hetpipe_compiler.passes.planning import plan_workers

CLUSTER = paper_cluster()
#: One device of each kind, and all 16: the orders of 4 classes of 4.
GROUPS = {4: Group(CLUSTER.devices[::4], False), 16: Group(CLUSTER.devices, False)}


@pytest.mark.parametrize("devices", [4, 16])
@pytest.mark.parametrize("blocks", [200, 500])
def test_one_partition(benchmark, blocks, devices):
    """Least bottleneck over all cuts and orders, Nm = 4, 1F1B's vector."""
    chain = residual_chain(blocks)
    options = {"nm": 4, "in_flight_rule": InFlightRule(1.0)}
    plan = benchmark.pedantic(partition, (chain, GROUPS[devices], CLUSTER), options, rounds=3, warmup_rounds=1)
    assert plan.bottleneck_ms < 2 * plan.lower_bound_ms


@pytest.mark.parametrize("policy", ["NP", "ED", "HD"])
@pytest.mark.parametrize("blocks", [100, 500])
def test_nm_and_all_workers(benchmark, blocks, policy):
    """What hetpipe-compile does: every Nm, four virtual workers of the paper's cluster."""
    chain = residual_chain(blocks)
    allocation = allocate(CLUSTER, policy)
    workers = benchmark.pedantic(choose_concurrency, (chain, CLUSTER, allocation), rounds=3, warmup_rounds=1)
    assert len(workers) == 4


def test_one_large_worker(benchmark):
    """16 devices in one virtual worker, every Nm."""
    allocation = Allocation("one", (GROUPS[16],), ())
    options = {"exchange_ms": lambda device, size: 2 * size / 6e6}  # noqa: ARG005
    chain = residual_chain(200)
    (worker,) = benchmark.pedantic(choose_concurrency, (chain, CLUSTER, allocation), options, rounds=1, warmup_rounds=1)
    assert len(worker.stages) > 8


#: Two of each kind, and two of each of three kinds.
EIGHT = Group(tuple(CLUSTER.devices[i] for i in (0, 1, 4, 5, 8, 9, 12, 13)))
SIX = Group(EIGHT.devices[:6])
OPTIONS = {"nm": 4, "in_flight_rule": InFlightRule(1.0)}


def test_graph_with_602_closed_sets(benchmark):
    """200 nodes, 8 devices of 4 kinds: half a second."""
    chain = inception_graph(25, (1, 2, 3))
    plan = benchmark.pedantic(partition, (chain, EIGHT, CLUSTER), OPTIONS, rounds=3, warmup_rounds=1)
    assert plan.optimal


def test_chain_of_1000(benchmark):
    """16 devices of 4 kinds: a second."""
    chain = residual_chain(1000)
    plan = benchmark.pedantic(partition, (chain, GROUPS[16], CLUSTER), OPTIONS, rounds=3, warmup_rounds=1)
    assert plan.optimal


def test_operator_graph_of_2001(benchmark):
    """5,402 closed sets, 6 devices of 3 kinds: five seconds."""
    chain = operator_graph()
    plan = benchmark.pedantic(partition, (chain, SIX, CLUSTER), OPTIONS, rounds=1, warmup_rounds=1)
    assert plan.optimal


@pytest.mark.parametrize("objective", ["hetpipe", "overlapped"])
@pytest.mark.parametrize("traffic", [0.1, 1, 8])
@pytest.mark.parametrize("shape", [(10, (3, 6, 9, 12)), (9, (2, 2, 2, 3, 4, 5)), (16, (2, 3, 3, 3, 4, 5))], ids=str)
def test_parallel_branches(benchmark, shape, traffic, objective):
    """36,402, 29,162 and 92,162 closed sets, 6 devices of 3 kinds; values as large as usual, or smaller, or larger."""
    chain = inception_graph(*shape, traffic=traffic)
    options = {**OPTIONS, "objective": objective}
    plan = benchmark.pedantic(partition, (chain, SIX, CLUSTER), options, rounds=1, warmup_rounds=1)
    benchmark.extra_info["bottleneck_ms"], benchmark.extra_info["bound_ms"] = plan.bottleneck_ms, plan.lower_bound_ms
    assert plan.optimal


@pytest.mark.parametrize("devices", [16, 64, 256])
def test_auto(benchmark, devices):
    """A minute at most."""
    cluster, chain = large_cluster(devices), residual_chain(120)

    def plan(allocation):
        return plan_workers(chain, cluster, allocation)

    found = benchmark.pedantic(auto_allocation, (chain, cluster, plan), rounds=1)
    benchmark.extra_info["policy"] = found.policy
