"""Whether a `torch.autograd.Function` brings its forward's derivative, as the stages take it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import MaskedSoftmax
from small_net import captured
from torch import Tensor

from hetpipe_compiler.errors import WorkloadError
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


_FUNCTION = """import torch
class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k=1):
        ctx.k = k
        return {forward}

    @staticmethod
    def backward(ctx, gradient):
        return {backward}, None
"""


def refused(folder: Path, body: str, top: str = "", init: str = "") -> WorkloadError:
    with pytest.raises(WorkloadError) as caught:
        captured(folder, body, top, init)
    assert caught.value.code == "HP119"
    return caught.value


def test_each_use_of_a_function_is_looked_at(tmp_path: Path) -> None:
    top = _FUNCTION.format(forward="x.view_as(x)", backward="gradient * ctx.k")
    captured(tmp_path, "h = Own.apply(h, 1)", top)
    refused(tmp_path, "h = Own.apply(h, 1)\nh = Own.apply(h, 0.5)", top)


@pytest.mark.parametrize(
    ("forward", "backward"), [("x * 1", "gradient.clamp(-9, 9)"), ("x.clamp(-9, 9)", "gradient.clone()")]
)
def test_what_clips_is_found(forward: str, backward: str, tmp_path: Path) -> None:
    refused(tmp_path, "h = Own.apply(h)", _FUNCTION.format(forward=forward, backward=backward))


def test_a_small_gradient_of_what_is_not_read_is_found(tmp_path: Path) -> None:
    top = _FUNCTION.format(forward="x * 1", backward="gradient").replace("None", "1e-8 * gradient.abs()")
    refused(tmp_path, "h = Own.apply(h, h)", top)


def test_without_gradients_nothing_is_lost(tmp_path: Path) -> None:
    top = _FUNCTION.format(forward="x.round()", backward="gradient")
    captured(tmp_path, "with torch.no_grad(): g = Own.apply(h)\nh = h + g", top)
    refused(tmp_path, "h = Own.apply(h)", top)


def test_uses_that_print_alike_are_all_looked_at(tmp_path: Path) -> None:
    top = "import numpy as np\n" + _FUNCTION.format(forward="x.view_as(x)", backward="gradient * ctx.k[1500]")
    body = "k = np.ones(3000)\nh = Own.apply(h, k)\nk = k.copy(); k[1500] = 2\nh = Own.apply(h, k)"
    refused(tmp_path, body, top)


def test_numbers_of_lower_precision_within_pass(tmp_path: Path) -> None:
    top = """import torch
class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        ctx.save_for_forward(x)
        return (x.float() @ w.float().t()).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        parts = [g.float().t() @ y.float() for g, y in zip(gradient.split(1), x.split(1))]
        return (gradient.float() @ w.float()).to(x.dtype), sum(parts).to(w.dtype)
"""
    captured(tmp_path, "h = Own.apply(h, self.b.weight)", top)
