"""Whether a `torch.autograd.Function` brings its forward's derivative, as the stages take it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import MaskedSoftmax
from torch import Tensor

from hetpipe_compiler.frontend.own_gradients import _is_derivative, _Numbers

_SCORES, _MASK = _Numbers((2, 3, 4), torch.float32), _Numbers((2, 1, 4), torch.bool)


class OfAnotherScale(MaskedSoftmax):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return MaskedSoftmax.backward(ctx, gradient)[0] * 1.01, None


class IgnoresMask(MaskedSoftmax):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return y * gradient, None


class Detaches(torch.autograd.Function):
    """A right derivative, but none that a stage would take: its forward hides a part from autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y, z = x.detach().exp(), x.tanh()
        z.mul_(2)
        ctx.save_for_backward(y, z)
        return y + z

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        y, z = ctx.saved_tensors
        return gradient * (y + 2 * (1 - (z / 2) ** 2))


def test_a_right_backward_of_a_forward_that_writes_into_what_it_saves() -> None:
    assert _is_derivative(MaskedSoftmax, (_SCORES, _MASK))


@pytest.mark.parametrize("function", [OfAnotherScale, IgnoresMask])
def test_a_wrong_one(function: Any) -> None:
    assert not _is_derivative(function, (_SCORES, _MASK))


def test_a_right_one_that_the_stages_would_not_find() -> None:
    x = torch.randn(5, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(0))
    assert torch.autograd.gradcheck(Detaches.apply, (x,))  # type: ignore[no-untyped-call]
    assert not _is_derivative(Detaches, (_Numbers((5,), torch.float32),))
