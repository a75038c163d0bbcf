"""Activation checkpointing in ``forward``: the function that is checkpointed is followed itself, as the stages run it.

Eager mode runs it once more in the backward pass, so it may write no buffer: that would be written twice a minibatch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils.checkpoint import CheckpointFunction

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.user_code import line_of

_NOT_REENTRANT = "_checkpoint_without_reentrant_generator"
if hasattr(torch.utils.checkpoint, f"{_NOT_REENTRANT}_impl"):  # in newer versions of torch the former calls the latter
    _NOT_REENTRANT += "_impl"


@contextlib.contextmanager
def followed_checkpoints(step: torch.nn.Module, path: Path) -> Iterator[None]:
    """Follow them in what runs inside: a call of ``step``. ``path``: the user's file.

    Raises:
        WorkloadError: HP119 if what is checkpointed writes a buffer.
    """
    generator = getattr(torch.utils.checkpoint, _NOT_REENTRANT)

    def reentrant(function: Any, _preserve: bool, *args: Any) -> Any:
        # It gives no gradient to what the function reads if none of its arguments wants one.
        wanted = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
        with contextlib.nullcontext() if wanted else torch.no_grad(), _writing_no_buffer(step, path):
            return function(*args)

    def not_reentrant(*args: Any, **kwargs: Any) -> Iterator[None]:
        with _writing_no_buffer(step, path):
            yield from generator(*args, **kwargs)

    with (
        mock.patch.object(CheckpointFunction, "apply", reentrant),
        mock.patch.object(torch.utils.checkpoint, _NOT_REENTRANT, not_reentrant),
    ):
        yield


@contextlib.contextmanager
def _writing_no_buffer(step: torch.nn.Module, path: Path) -> Iterator[None]:
    before = _versions(step)
    yield
    if torch.is_grad_enabled() and _versions(step) != before:
        raise WorkloadError(
            "HP119",
            "what is checkpointed writes a buffer: eager mode runs it twice a minibatch, the stages once",
            where=line_of(path),
            hint="switch the checkpointing off; hetpipe-compile --recompute saves the memory as well",
        )


def _versions(step: torch.nn.Module) -> list[tuple[int, int]]:
    """What changes where a buffer is written, or another one assigned."""
    return [(id(buffer), buffer._version) for buffer in step.buffers()]
