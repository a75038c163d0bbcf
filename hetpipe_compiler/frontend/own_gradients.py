"""Gradients that a model makes itself, which no stage would: the ``backward`` of an ``autograd.Function``.

Export follows what ``forward`` computes; stages take the derivative of that. A ``Function`` is looked at after export:
each is called on random numbers, once as it is and once with its ``forward`` differentiated. Where both give the same
(functions that only save memory) nothing is lost; else it is refused. Checkpointing is one of them: the function that
is checkpointed is followed itself.
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

_HINT = "compute it with tensor operators whose derivative it is, or keep its module whole: --opaque MODULE"


@dataclass
class OwnGradients:
    """What a call of ``forward`` does about gradients; ``path``: the user's file."""

    path: Path
    _calls: dict[Any, tuple[tuple[Any, ...], str]] = field(default_factory=dict)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Notes each kind of ``Function`` that is applied."""
        applied = torch.autograd.Function.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if cls is CheckpointFunction:
                return _checkpointed(*args)
            if not cls.__module__.startswith("torch.") and cls not in self._calls:
                self._calls[cls] = tuple(pytree.tree_map(_description, args)), line_of(self.path)
            return applied.__get__(None, cls)(*args, **kwargs)

        with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
            yield

    def check(self) -> None:
        """Raises `WorkloadError` HP119 for a function whose ``backward`` is not its forward's derivative."""
        for function, (args, line) in self._calls.items():
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

    def drawn(self) -> torch.Tensor:
        if self.dtype.is_floating_point:
            return torch.randn(self.shape, dtype=torch.float64, requires_grad=True)
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
    drawn = pytree.tree_map_only(_Numbers, _Numbers.drawn, args)
    forward = _forward(function, drawn)
    count, ours = _gradients(function.apply, drawn)
    try:
        other_count, theirs = _gradients(forward, drawn)
    except RuntimeError:
        # It may write into what autograd has saved, as a stage does not (see `hetpipe_compiler.passes.normalize`).
        other_count, theirs = _gradients(torch.func.functionalize(forward), drawn)
    return count == other_count and all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True) for a, b in zip(ours, theirs, strict=True)
    )


def _forward(function: Any, args: tuple[Any, ...]) -> Callable[..., Any]:
    """Its ``forward``, to be called without ``apply``."""
    if function.setup_context is not torch.autograd.Function.setup_context:
        return function.forward  # type: ignore[no-any-return]
    context = _Context()
    context.needs_input_grad = tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    return partial(function.forward, context)


def _gradients(run: Callable[..., Any], drawn: Sequence[Any]) -> tuple[int, tuple[torch.Tensor, ...]]:
    """How many outputs have gradients, and those of the inputs for random ones of these outputs."""
    leaves = [leaf for leaf in pytree.tree_leaves(drawn) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    torch.manual_seed(0)  # what draws random numbers draws the same
    outs = [o for o in pytree.tree_leaves(run(*drawn)) if isinstance(o, torch.Tensor) and o.requires_grad]
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(o.shape, generator=generator, dtype=o.dtype) for o in outs]
    return len(outs), torch.autograd.grad(outs, leaves, given, allow_unused=True, materialize_grads=True)
