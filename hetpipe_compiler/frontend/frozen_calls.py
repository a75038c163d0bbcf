"""Calls in ``forward`` that export would leave out, or would make once and for all, without a word."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.ir.source import is_internal
from hetpipe_compiler.user_code import line_of

#: What `torch.autocast` calls itself; called by a model, export would not see it.
_AUTOCAST_SWITCHES = (
    "set_autocast_enabled",
    "set_autocast_dtype",
    "set_autocast_cpu_enabled",
    "set_autocast_cpu_dtype",
    "set_autocast_gpu_dtype",
)


@contextlib.contextmanager
def watched_calls(path: Path) -> Iterator[None]:
    """Sees ``inference_mode`` as ``no_grad``, which it is to gradients, and a tensor's ``data`` as ``detach()``, which
    export can follow. ``path``: the user's file.

    Raises `WorkloadError` HP112 where ``forward`` assigns to ``data``, takes gradients itself, switches autocast other
    than by a region, or sets the seed or the state of random numbers.
    """
    mode, data = torch.inference_mode, vars(torch._C.TensorBase)["data"]

    def enter(self: Any) -> None:
        self._stands_for_it = torch.no_grad() if self.mode else contextlib.nullcontext()
        self._stands_for_it.__enter__()

    def leave(self: Any, *error: Any) -> None:
        self._stands_for_it.__exit__(*error)

    def seed(*_: Any) -> Any:
        raise _refusal("sets the seed of random numbers", line_of(path), "leave the seed to the run (--seed)")

    def refusing(function: Any, what: str, hint: str) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not _inside_torch():
                raise _refusal(what, line_of(path), hint)
            return function(*args, **kwargs)

        return call

    state = "sets the state of random numbers", "draw them once, and read the same tensor twice"
    gradients = (
        "takes gradients itself",
        "write their formula with tensor operators, or keep its module whole: --opaque MODULE",
    )
    casts = "switches autocast for all that follows", "with torch.autocast(x.device.type, ...): ..."
    refused: tuple[tuple[Any, str, tuple[str, str]], ...] = (
        (torch, "set_rng_state", state),
        (torch.random, "set_rng_state", state),
        (torch.random, "fork_rng", state),
        (torch.autograd, "grad", gradients),
        (torch.autograd, "backward", gradients),
        (torch.Tensor, "backward", gradients),
        *((torch, name, casts) for name in _AUTOCAST_SWITCHES if hasattr(torch, name)),
    )

    def read_data(self: torch.Tensor) -> Any:
        return data.__get__(self) if _inside_torch() else self.detach()

    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        if not _inside_torch():
            raise _refusal("assigns to the data of a tensor", line_of(path), "write into it: x.detach().copy_(value)")
        data.__set__(self, value)

    grad, trained = vars(torch._C.TensorBase)["grad"], vars(torch._C.TensorBase)["requires_grad"]
    switch, switch_all = torch.Tensor.requires_grad_, torch.nn.Module.requires_grad_

    def read_grad(self: torch.Tensor) -> Any:
        if isinstance(self, torch.nn.Parameter) and not _inside_torch():
            raise _refusal(
                "reads the gradient of a parameter", line_of(path), "do it outside of the model, after the backward"
            )
        return grad.__get__(self)

    def refuse_switched(tensors: Iterable[torch.Tensor], wanted: bool) -> None:
        if any(isinstance(t, torch.nn.Parameter) and t.requires_grad != wanted for t in tensors):
            raise WorkloadError(
                "HP113",
                "forward switches the training of a parameter",
                where=line_of(path),
                hint="do it where the model is built; to stop a gradient here, use detach() or torch.no_grad()",
            )

    def set_trained(self: torch.Tensor, wanted: bool) -> None:
        if not _inside_torch():
            refuse_switched((self,), wanted)
        trained.__set__(self, wanted)

    def switched(self: torch.Tensor, wanted: bool = True) -> torch.Tensor:
        if not _inside_torch():
            refuse_switched((self,), wanted)
        return switch(self, wanted)

    def all_switched(self: torch.nn.Module, wanted: bool = True) -> torch.nn.Module:
        refuse_switched(self.parameters(), wanted)
        return switch_all(self, wanted)

    with contextlib.ExitStack() as stack:
        for owner, name, told in refused:
            stack.enter_context(mock.patch.object(owner, name, refusing(getattr(owner, name), *told)))
        for owner, name, stand_in in (
            (torch.Tensor, "data", property(read_data, set_data)),
            (torch.Tensor, "grad", property(read_grad, grad.__set__, grad.__delete__)),
            (torch.Tensor, "requires_grad", property(trained.__get__, set_trained)),
            (torch.Tensor, "requires_grad_", switched),
            (torch.nn.Module, "requires_grad_", all_switched),
            (mode, "__enter__", enter),
            (mode, "__exit__", leave),
            (torch, "manual_seed", seed),
            (torch.random, "manual_seed", seed),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


@contextlib.contextmanager
def refusing_other_random_numbers(path: Path) -> Iterator[None]:
    """Raises `WorkloadError` HP112 if what runs inside draws from Python's or NumPy's random numbers, or seeds
    torch's."""
    before, seed = _state(), torch.initial_seed()
    yield
    if torch.initial_seed() != seed:
        raise _refusal("sets the seed of random numbers", str(path), "leave the seed to the run (--seed)")
    if _state() != before:
        hint = "draw with torch: torch.rand, torch.bernoulli, F.dropout"
        raise _refusal("draws random numbers of Python or NumPy, which would be the same for ever", str(path), hint)


def _inside_torch() -> bool:
    """Whether the caller of the function that asks is torch's own code."""
    return is_internal(sys._getframe(2).f_code.co_filename)


def _state() -> tuple[Any, ...]:
    kind, keys, position, *rest = np.random.get_state(legacy=True)
    return random.getstate(), kind, np.asarray(keys).tobytes(), position, rest


def _refusal(what: str, where: str, hint: str) -> WorkloadError:
    return WorkloadError("HP112", f"forward {what}; a stage module cannot", where=where, hint=hint)
