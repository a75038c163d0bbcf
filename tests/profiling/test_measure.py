"""How one call is measured: on memory as cold as in a model."""

from __future__ import annotations

import weakref

import torch
from torch.utils import _pytree as pytree

from hetpipe_compiler.passes.annotate_cost import NodeCall
from hetpipe_compiler.profiling.measure import Effort, measure_call

EFFORT = Effort(warmup=2, min_runs=20, max_runs=20, seconds=0.0)


def runs(numbers: int) -> tuple[list[int], list[int]]:
    """Of each run on ``numbers`` numbers: where it wrote its result, and how many earlier results were alive."""
    addresses: list[int] = []
    alive: list[int] = []
    results: list[weakref.ref[torch.Tensor]] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        alive.append(sum(result() is not None for result in results))
        out = 2 * x
        addresses.append(out.data_ptr())
        results.append(weakref.ref(out))
        return out

    leaves, spec = pytree.tree_flatten(((torch.empty(numbers, device="meta", requires_grad=True),), {}))
    assert measure_call(NodeCall(double, (), tuple(leaves), spec), torch.device("cpu"), EFFORT).runs == 20
    return addresses, alive


def test_results_are_written_to_memory_that_the_last_runs_did_not_touch() -> None:
    addresses, alive = runs(1000)
    assert alive[-1] == 8
    assert all(len(set(addresses[at : at + 8])) == 8 for at in range(14))


def test_large_results_do_not_pile_up() -> None:
    _, alive = runs(5_000_000)
    assert max(alive) == 1
