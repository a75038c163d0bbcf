"""Planner benchmarks: ``make bench`` or ``pytest bench/bench_partition.py``. Compilation by numba is not counted."""

from __future__ import annotations

import pytest
from planner_workloads import paper_cluster, residual_chain

from hetpipe_compiler.passes.allocate import Allocation, Group, allocate
from hetpipe_compiler.passes.concurrency import choose_concurrency
from hetpipe_compiler.passes.in_flight import InFlightRule
from hetpipe_compiler.passes.partition import partition

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
