"""Calls in ``forward`` that export would leave out, or would make once and for all, without a word."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.own_gradients import line_of


@contextlib.contextmanager
def watched_calls(path: Path) -> Iterator[None]:
    """Sees ``inference_mode`` as ``no_grad``, which it is to gradients, and raises `WorkloadError` HP112 where
    ``forward`` sets the seed of random numbers. ``path``: the user's file."""
    mode = torch.inference_mode

    def enter(self: Any) -> None:
        self._stands_for_it = torch.no_grad() if self.mode else contextlib.nullcontext()
        self._stands_for_it.__enter__()

    def leave(self: Any, *error: Any) -> None:
        self._stands_for_it.__exit__(*error)

    def seed(*_: Any) -> Any:
        raise _refusal("sets the seed of random numbers", line_of(path), "leave the seed to the run (--seed)")

    with (
        mock.patch.object(mode, "__enter__", enter),
        mock.patch.object(mode, "__exit__", leave),
        mock.patch.object(torch, "manual_seed", seed),
        mock.patch.object(torch.random, "manual_seed", seed),
    ):
        yield


@contextlib.contextmanager
def refusing_other_random_numbers(path: Path) -> Iterator[None]:
    """Raises `WorkloadError` HP112 if what runs inside draws from Python's or NumPy's random numbers."""
    before = _state()
    yield
    if _state() != before:
        hint = "draw with torch: torch.rand, torch.bernoulli, F.dropout"
        raise _refusal("draws random numbers of Python or NumPy, which would be the same for ever", str(path), hint)


def _state() -> tuple[Any, ...]:
    kind, keys, position, *rest = np.random.get_state(legacy=True)
    return random.getstate(), kind, np.asarray(keys).tobytes(), position, rest


def _refusal(what: str, where: str, hint: str) -> WorkloadError:
    return WorkloadError("HP112", f"forward {what}; a stage module cannot", where=where, hint=hint)
