"""The partition against an integer program, on graphs too large for brute force."""

from __future__ import annotations

import numpy as np
import pytest
from oracles.integer_program import least_bottleneck_ms
from planner_cases import cluster_of, kind

from hetpipe_compiler.errors import PlanningError
from hetpipe_compiler.ir.blocks import Block, BlockChain, CrossingValue, SharedBytes
from hetpipe_compiler.ir.cluster import Link
from hetpipe_compiler.passes.allocate import Group
from hetpipe_compiler.passes.in_flight import LEANEST
from hetpipe_compiler.passes.partition import partition


def random_graph(rng: np.random.Generator, n: int) -> BlockChain:
    """Branches that fork and join, times per kind, one-block parameters and activations."""
    values = []
    for b in range(n - 1):
        near = rng.choice(np.arange(b + 1, min(n, b + 4)), size=min(n - 1 - b, int(rng.integers(1, 3))), replace=False)
        size = int(rng.integers(1, 40))
        values.append(CrossingValue(f"v{b}", b, tuple(sorted(int(c) for c in near)), size, size))
    sizes = [int(size) for size in rng.integers(0, 30, 2 * n)]
    return BlockChain(
        name="random",
        batch_size=1,
        blocks=tuple(Block(f"layer{b}", (f"op{b}",)) for b in range(n)),
        forward_ms={k: rng.integers(1, 20, n).astype(float) for k in "abc"},
        backward_ms={k: rng.integers(1, 20, n).astype(float) for k in "abc"},
        measured=False,
        values=tuple(values),
        parameters=tuple(SharedBytes(f"p{b}", sizes[b], (b,)) for b in range(n)),
        frozen=(),
        saved=tuple(SharedBytes(f"s{b}", sizes[n + b], (b,)) for b in range(n)),
        optimizer_factor=2.0,
        colocate=((2, 5),) if rng.integers(2) else (),
        ends_fixed=bool(rng.integers(2)),
    )


def random_cluster(rng: np.random.Generator, n: int):
    """Four devices of three kinds; memory for somewhat more than an equal share of the model."""
    link = Link("link", float(rng.choice([1e-6, 4e-6])), 0.0)
    kinds = [kind(name, int(n * 120 * rng.uniform(0.3, 0.8))) for name in "abc"]
    return cluster_of([[kinds[0]] * 2, [kinds[1], kinds[2]]], link, link)


def check(seed: int, n: int, seconds: float) -> None:
    rng = np.random.default_rng(seed)
    chain, cluster = random_graph(rng, n), random_cluster(rng, n)
    expected = least_bottleneck_ms(chain, cluster, seconds=seconds)
    if expected is None:
        with pytest.raises(PlanningError, match="does not fit"):
            partition(chain, Group(cluster.devices), cluster, nm=1, in_flight_rule=LEANEST)
        return
    plan = partition(chain, Group(cluster.devices), cluster, nm=1, in_flight_rule=LEANEST)
    assert plan.optimal
    assert plan.bottleneck_ms == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("seed", "n"), [(0, 10), (1, 12), (2, 14), (3, 16)])
def test_equals_the_integer_program(seed, n):
    check(seed, n, seconds=120)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "n"), [(10, 40), (11, 45), (12, 50), (13, 55), (14, 60)])
def test_larger_graphs_equal_the_integer_program(seed, n):
    check(seed, n, seconds=3600)
