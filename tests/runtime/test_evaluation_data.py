"""The batches of an evaluation: counted before, and the same ones when they are used."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import Network, Toy, write_toy

from hetpipe_compiler.errors import RunError
from hetpipe_compiler.frontend.load import LoadedWorkload
from hetpipe_compiler.ir.workload import Workload
from hetpipe_compiler.runtime.evaluation_data import EvaluationBatches, evaluation_minibatches


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    folder = tmp_path_factory.mktemp("toy") / "p"
    return write_toy(folder, Network(), cuts=[[2]], in_flight=[[2, 1]], nm=2, staleness=0)


def make(x: float, size: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((size, 8), float(x)), torch.zeros(size, dtype=torch.long)


def load(evaluation_data: Callable[[], Iterable[Any]]) -> LoadedWorkload:
    workload = Workload(
        torch.nn.Identity, make(0), lambda p: torch.optim.SGD(p, lr=0.1), evaluation_data=evaluation_data
    )
    return LoadedWorkload(workload, Path("model.py"), {})


class Length:
    """Says that it has so many batches, and has others."""

    def __init__(self, said: int, batches: list[Any]) -> None:
        self.said, self.batches = said, batches

    def __len__(self) -> int:
        return self.said

    def __iter__(self) -> Any:
        return iter(self.batches)


def leaves_of(toy: Toy, workload: LoadedWorkload) -> tuple[list[list[Any]], dict[int, int]]:
    count = evaluation_minibatches(toy.plan, 0, workload, 3, lambda _: None)
    samples: dict[int, int] = {}
    batches = EvaluationBatches(toy.plan, 0, workload, 3, count, samples.__setitem__)
    return [batches(p) for p in range(1, count + 1)], samples


def test_batches_come_in_order_with_their_samples(toy: Toy) -> None:
    leaves, samples = leaves_of(toy, load(lambda: (make(x, size) for x, size in ((1, 6), (2, 6), (3, 1)))))
    assert [x[0, 0].item() for x, _ in leaves] == [1, 2, 3]
    assert samples == {1: 6, 2: 6, 3: 1}


def test_what_is_drawn_at_random_is_the_same_each_time(toy: Toy) -> None:
    def drawn() -> Iterable[Any]:
        order = torch.randperm(3)
        return ((torch.randn(6, 8) + x, make(0)[1]) for x in order)

    first, again = (leaves_of(toy, load(drawn))[0] for _ in range(2))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(("said", "told"), [(3, "3 batches, but only 2 came"), (1, "1 batch, but more came")])
def test_another_number_of_batches_than_said(toy: Toy, said: int, told: str) -> None:
    with pytest.raises(RunError, match=told) as caught:
        leaves_of(toy, load(lambda: Length(said, [make(1), make(2)])))
    assert caught.value.code == "HP517"


def test_a_batch_of_another_form_is_named(toy: Toy) -> None:
    with pytest.raises(RunError) as caught:
        leaves_of(toy, load(lambda: [make(1), (torch.zeros(6, 9), make(0)[1])]))
    assert caught.value.code == "HP516"
    assert caught.value.where == "batch 2 of the evaluation data: item [0]"
    assert "evaluation_data()" in str(caught.value.hint)


def test_long_counting_is_told(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetpipe_compiler.runtime.batches._COUNTING_S", -1.0)
    notes: list[str] = []
    workload = load(lambda: itertools.islice(itertools.repeat(make(1)), 3))
    assert evaluation_minibatches(toy.plan, 0, workload, 0, notes.append) == 3
    assert len(notes) == 3
    assert notes[0].startswith("counting the batches of evaluation_data(), which has no len(): 1 so far")


def test_an_exit_is_the_users_error_and_not_the_end(toy: Toy) -> None:
    with pytest.raises(RunError, match="raised SystemExit: 0") as caught:
        evaluation_minibatches(toy.plan, 0, load(lambda: sys.exit(0)), 3, lambda _: None)
    assert caught.value.code == "HP517"
