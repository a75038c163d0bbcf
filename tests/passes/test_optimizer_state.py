"""Bytes of optimizer state per byte of parameter, measured on the real optimizers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.ir.workload import make_optimizer
from hetpipe_compiler.passes.optimizer_state import optimizer_memory

PARAMETERS = {
    "a.weight": torch.empty(64, 32, device="meta"),
    "a.bias": torch.empty(64, device="meta"),
    "b.weight": torch.empty(16, 64, device="meta"),
}


@pytest.mark.parametrize(
    ("make", "factor"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0.0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1.0),
        (lambda p: torch.optim.AdamW(p, lr=0.1), 2.0),
        (lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True), 3.0),
        (lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True), 3.0),
        (lambda p: torch.optim.RMSprop(p, lr=0.1), 1.0),
        (lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True), 3.0),
        (lambda p: torch.optim.Adagrad(p, lr=0.1), 1.0),
    ],
)
def test_known_optimizers(make: Callable[[Any], torch.optim.Optimizer], factor: float) -> None:
    assert optimizer_memory(make, PARAMETERS).state == pytest.approx(factor)


@pytest.mark.parametrize(
    ("make", "step", "loop"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 0.0, 0.0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1), 1.0, 1.0),
        (lambda p: torch.optim.AdamW(p, lr=0.1), 1.0, 2.0),
        (lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False), 2.0 * 64 * 32 / (64 * 32 + 64 + 16 * 64), 2.0),
    ],
)
def test_a_step_takes_all_parameters_at_once_or_one_after_the_other(
    make: Callable[[Any], torch.optim.Optimizer], step: float, loop: float
) -> None:
    memory = optimizer_memory(make, PARAMETERS)
    assert (memory.step, memory.loop) == (pytest.approx(step), pytest.approx(loop))


def test_half_precision_parameters_have_state_of_their_size() -> None:
    parameters = {"w": torch.empty(10, 10, dtype=torch.bfloat16, device="meta")}
    assert optimizer_memory(lambda p: torch.optim.AdamW(p, lr=0.1), parameters).state == pytest.approx(2.0)


def test_state_of_a_part_counts_against_all() -> None:
    def make(named_parameters: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for n, p in named_parameters if n == "b.weight"], lr=0.1, momentum=0.9)

    total = sum(p.numel() for p in PARAMETERS.values())
    assert optimizer_memory(make, PARAMETERS).state == pytest.approx(16 * 64 / total)


def test_names_are_given_to_who_asks() -> None:
    seen: list[Any] = []

    def named(named_parameters: Any) -> torch.optim.Optimizer:
        seen.extend(n for n, _ in named_parameters)
        return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)

    real = {n: torch.nn.Parameter(torch.zeros(2)) for n in PARAMETERS}
    make_optimizer(named, real)
    assert seen == list(PARAMETERS)
    assert make_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1), real).param_groups[0][
        "params"
    ] == list(real.values())


def test_an_optimizer_that_reads_values_is_measured_for_real() -> None:
    class Reads(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                assert all(p.grad.sum().item() == p.grad.sum().item() for p in group["params"])
            return super().step(closure)

    assert optimizer_memory(lambda p: Reads(p, lr=0.1, momentum=0.9), PARAMETERS).state == pytest.approx(1.0)


@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.SGD(p, lr=-1), lambda p: list(p), lambda: None, lambda _: sys.exit(0)]
)
def test_an_optimizer_that_cannot_be_made(make: Any) -> None:
    with pytest.raises(WorkloadError) as caught:
        optimizer_memory(make, PARAMETERS)
    assert caught.value.code == "HP109"
    assert str(caught.value.where).startswith(("tests/passes/test_optimizer_state.py:", "Workload.optimizer"))
