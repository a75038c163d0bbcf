"""Errors of export's own that ``forward`` catches: HP111.

A tensor that export looks with has no values. Asking for them raises; where the model's code catches that, it goes
another way than in eager mode, without a word. An error keeps the frames that it has passed, so the outermost of them
is the one that has caught it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch.fx.experimental import symbolic_shapes

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.ir.source import is_internal, is_pythons_own, told_place

#: Errors that only export raises.
_OF_EXPORT = (
    symbolic_shapes.GuardOnDataDependentSymNode,
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
)
#: Methods that raise errors of a general kind where there are no values. The first ones do so in eager mode too, of a
#: tensor that requires a gradient.
_ON_DETACHED, _ON_ANY = ("numpy", "__array__"), ("data_ptr", "__format__")
_HINT = (
    "take it out of the try: what depends on values must become torch.where, what is only told must go; or keep its "
    "module whole: --opaque MODULE"
)


@contextlib.contextmanager
def refusing_swallowed_errors(path: Path) -> Iterator[None]:
    """Raises `WorkloadError` HP111 if the model's code that runs inside catches an error of export's own. ``path``: the
    user's file."""
    errors: list[Exception] = []
    with contextlib.ExitStack() as stack:
        for kind in _OF_EXPORT:
            stack.enter_context(mock.patch.object(kind, "__init__", _noted_when_made(kind, errors)))
        for name in (*_ON_DETACHED, *_ON_ANY):
            method = _noted_when_raised(getattr(torch.Tensor, name), errors, name in _ON_DETACHED)
            stack.enter_context(mock.patch.object(torch.Tensor, name, method))
        size_hash = _noted_when_raised(torch.SymInt.__hash__, errors, False)
        stack.enter_context(mock.patch.object(torch.SymInt, "__hash__", size_hash))
        yield
    for error in errors:
        caught = error.__traceback__
        if caught is not None and _is_of_model(caught):
            raise _refusal(error, caught, path)


def _noted_when_made(kind: type[Exception], errors: list[Exception]) -> Callable[..., None]:
    init: Any = kind.__init__

    @functools.wraps(init)
    def noted(self: Exception, *args: Any, **more: Any) -> None:
        errors.append(self)
        init(self, *args, **more)

    return noted


def _noted_when_raised(method: Any, errors: list[Exception], of_detached: bool) -> Callable[..., Any]:
    @functools.wraps(method)
    def noted(self: Any, *args: Any, **more: Any) -> Any:
        try:
            return method(self, *args, **more)
        except Exception as error:
            if not (of_detached and self.requires_grad):
                errors.append(error)
            raise

    return noted


def _is_of_model(caught: TracebackType) -> bool:
    """Whether the frame that caught an error is neither torch's nor ours nor Python's own, but for its ``with``."""
    file = caught.tb_frame.f_code.co_filename
    return not is_internal(file) and (file == contextlib.__file__ or not is_pythons_own(file))


def _refusal(error: Exception, caught: TracebackType, path: Path) -> WorkloadError:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    where = told_place(Path(caught.tb_frame.f_code.co_filename), caught.tb_lineno, path)
    problem = (
        f"forward catches an error that only torch.export raises ({text[:150]}), and goes on otherwise than without"
    )
    return WorkloadError("HP111", problem, where=where, hint=_HINT)
