"""Gradients that a model makes itself, which no stage would: the ``backward`` of an ``autograd.Function``.

Export follows what ``forward`` computes; stages take the derivative of that. A ``Function`` is looked at after export:
each is called on random numbers, small and large ones and as it was called, once as it is and once with its ``forward``
differentiated. Where both give the same (functions that only save memory) nothing is lost; else it is refused. What is
large enough to overflow in one of them is not compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.user_code import line_of

#: Some functions clip: their numbers, or the gradient.
_SCALES = (1.0, 1e3)
_HINT = "compute it with tensor operators whose derivative it is, or keep its module whole: --opaque MODULE"


@dataclass
class OwnGradients:
    """What a call of ``forward`` does about gradients; ``path``: the user's file."""

    path: Path
    _calls: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], str]] = field(default_factory=dict)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Notes each ``Function`` that is applied, and to what."""

        def note(function: Any, apply: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if torch.is_grad_enabled():
                described = tuple(pytree.tree_map(_description, args))
                plain = all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(described))
                key = (function, repr(described)) if plain else (function, len(self._calls))
                if key not in self._calls:
                    self._calls[key] = function, described, line_of(self.path)
            return apply(*args, **kwargs)

        with _applied_by(note):
            yield

    def check(self) -> None:
        """Raises `WorkloadError` HP119 for a function whose ``backward`` is not its forward's derivative."""
        for function, args, line in self._calls.values():
            try:
                with torch.random.fork_rng(devices=[]):
                    same = _is_derivative(function, args)
            except Exception:
                same = False
            if not same:
                raise refusal(f"{function.__name__} has a backward that is not its forward's derivative", line)


@contextlib.contextmanager
def derived_by_autograd() -> Iterator[None]:
    """Functions are not applied: autograd follows their ``forward``, as it does in the stages."""
    with _applied_by(lambda function, _apply, args, kwargs: _forward(function, args)(*args, **kwargs)):
        yield


@contextlib.contextmanager
def _applied_by(run: Callable[..., Any]) -> Iterator[None]:
    """``run`` is called for each application of a ``Function`` that is not torch's own: with the function, its own
    ``apply`` and the arguments."""
    applied = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        own = applied.__get__(None, cls)
        return own(*args, **kwargs) if cls.__module__.startswith("torch.") else run(cls, own, args, kwargs)

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield


def refusal(problem: str, where: str) -> WorkloadError:
    """HP119."""
    return WorkloadError("HP119", f"{problem}, which the stages would not run", where=where, hint=_HINT)


@dataclass(frozen=True)
class _Numbers:
    """A tensor to come."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def drawn(self, scale: float) -> torch.Tensor:
        if self.dtype.is_floating_point:
            return (scale * torch.randn(self.shape, dtype=torch.float64)).requires_grad_()
        return torch.randint(0, 2, self.shape).to(self.dtype)


#: Values whose text tells them apart.
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, _Numbers)


def _description(value: Any) -> Any:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.hint
    if isinstance(value, torch.Tensor):
        return _Numbers(tuple(_description(size) for size in value.shape), value.dtype)
    return value


class _Context:
    """What ``forward`` gets as ``ctx`` when autograd itself follows it."""

    needs_input_grad: tuple[bool, ...] = ()
    saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("mark_", "set_", "save_for_")):
            return lambda *_: None
        raise AttributeError(name)


def _is_derivative(function: Any, args: tuple[Any, ...]) -> bool:
    return all(_is_derivative_at(scale, function, args) for scale in _SCALES)


def _is_derivative_at(scale: float, function: Any, args: tuple[Any, ...]) -> bool:
    """``scale``: of the numbers, and of the gradient that comes in."""
    drawn = pytree.tree_map_only(_Numbers, lambda numbers: numbers.drawn(scale), args)
    forward = _forward(function, drawn)
    count, ours = _gradients(function.apply, drawn, scale)
    try:
        other_count, theirs = _gradients(forward, drawn, scale)
    except RuntimeError:
        # It may write into what autograd has saved, as a stage does not (see `hetpipe_compiler.passes.normalize`).
        other_count, theirs = _gradients(torch.func.functionalize(forward), drawn, scale)
    return count == other_count and all(_same(a, b, scale) for a, b in zip(ours, theirs, strict=True))


def _same(own: torch.Tensor, derived: torch.Tensor, scale: float) -> bool:
    if not derived.any():  # what is not read has no gradient, however small
        return bool((own.abs() <= 1e-12 * scale).all())
    if scale > 1:  # where one formula overflows and the other does not
        kept = own.isfinite() & derived.isfinite()
        own, derived = own[kept], derived[kept]
        scale = max(scale, float(derived.abs().max())) if derived.numel() else scale
    return torch.allclose(own, derived, rtol=1e-3, atol=1e-5 * scale, equal_nan=True)


def _forward(function: Any, args: tuple[Any, ...]) -> Callable[..., Any]:
    """Its ``forward``, to be called without ``apply``."""
    if function.setup_context is not torch.autograd.Function.setup_context:
        return function.forward  # type: ignore[no-any-return]
    context = _Context()
    context.needs_input_grad = tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    return partial(function.forward, context)


def _gradients(run: Callable[..., Any], drawn: Sequence[Any], scale: float) -> tuple[int, tuple[torch.Tensor, ...]]:
    """How many outputs have gradients, and those of the inputs for random ones of these outputs."""
    leaves = [leaf for leaf in pytree.tree_leaves(drawn) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    torch.manual_seed(0)  # what draws random numbers draws the same
    outs = [o for o in pytree.tree_leaves(run(*drawn)) if isinstance(o, torch.Tensor) and o.requires_grad]
    generator = torch.Generator().manual_seed(0)
    given = [scale * torch.randn(o.shape, generator=generator, dtype=o.dtype) for o in outs]
    return len(outs), torch.autograd.grad(outs, leaves, given, allow_unused=True, materialize_grads=True)
