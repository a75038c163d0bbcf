"""Random numbers that a function draws which remembers what it returned (``functools.lru_cache``): HP113.

In eager mode they stay what they were at its first call; export would draw new ones in each step.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any
from unittest import mock

import torch
from torch import fx

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.ir.source import told_place


@contextlib.contextmanager
def refusing_remembered_numbers(caches: Iterable[Any], path: Path) -> Iterator[None]:
    """Raises `WorkloadError` HP113 where one of the functions ``caches`` draws while export looks at what runs inside.
    ``path``: the user's file."""
    functions = [inspect.unwrap(cache) for cache in caches]
    codes = {function.__code__ for function in functions if isinstance(function, FunctionType)}
    create = fx.Graph.create_node

    def watched(graph: fx.Graph, op: str, target: Any, *args: Any, **more: Any) -> fx.Node:
        if draws(target) and (frame := _running(codes, sys._getframe(1))) is not None:
            name = frame.f_code.co_name
            raise WorkloadError(
                "HP113",
                f"forward draws random numbers in '{name}', which remembers them; the stages would draw new ones",
                where=told_place(Path(frame.f_code.co_filename), frame.f_lineno, path),
                hint="draw them once where the model is built, and keep them in a buffer (register_buffer)",
            )
        return create(graph, op, target, *args, **more)

    with mock.patch.object(fx.Graph, "create_node", watched) if codes else contextlib.nullcontext():
        yield


def draws(target: Any) -> bool:
    """Whether an operator draws random numbers."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def _running(codes: set[CodeType], frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame
