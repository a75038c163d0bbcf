"""The line of a loss that is a plain function, on its operators: for the comments of stages, and for errors.

Of the stack at an operator, torch keeps the frames of functions called ``forward`` alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch.fx import proxy


@contextmanager
def loss_lines(loss: Any) -> Iterator[None]:
    """While it exports, torch keeps the frames of ``loss`` too; a torch that cannot goes without."""
    kept: set[tuple[str, str]] | None = getattr(proxy, "_STACK_TRACE_ANCHORS", None)
    code = _code(loss)
    frame = (code.co_filename, code.co_name) if code is not None else None
    if kept is None or frame is None or frame in kept:
        yield
        return
    kept.add(frame)
    try:
        yield
    finally:
        kept.discard(frame)


def _code(loss: Any) -> CodeType | None:
    """What runs first when ``loss`` is called; None for a module, whose ``forward`` is kept anyway."""
    if isinstance(loss, torch.nn.Module):
        return None
    while isinstance(loss, functools.partial):
        loss = loss.func
    function = inspect.unwrap(loss) if inspect.isroutine(loss) else getattr(type(loss), "__call__", None)  # noqa: B004
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None
