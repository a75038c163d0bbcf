"""Values that are made alike have one number, whatever the way; others have others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hetpipe_compiler.frontend.dataflow import Dataflow, Numbers

_X = torch.arange(12.0).reshape(3, 4)


def number(numbers: Numbers, function: Callable[[Tensor], Tensor], device: str = "cpu") -> int:
    dataflow = Dataflow(numbers, on_meta=device == "meta")
    x = _X.clone().to(device)
    dataflow.name("x", x)
    with dataflow.followed():
        result = function(x)
    return dataflow.value(result)


def in_place(x: Tensor) -> Tensor:
    y = x * 2
    y[0].add_(1)
    return y


def in_place_elsewhere(x: Tensor) -> Tensor:
    y = x * 2
    y[1].add_(1)
    return y


def in_place_by_another_view(x: Tensor) -> Tensor:
    y = x * 2
    y.view(-1)[:4].add_(1)
    return y


ALIKE: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
    (lambda x: x.t() * 2, lambda x: x.transpose(0, 1) * 2),
    (lambda x: x.view(-1) + 1, lambda x: x.reshape(12) + 1),
    (lambda x: x.clone() + 1, lambda x: x + 1),
    (lambda x: torch.zeros(4).copy_(x[0]), lambda x: x[0].contiguous().clone()),
    (lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]), lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0])),
    (in_place, in_place_by_another_view),
]  # fmt: skip
OTHERS: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
    (lambda x: x * 2, lambda x: x * 3),
    (lambda x: x + x[0], lambda x: x + x[1]),
    (lambda x: x.sum(-1), lambda x: x.sum(-2)),
    (lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]), lambda x: x * torch.tensor([1.0, 2.0, 3.0, 5.0])),
    (lambda x: x.to(torch.float64), lambda x: x),
    (in_place, in_place_elsewhere),
    (in_place, lambda x: x * 2),
    (lambda x: torch.zeros(4) + x, lambda x: torch.ones(4) + x),
    (lambda x: torch.tensor([float("nan")]) + x, lambda x: torch.tensor([0.0]) + x),
]  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("pair", range(len(ALIKE)))
def test_one_number_for_what_is_made_alike(pair: int, device: str) -> None:
    numbers = Numbers()
    one, other = ALIKE[pair]
    found = number(numbers, one, device)
    assert found == number(numbers, other, device)
    assert found != number(numbers, lambda x: x, device)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("pair", range(len(OTHERS)))
def test_other_numbers_for_what_is_made_otherwise(pair: int, device: str) -> None:
    numbers = Numbers()
    one, other = OTHERS[pair]
    assert number(numbers, one, device) != number(numbers, other, device)


def test_constants_and_places_on_meta_are_those_of_the_cpu() -> None:
    def filled(x: Tensor) -> Tensor:
        assert (x.device.type, x.is_meta, x.is_cpu) == ("cpu", False, True)
        mask = torch.zeros(4, device=x.device)
        mask[:2] = 1
        return x * mask

    def filled_by_tensor(x: Tensor) -> Tensor:
        mask = torch.zeros(4, device=x.device)
        mask[:2].fill_(torch.tensor(1.0))
        return x * mask

    numbers = Numbers()
    assert number(numbers, filled, "meta") == number(numbers, filled_by_tensor, "meta")
    assert number(numbers, filled, "cpu") == number(numbers, filled, "meta")


def test_a_value_that_is_asked_for_counts_unless_it_is_a_constants() -> None:
    for function, asks in ((lambda x: x * x.sum().item(), True), (lambda x: x * torch.arange(3).sum().item(), False)):
        dataflow = Dataflow(Numbers(), on_meta=False)
        x = _X.clone()
        dataflow.name("x", x)
        with dataflow.followed():
            function(x)
        assert dataflow.asks_values is asks


def test_an_operator_can_be_watched() -> None:
    seen: list[int] = []
    dataflow = Dataflow(Numbers(), on_meta=False, watch=1, on_watched=lambda: seen.append(len(dataflow.made_by)))
    with dataflow.followed():
        (torch.ones(3) + 1) * 2
    assert seen == [1]
