"""Calls in ``forward`` that export would leave out, or would make once and for all, without a word."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.own_gradients import line_of
from hetpipe_compiler.ir.source import is_internal


@contextlib.contextmanager
def watched_calls(path: Path) -> Iterator[None]:
    """Sees ``inference_mode`` as ``no_grad``, which it is to gradients, and a tensor's ``data`` as ``detach()``, which
    export can follow. Raises `WorkloadError` HP112 where ``forward`` assigns to ``data``, takes gradients itself, or
    sets the seed or the state of random numbers. ``path``: the user's file."""
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
    refused: tuple[tuple[Any, str, tuple[str, str]], ...] = (
        (torch, "set_rng_state", state),
        (torch.random, "set_rng_state", state),
        (torch.random, "fork_rng", state),
        (torch.autograd, "grad", gradients),
        (torch.autograd, "backward", gradients),
        (torch.Tensor, "backward", gradients),
    )

    def read_data(self: torch.Tensor) -> Any:
        return data.__get__(self) if _inside_torch() else self.detach()

    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        if not _inside_torch():
            raise _refusal("assigns to the data of a tensor", line_of(path), "write into it: x.detach().copy_(value)")
        data.__set__(self, value)

    with contextlib.ExitStack() as stack:
        for owner, name, told in refused:
            stack.enter_context(mock.patch.object(owner, name, refusing(getattr(owner, name), *told)))
        stack.enter_context(mock.patch.object(torch.Tensor, "data", property(read_data, set_data)))
        for owner, name, stand_in in (
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
