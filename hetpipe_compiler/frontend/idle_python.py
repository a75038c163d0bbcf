"""Python in ``forward`` that decides nothing about what is computed, but that export stumbles over.

1. ``module.to(dtype)`` where everything already has that dtype: the module itself.
2. ``assert`` on a tensor's values: it is taken to hold, as it must for training to go on. Like export's own runtime
   checks (see `hetpipe_compiler.passes.normalize`) an assertion is no part of the graph.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from hetpipe_compiler.ir.source import is_internal


@contextlib.contextmanager
def idle_python() -> Iterator[None]:
    """Both rules, while export looks at a model."""
    guard_bool, to = SymNode.guard_bool, torch.nn.Module.to

    def decide(self: SymNode, file: str, line: int) -> bool:
        try:
            return bool(guard_bool(self, file, line))
        except GuardOnDataDependentSymNode:
            asserted = _asserted(sys._getframe(1))
            if asserted is None:
                raise
            return asserted

    def settle(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        parsed: Any = torch._C._nn._parse_to(*args, **kwargs)
        device, dtype, _, layout = parsed
        tensors = (*self.parameters(), *self.buffers())
        if layout is None and all(_settled(t, device, dtype) for t in tensors):
            return self
        return to(self, *args, **kwargs)

    with mock.patch.object(SymNode, "guard_bool", decide), mock.patch.object(torch.nn.Module, "to", settle):
        yield


def _settled(tensor: torch.Tensor, device: torch.device | None, dtype: torch.dtype | None) -> bool:
    converted = dtype is not None and (tensor.is_floating_point() or tensor.is_complex())
    return (not converted or tensor.dtype == dtype) and (device is None or tensor.device == device)


def _asserted(frame: FrameType | None) -> bool | None:
    """What the ``assert`` that the innermost line of the model stands in wants; None if it stands in none, or if the
    assertion is neither a conjunction of conditions nor one of their negations."""
    while frame is not None and is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None
    file, line = frame.f_code.co_filename, frame.f_lineno
    linecache.checkcache(file)
    for first, last, wanted in _assertions("".join(linecache.getlines(file))):
        if first <= line <= last:
            return wanted
    return None


@functools.cache
def _assertions(source: str) -> tuple[tuple[int, int, bool | None], ...]:
    """First and last line of each assertion's condition in a file's text, and what all its parts must be."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            parts = set(_parts(node.test, True))
            wanted = parts.pop() if len(parts) == 1 else None
            found.append((node.test.lineno, node.test.end_lineno or node.test.lineno, wanted))
    return tuple(found)


def _parts(test: ast.expr, wanted: bool) -> Iterator[bool | None]:
    """For each condition that a test is made of: what it must be; None where that depends on another."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _parts(test.operand, not wanted)
    elif isinstance(test, ast.BoolOp):
        conjunction = isinstance(test.op, ast.And) == wanted
        for value in test.values:
            yield from _parts(value, wanted) if conjunction else (None,)
    elif isinstance(test, ast.IfExp):
        yield None
    else:
        yield wanted
