"""Gradients that a model makes itself, which no stage would: the ``backward`` of an ``autograd.Function``.

Export follows what ``forward`` computes; stages take the derivative of that. A ``Function`` is looked at after export:
each is called on random numbers, small and large ones and as it was called, once as it is and once with its ``forward``
differentiated. Where both give the same (functions that only save memory) nothing is lost; else it is refused.
Checkpointing is one of them: the function that is checkpointed is followed itself, and may write no buffer (eager mode
runs it twice).
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from hetpipe_compiler.errors import WorkloadError

#: Some functions clip: their numbers, or the gradient.
_SCALES = (1.0, 1e3)
_HINT = "compute it with tensor operators whose derivative it is, or keep its module whole: --opaque MODULE"


@dataclass
class OwnGradients:
    """What a call of ``step`` does about gradients; ``path``: the user's file."""

    path: Path
    step: torch.nn.Module
    _calls: dict[tuple[Any, str], tuple[tuple[Any, ...], str]] = field(default_factory=dict)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Notes each ``Function`` that is applied, and to what."""
        applied = torch.autograd.Function.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if cls is CheckpointFunction:
                with self._writing_no_buffer():
                    return _checkpointed(*args)
            if not cls.__module__.startswith("torch.") and torch.is_grad_enabled():
                described = tuple(pytree.tree_map(_description, args))
                if (cls, repr(described)) not in self._calls:
                    self._calls[cls, repr(described)] = described, line_of(self.path)
            return applied.__get__(None, cls)(*args, **kwargs)

        def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
            with self._writing_no_buffer():
                yield from not_reentrant(*args, **kwargs)

        name = "_checkpoint_without_reentrant_generator"
        if hasattr(torch.utils.checkpoint, f"{name}_impl"):  # in newer versions of torch the former calls the latter
            name += "_impl"
        not_reentrant = getattr(torch.utils.checkpoint, name)
        with (
            mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)),
            mock.patch.object(torch.utils.checkpoint, name, generator),
        ):
            yield

    @contextlib.contextmanager
    def _writing_no_buffer(self) -> Iterator[None]:
        """Raises `WorkloadError` HP119 if what is checkpointed writes one."""
        before = self._versions()
        yield
        if torch.is_grad_enabled() and self._versions() != before:
            raise WorkloadError(
                "HP119",
                "what is checkpointed writes a buffer: eager mode runs it twice a minibatch, the stages once",
                where=line_of(self.path),
                hint="switch the checkpointing off; hetpipe-compile --recompute saves the memory as well",
            )

    def _versions(self) -> list[tuple[int, int]]:
        return [(id(buffer), buffer._version) for buffer in self.step.buffers()]

    def check(self) -> None:
        """Raises `WorkloadError` HP119 for a function whose ``backward`` is not its forward's derivative."""
        for (function, _), (args, line) in self._calls.items():
            try:
                with torch.random.fork_rng(devices=[]):
                    same = _is_derivative(function, args)
            except Exception:
                same = False
            if not same:
                raise refusal(f"{function.__name__} has a backward that is not its forward's derivative", line)


@contextlib.contextmanager
def derived_by_autograd() -> Iterator[None]:
    """Gradients flow as in the stages: autograd follows a function's ``forward``, and a leaf that the model makes is a
    constant (nobody reads its gradient)."""
    applied = torch.autograd.Function.__dict__["apply"]
    trained = vars(torch._C.TensorBase)["requires_grad"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            return _checkpointed(*args)
        run = applied.__get__(None, cls) if cls.__module__.startswith("torch.") else _forward(cls, args)
        return run(*args, **kwargs)

    with (
        mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)),
        mock.patch.object(torch.Tensor, "requires_grad", property(trained.__get__, lambda *_: None)),
        mock.patch.object(torch.Tensor, "requires_grad_", lambda self, _wanted=True: self),
    ):
        yield


def line_of(path: Path) -> str:
    """The line of the user's file that is running."""
    own = [f for f in traceback.extract_stack() if Path(f.filename).resolve() == path.resolve()]
    return f"{path}:{own[-1].lineno}" if own else str(path)


def _checkpointed(function: Any, _preserve: bool, *args: Any) -> Any:
    """Reentrant checkpointing. It gives no gradient to what the function reads if none of its arguments wants one."""
    wanted = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    with contextlib.nullcontext() if wanted else torch.no_grad():
        return function(*args)


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
        if name.startswith(("mark_", "set_")):
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
