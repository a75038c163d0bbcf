"""The relaxation: it never rules out what is possible, and it proves much more than computation alone."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles.partition import least_bottleneck
from planner_cases import FAST, SLOW, chain_of, chains, cluster_of, clusters, kind

from hetpipe_compiler.ir.blocks import CrossingValue
from hetpipe_compiler.ir.cluster import Link
from hetpipe_compiler.passes.allocate import Group
from hetpipe_compiler.passes.device_classes import device_classes
from hetpipe_compiler.passes.in_flight import RULES, InFlightRule
from hetpipe_compiler.passes.partition_search import search
from hetpipe_compiler.passes.stage_memory import MemoryRule

ONE_F_ONE_B = InFlightRule(1.0)


def space_of(chain, cluster, objective="hetpipe", *, ordered=False):
    classes = device_classes(Group(cluster.devices, ordered), cluster, chain)
    return search(chain, classes, MemoryRule.of(chain), overlapped=objective == "overlapped").graph


@settings(max_examples=40, deadline=None)
@given(
    chains(least=2), clusters(), st.integers(1, 5), st.sampled_from(RULES), st.sampled_from(["hetpipe", "overlapped"]),
    st.booleans(),
)  # fmt: skip
def test_no_plan_is_ruled_out(chain, cluster, nm, rule, objective, ordered):
    space = space_of(chain, cluster, objective, ordered=ordered)
    assume(space is not None)
    options = {"nm": nm, "growth": rule.growth, "objective": objective, "ordered": ordered}
    least = least_bottleneck(chain, cluster, cluster.devices, **options)[0]
    assume(math.isfinite(least))
    for cap_ms in (least, 1.5 * least + 1, space.most_ms):
        assert space.may_reach(nm, rule, cap_ms)[0]
    # And what it leaves is enough for the sweep to find the optimum.
    for cap_ms in (least * (1 + 1e-9), 1.5 * least + 1):
        assert space.least_bottleneck(nm, rule, cap_ms, 1 << 62)[0] == pytest.approx(least, rel=1e-9, abs=1e-9)
    assert space.least_bottleneck(nm, rule, space.most_ms, 1 << 62)[0] == pytest.approx(least, rel=1e-9, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(chains(least=2), clusters(), st.integers(1, 3), st.sampled_from(["hetpipe", "overlapped"]))
def test_equals_the_search_without_it(chain, cluster, nm, objective):
    space = space_of(chain, cluster, objective)
    assume(space is not None)
    plain = replace(space, relaxed=False)
    for cap_ms in (space.lower_bound_ms, 1.3 * space.lower_bound_ms, 2 * space.lower_bound_ms, space.most_ms):
        with_it, _ = space.least_bottleneck(nm, ONE_F_ONE_B, cap_ms, 1 << 62)
        assert with_it == plain.least_bottleneck(nm, ONE_F_ONE_B, cap_ms, 1 << 62)[0]


def branches(count, length, work_ms, n_bytes):
    """A head, ``count`` parallel branches of ``length`` blocks, a tail; every value of the same size."""
    blocks, values, ends = 1, [], []
    for _ in range(count):
        path = [0, *range(blocks, blocks + length)]
        values += [CrossingValue(f"v{a}.{b}", a, (b,), n_bytes, n_bytes) for a, b in pairwise(path)]
        ends.append(path[-1])
        blocks += length
    values += [CrossingValue(f"end{a}", a, (blocks,), n_bytes, n_bytes) for a in ends]
    return chain_of({"k": [work_ms] * (blocks + 1)}, values=values)


@pytest.mark.parametrize("objective", ["hetpipe", "overlapped"])
def test_communication_counts_in_the_bound(objective):
    """Any cut that parts the work evenly parts all four branches: 4 x 2 ms each way on top of 13 ms, or beside them."""
    chain = branches(4, 6, 1.0, 2_000_000 if objective == "hetpipe" else 8_000_000)
    cluster = cluster_of([[kind("k")] * 2], Link("l", 1.0, 0.0), SLOW)
    space = space_of(chain, cluster, objective)
    assert space.lower_bound_ms == 13.0
    least, _ = space.least_bottleneck(1, ONE_F_ONE_B, space.most_ms, 1 << 62)
    assert least > 1.3 * space.lower_bound_ms
    assert not space.may_reach(1, ONE_F_ONE_B, 0.99 * least)[0]


def test_memory_rules_out_everything():
    chain = replace(branches(3, 4, 1.0, 1000), saved=())
    chain = replace(chain, resident=(40,) * len(chain))
    cluster = cluster_of([[kind("k", 250)] * 2], FAST, SLOW)
    space = space_of(chain, cluster)
    assert not space.may_reach(1, ONE_F_ONE_B, space.most_ms)[0]
    roomy = cluster_of([[kind("k", 300)] * 2], FAST, SLOW)
    assert space_of(chain, roomy).may_reach(1, ONE_F_ONE_B, space.most_ms)[0]
