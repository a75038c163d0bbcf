"""How a batch is shared out between model and loss."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.training_step import TrainingStep, loss_for, own_loss, refuse_hidden_values, split_batch
from hetpipe_compiler.ir.workload import Workload


def refused(code: str, function: Any, *args: Any) -> WorkloadError:
    with pytest.raises(WorkloadError) as caught:
        function(*args)
    assert caught.value.code == code
    return caught.value


def test_a_tuple_ends_with_its_targets() -> None:
    assert split_batch((1, 2, 3), 1) == ((1, 2), {}, (3,))
    assert split_batch([1, 2, 3], 2) == ((1,), {}, (2, 3))
    assert split_batch((1, 2), 0) == ((1, 2), {}, ())


def test_a_dict_names_its_targets() -> None:
    assert split_batch({"x": 1, "y": 2, "z": 3}, ["z", "x"]) == ((), {"y": 2}, (3, 1))
    assert split_batch({"x": 1}, 0) == ((), {"x": 1}, ())


@pytest.mark.parametrize(
    ("batch", "targets"),
    [((1, 2), 3), ((1, 2), -1), ({"x": 1}, 1), ({"x": 1}, ["y"]), (torch.ones(2), 1), ((1,), ["y"])],
)
def test_what_does_not_fit(batch: Any, targets: Any) -> None:
    assert refused("HP106", split_batch, batch, targets).hint


def test_the_models_own_loss() -> None:
    loss = torch.ones(())
    assert own_loss(loss) is loss
    assert own_loss(SimpleNamespace(loss=loss, logits=None)) is loss
    assert own_loss({"loss": loss}) is loss
    for output in ((loss,), {"logits": loss}, SimpleNamespace(loss=None), None):
        refused("HP107", own_loss, output)


class Scaled(nn.Module):
    def forward(self, x: Tensor, *, scale: float, mask: Tensor | None) -> Tensor:
        return x * scale if mask is None else x * mask


def test_leaves_that_are_no_tensors_stay_what_they_are() -> None:
    batch = {"x": torch.ones(2), "scale": 3.0, "mask": None, "y": torch.zeros(2)}
    workload = Workload(Scaled, batch, lambda p: torch.optim.SGD(p, lr=0.1), lambda a, b: (a - b).sum(), ["y"])
    step = TrainingStep(workload, Scaled(), batch)
    # pytree orders a dict's leaves by insertion.
    assert step.tensor_leaves == (0, 3)
    assert step(torch.full((2,), 2.0), torch.ones(2)).item() == 10.0


@dataclass
class Mask:
    keep: Tensor
    scale: float = 2.0


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (Mask(torch.ones(2)), "item ['x'][1] of the example is a Mask that holds tensors"),
        (SimpleNamespace(inner={"m": [Mask(torch.ones(2))]}), "a SimpleNamespace that holds tensors"),
        (np.ones(2), "is a NumPy array; every batch would get the example's"),
    ],
    ids=["dataclass", "nested", "array"],
)
def test_values_that_hide_in_the_example_are_refused(item: Any, said: str) -> None:
    error = refused("HP106", refuse_hidden_values, {"x": (torch.ones(2), item)})
    assert said in error.message
    refuse_hidden_values({"x": (torch.ones(2), None, 3, "text", torch.float32, SimpleNamespace(n=1), Mask, len)})


def test_a_loss_moves_as_a_copy() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    workload = Workload(Scaled, None, lambda p: torch.optim.SGD(p, lr=0.1), loss)
    assert loss_for(workload, "meta").weight.is_meta
    assert not loss.weight.is_meta
    function = Workload(Scaled, None, lambda p: torch.optim.SGD(p, lr=0.1), nn.functional.mse_loss)
    assert loss_for(function, "meta") is nn.functional.mse_loss
