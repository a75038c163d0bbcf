"""What functions of the user raise (those of model.py, a partitioner), and how it is told."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hetpipe_compiler.errors import HetpipeError

#: An error of a user's function. ``sys.exit`` is one like any other: it would end our command as if all were done.
USER_ERRORS = (Exception, SystemExit)

_MOST_LETTERS = 300


@contextmanager
def telling(kind: type[HetpipeError], code: str, what: str, path: Path, *, hint: str) -> Iterator[None]:
    """Around a call of the user's code in ``path``: what it raises becomes an error of ``kind`` at the user's line.

    ``what`` comes before the error in its message, such as "workload() raised". An error of ours passes as it is.
    """
    try:
        yield
    except HetpipeError:
        raise
    except USER_ERRORS as error:
        raise kind(code, f"{what} {told(error)}", where=user_line(error, path), hint=hint) from error


def told(error: BaseException) -> str:
    """``ValueError: its text`` in one line; the name alone where there is no text."""
    text = " ".join(_text(error).split())
    return f"{type(error).__name__}: {_cut(text)}" if text else type(error).__name__


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for one that goes on with stacks; its name where there is no text."""
    lines = [line.strip() for line in _text(error).splitlines() if line.strip()]
    return _cut(lines[0]) if lines else type(error).__name__


def user_line(error: BaseException, path: Path) -> str:
    """``model.py:12`` for the innermost frame of ``error`` that lies in the user's file, else the file."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if Path(f.filename).resolve() == path.resolve()]
    return f"{path}:{own[-1].lineno}" if own else str(path)


def user_place(error: BaseException) -> str | None:
    """``FILE:LINE`` of the innermost frame that is neither ours nor torch's nor Python's own; None if there is none."""
    from hetpipe_compiler.ir.source import is_internal, is_pythons_own

    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if is_internal(frame.filename) or is_pythons_own(frame.filename):
            continue
        shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
        return f"{shown}:{frame.lineno}"
    return None


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a __str__ of the user's that raises
        return ""


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else text[:_MOST_LETTERS] + "..."


def line_of(path: Path) -> str:
    """The line of the user's file that is running."""
    own = [f for f in traceback.extract_stack() if Path(f.filename).resolve() == path.resolve()]
    return f"{path}:{own[-1].lineno}" if own else str(path)
