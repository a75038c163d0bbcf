"""Nm, in-flight vectors and the plans of all virtual workers."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.partition import least_bottleneck, stage_bytes
from planner_cases import FAST, MIB, SLOW, chain_of, chains, cluster_of, clusters, kind

from hetpipe_compiler.errors import PlanningError
from hetpipe_compiler.ir.blocks import CrossingValue
from hetpipe_compiler.ir.cluster import Link
from hetpipe_compiler.passes.allocate import Allocation, Group
from hetpipe_compiler.passes.concurrency import choose_concurrency
from hetpipe_compiler.passes.partition import message_ms
from hetpipe_compiler.passes.simulate.pipeline import PipelineCosts, WaveExchange, steady_period_ms

FREE = Link("free", float("inf"), 0.0)


def allocation_of(*groups) -> Allocation:
    return Allocation("test", tuple(Group(tuple(devices), False) for devices in groups), ())


def costs_of(chain, cluster, worker) -> PipelineCosts:
    forward = np.array([s.forward_ms for s in worker.stages])
    backward = np.array([s.backward_ms for s in worker.stages])
    return PipelineCosts(forward, backward, *message_ms(chain.permuted(worker.order), worker.stages, cluster))


@settings(max_examples=25, deadline=None)
@given(chains(most=6), clusters(), st.one_of(st.none(), st.integers(1, 5)), st.integers(0, 2))
def test_plans_keep_every_promise(chain, cluster, nm, staleness):
    allocation = allocation_of(cluster.devices)
    options = {"nm": nm, "staleness": staleness}
    smallest = nm or 1
    if least_bottleneck(chain, cluster, cluster.devices, nm=smallest, growth=0)[0] == float("inf"):
        with pytest.raises(PlanningError) as caught:
            choose_concurrency(chain, cluster, allocation, **options)
        fits = [
            n
            for n in range(1, smallest)
            if least_bottleneck(chain, cluster, cluster.devices, nm=n, growth=0)[0] < 1e300
        ]
        assert caught.value.code == ("HP305" if fits else "HP301")
        if fits:
            assert f"--nm {max(fits)} fits" in caught.value.hint
        return
    (worker,) = choose_concurrency(chain, cluster, allocation, **options)
    assert nm is None or worker.nm == nm
    assert all(stage.memory["total"] <= stage.memory["capacity"] for stage in worker.stages)
    w = worker.in_flight
    assert w[-1] == 1
    assert len(w) == 1 or w[0] == worker.nm
    assert list(w) == sorted(w, reverse=True)
    assert worker.period_ms == steady_period_ms(costs_of(chain, cluster, worker), w)
    costs, nm = costs_of(chain, cluster, worker), worker.nm
    moved = chain.permuted(worker.order)
    for other in product(range(1, nm + 1), repeat=len(w)):
        if other[-1] == 1 and (len(w) == 1 or other[0] == nm) and list(other) == sorted(other, reverse=True):
            held = zip(worker.stages, other, strict=True)
            if all(
                stage_bytes(moved, s.blocks, count, s.device, worker.nm) <= s.device.kind.memory_bytes
                for s, count in held
            ):
                assert worker.period_ms <= steady_period_ms(costs, other) * 1.0011
    assert worker.bottleneck_ms == max(stage.stage_ms for stage in worker.stages)
    bound = least_bottleneck(chain, cluster, cluster.devices, nm=nm, growth=0)[0]
    assert worker.lower_bound_ms == pytest.approx(bound, rel=1e-9, abs=1e-9)
    assert worker.optimal == (worker.bottleneck_ms <= bound * (1 + 1e-9) + 1e-9)
    used = [stage.device.id for stage in worker.stages]
    assert sorted([*used, *(d.id for d in worker.unused)]) == sorted(d.id for d in cluster.devices)
    assert choose_concurrency(chain, cluster, allocation, **options) == (worker,)


def test_vector_is_the_best_that_fits():
    """Communication makes more in flight useful; the result is within 0.1 % of the best of all vectors that fit."""
    card = kind("k", 40 * MIB)
    chain = chain_of({"k": [10.0] * 4}, {"k": [20.0] * 4}, activation_bytes=5_000_000, saved=[5 * MIB] * 4)
    cluster = cluster_of([[card]] * 4, FAST, Link("net", 1.0, 0.0))
    (worker,) = choose_concurrency(chain, cluster, allocation_of(cluster.devices), nm=6, splits=[[1, 2, 3]])
    costs = costs_of(chain, cluster, worker)
    periods = {}
    for middle in combinations_with_replacement(range(6, 0, -1), 2):
        w = (6, *middle, 1)
        held = [count * (5 * MIB + (5_000_000 if s else 0)) for s, count in enumerate(w)]
        borders = [5_000_000, 10_000_000, 10_000_000, 5_000_000]
        if all(size + border <= 40 * MIB for size, border in zip(held, borders, strict=True)):
            periods[w] = steady_period_ms(costs, w)
    assert worker.in_flight in periods
    assert len(periods) < 21
    assert worker.period_ms <= min(periods.values()) * 1.001
    leaner = [w for w in periods if sum(w) < sum(worker.in_flight)]
    assert all(periods[w] > worker.period_ms for w in leaner)


@pytest.mark.parametrize("megabytes", [2, 5, 9, 14, 20])
def test_vector_is_the_best_of_all(megabytes):
    chain = chain_of({"k": [10.0] * 4}, {"k": [20.0] * 4}, activation_bytes=megabytes * 1_000_000)
    cluster = cluster_of([[kind("k")]] * 4, FAST, Link("net", 1.0, 0.0))
    (worker,) = choose_concurrency(chain, cluster, allocation_of(cluster.devices), nm=6, splits=[[1, 2, 3]])
    costs = costs_of(chain, cluster, worker)
    middles = combinations_with_replacement(range(6, 0, -1), 2)
    periods = {(6, *middle, 1): steady_period_ms(costs, (6, *middle, 1)) for middle in middles}
    assert periods[worker.in_flight] == worker.period_ms <= min(periods.values()) * 1.0011
    leaner = [w for w in periods if sum(w) < sum(worker.in_flight)]
    assert all(periods[w] > worker.period_ms for w in leaner)


def test_without_communication_nm_is_the_number_of_stages():
    chain = chain_of({"k": [1.0] * 4}, {"k": [2.0] * 4}, activation_bytes=1)
    cluster = cluster_of([[kind("k")] * 4], FREE, FREE)
    (worker,) = choose_concurrency(chain, cluster, allocation_of(cluster.devices))
    assert worker.nm == 4
    assert worker.in_flight == (4, 3, 2, 1)
    assert worker.period_ms == pytest.approx(3.0)
    assert worker.samples_per_s == pytest.approx(1000 / 3.0)


def test_nm_one_is_plain_model_parallelism():
    chain = chain_of({"k": [1.0] * 4}, {"k": [2.0] * 4}, activation_bytes=1_000_000)
    cluster = cluster_of([[kind("k")] * 2], Link("l", 1.0, 0.0), SLOW)
    (worker,) = choose_concurrency(chain, cluster, allocation_of(cluster.devices), nm=1, splits=[["2"]])
    assert worker.period_ms == pytest.approx(4 * 3.0 + 2 * 1.0)


def test_nm_is_equal_and_limited_by_the_smallest_memory():
    """The second virtual worker's cards hold three minibatches of one block, so nobody has more in flight."""
    large, small = kind("large"), kind("small", 19 * MIB)
    times = {"large": [1.0] * 4, "small": [1.0] * 4}
    chain = chain_of(times, activation_bytes=500_000, saved=[5 * MIB] * 4)
    cluster = cluster_of([[large] * 2, [small] * 2], SLOW, SLOW)
    workers = choose_concurrency(chain, cluster, allocation_of(cluster.devices[:2], cluster.devices[2:]))
    alone = choose_concurrency(chain, cluster, allocation_of(cluster.devices[:2]))
    assert [w.nm for w in workers] == [2, 2]
    assert alone[0].nm == 3
    with pytest.raises(PlanningError) as caught:
        choose_concurrency(chain, cluster, allocation_of(cluster.devices[:2], cluster.devices[2:]), nm=9)
    assert caught.value.code == "HP305"
    assert caught.value.hint.startswith("--nm 3 fits")
    assert "n1:0" in caught.value.where


def test_alike_workers_share_the_plan_whatever_the_order_of_their_devices():
    a, b = kind("a"), kind("b")
    chain = chain_of({"a": [1.0, 2, 3, 4, 2], "b": [2.0, 4, 6, 8, 4]}, activation_bytes=200_000)
    cluster = cluster_of([[a, a], [b, b]], FAST, SLOW)
    d = cluster.devices
    first, second = choose_concurrency(chain, cluster, allocation_of((d[0], d[2]), (d[3], d[1])))
    assert {s.device.id for s in second.stages} == {"n0:1", "n1:1"}
    assert [(s.device.kind, s.blocks, s.in_flight, s.memory) for s in first.stages] == [
        (s.device.kind, s.blocks, s.in_flight, s.memory) for s in second.stages
    ]
    assert replace(second, stages=first.stages) == first


def test_slowest_worker_decides_and_nm_is_the_smallest_near_the_best():
    fast, slow = kind("fast"), kind("slow")
    times = {"fast": [1.0] * 6, "slow": [5.0] * 6}
    chain = chain_of(times, {k: [2 * t for t in v] for k, v in times.items()}, activation_bytes=1)
    cluster = cluster_of([[fast] * 3, [slow] * 3], FREE, FREE)
    workers = choose_concurrency(chain, cluster, allocation_of(cluster.devices[:3], cluster.devices[3:]))
    assert workers[0].nm == 3
    assert workers[1].period_ms == pytest.approx(30.0)
    for nm in (1, 2):
        fewer = choose_concurrency(chain, cluster, allocation_of(cluster.devices[:3], cluster.devices[3:]), nm=nm)
        assert fewer[1].period_ms > 30.0 * 1.01


def test_skip_goes_straight_to_its_reader():
    values = [CrossingValue(f"v{i}", i, (i + 1,), 1_000_000, 1_000_000) for i in range(2)]
    values.append(CrossingValue("skip", 0, (2,), 3_000_000, 0))
    chain = chain_of({"k": [50.0] * 3}, values=values)
    cluster = cluster_of([[kind("k")] * 3], Link("l", 1.0, 0.0), SLOW)
    (worker,) = choose_concurrency(chain, cluster, allocation_of(cluster.devices), nm=3, splits=[[1, 2]])
    activation, gradient = message_ms(chain, worker.stages, cluster)
    nan = float("nan")
    np.testing.assert_array_equal(activation, [[nan, 1.0, 3.0], [nan, nan, 1.0], [nan, nan, nan]])
    np.testing.assert_array_equal(gradient, [[nan, nan, nan], [1.0, nan, nan], [nan, 1.0, nan]])
    (two,) = choose_concurrency(chain, cluster, allocation_of(cluster.devices), nm=2, splits=[[2]])
    activation, _ = message_ms(chain, two.stages, cluster)
    np.testing.assert_array_equal(activation, [[nan, 4.0], [nan, nan]])
    values[2] = replace(values[2], consumers=(1, 2))
    (two,) = choose_concurrency(
        replace(chain, values=tuple(values)), cluster, allocation_of(cluster.devices), nm=2, splits=[[2]]
    )
    activation, _ = message_ms(replace(chain, values=tuple(values)), two.stages, cluster)
    np.testing.assert_array_equal(activation, [[nan, 4.0], [nan, nan]])
    # The partitioner charges all that stage 2 reads to the link from stage 1.
    assert worker.stages[2].receive_ms == pytest.approx(4.0)


def test_exchange_with_the_servers_slows_small_waves():
    """A gated forward waits for the exchange, so a slow one asks for larger waves or staleness."""
    chain = chain_of({"k": [1.0] * 2}, {"k": [2.0] * 2}, parameters=[1000, 1000])
    cluster = cluster_of([[kind("k")] * 2], FREE, FREE)
    allocation = allocation_of(cluster.devices)
    seen = []

    def exchange_ms(device, parameter_bytes):
        seen.append((device.id, parameter_bytes))
        return 40.0

    (free,) = choose_concurrency(chain, cluster, allocation, nm=2)
    (slowed,) = choose_concurrency(chain, cluster, allocation, nm=2, exchange_ms=exchange_ms)
    (stale,) = choose_concurrency(chain, cluster, allocation, nm=2, staleness=30, exchange_ms=exchange_ms)
    expected = steady_period_ms(
        costs_of(chain, cluster, slowed), slowed.in_flight, WaveExchange(2, 0, np.array([40.0, 40.0]))
    )
    assert slowed.period_ms == expected
    assert slowed.period_ms > free.period_ms == pytest.approx(3.0)
    assert stale.period_ms == pytest.approx(3.0)
    assert set(seen) == {("n0:0", 1000), ("n0:1", 1000)}


def test_one_device_workers():
    chain = chain_of({"k": [1.0, 2.0]})
    cluster = cluster_of([[kind("k")] * 2], FAST, SLOW)
    workers = choose_concurrency(chain, cluster, allocation_of(cluster.devices[:1], cluster.devices[1:]))
    assert [(w.nm, w.in_flight, w.period_ms) for w in workers] == [(1, (1,), 3.0)] * 2


@pytest.mark.parametrize(("options", "code"), [({"nm": 0}, "HP307"), ({"splits": [[1], [1], [1]]}, "HP303")])
def test_wrong_options(options, code):
    cluster = cluster_of([[kind("k")] * 2], FAST, SLOW)
    with pytest.raises(PlanningError) as caught:
        choose_concurrency(
            chain_of({"k": [1.0, 2.0]}),
            cluster,
            allocation_of(cluster.devices[:1], cluster.devices[1:]),
            **options,
        )
    assert caught.value.code == code
