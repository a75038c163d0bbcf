"""The interpreter trains exactly what the definition of WSP says, and keeps its bounds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe_compiler.runtime.interpret import InterpretResult, interpret

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "oracles"))
import wsp
from toy import Network, Toy, make_batches, write_toy

torch.set_num_threads(1)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}
CUTS = ((2,), (1, 3), ())
IN_FLIGHT = {1: ((1, 1), (1, 1, 1), (1,)), 4: ((4, 1), (4, 2, 1), (3,))}
MINIBATCHES = 30


def make(
    folder: Path, network: Network, *, workers: int, nm: int, staleness: int, speeds: Sequence[float] = (1, 1.7, 3)
) -> Toy:
    return write_toy(
        folder,
        network,
        cuts=CUTS[:workers],
        in_flight=IN_FLIGHT[nm][:workers],
        nm=nm,
        staleness=staleness,
        speeds=speeds[:workers],
    )


def oracle(toy: Toy, batches: Any, make_optimizer: Any, make_scheduler: Any = None) -> wsp.Outcome:
    workers = len(toy.plan.virtual_workers)
    return wsp.train(
        [toy.network.whole() for _ in range(workers)],
        [[wsp.Group(names, w) for names, w in toy.groups(vw)] for vw in range(workers)],
        batches,
        nm=toy.plan.nm,
        staleness=toy.plan.staleness,
        scale=1 / workers,
        make_optimizer=make_optimizer,
        make_scheduler=make_scheduler,
        loss_of=lambda model, batch: model(*batch)[0],
    )


def run(
    toy: Toy, batches: Any, make_optimizer: Any, *, reproducible: bool = True, scheduler: Any = None
) -> InterpretResult:
    workload = toy.workload(make_optimizer, batches, scheduler)
    return interpret(toy.plan, toy.folder, workload, minibatches=len(batches[0]), seed=3, reproducible=reproducible)


def assert_same(result: InterpretResult, expected: wsp.Outcome) -> None:
    for name, value in expected.weights.items():
        assert torch.equal(result.weights[name], value), name
    for vw, losses in enumerate(expected.losses):
        assert [result.losses[vw][p] for p in range(1, len(losses) + 1)] == losses


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("nm", [1, 4])
def test_equals_the_oracle_bit_for_bit(tmp_path: Path, nm: int, staleness: int, workers: int, optimizer: str) -> None:
    toy = make(tmp_path / "p", Network(), workers=workers, nm=nm, staleness=staleness)
    batches = make_batches(workers, MINIBATCHES)
    result = run(toy, batches, OPTIMIZERS[optimizer])
    expected = oracle(toy, batches, OPTIMIZERS[optimizer])
    assert_same(result, expected)
    moved = max((expected.weights[n] - v).abs().max().item() for n, v in toy.network.initial().items())
    assert moved > 1e-2
