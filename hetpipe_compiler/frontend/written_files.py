"""Files and folders that the model's code makes or writes while it runs: what the next call may find there."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import torch

from hetpipe_compiler.ir.source import is_internal, is_pythons_own, told_place

#: Python's events that change what lies on the disk; ``open`` does where it writes.
_EVENTS = frozenset({"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"})
_WRITES = os.O_WRONLY | os.O_RDWR
_NUMPY = str(Path(np.__file__).parent) + os.sep
#: Where what is seen goes; None while nobody looks. Python cannot be told to forget a hook.
_seen: list[tuple[str, str, int]] | None = None
_hooked = False


@contextlib.contextmanager
def noting_written_files(path: Path, found: list[tuple[str, str]]) -> Iterator[None]:
    """Adds to ``found`` the name of each file or folder that is written, made, moved or removed inside, and the line
    that does. ``path``: the user's file."""
    global _seen, _hooked
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked = True
    before, _seen = _seen, []
    save = torch.save

    def saved(thing: Any, file: Any, *args: Any, **more: Any) -> Any:
        _note(file)
        return save(thing, file, *args, **more)

    try:
        with mock.patch.object(torch, "save", saved):
            yield
    finally:
        seen, _seen = _seen, before
        found += [(name, told_place(Path(file), line, path)) for name, file, line in seen]


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _seen is not None and (event in _EVENTS or (event == "open" and isinstance(args[2], int) and args[2] & _WRITES)):
        _note(args[0])


def _is_tool(file: str) -> bool:
    return file == __file__ or file.startswith(_NUMPY) or is_pythons_own(file)


def _note(name: Any) -> None:
    """Notes it where the model's code has asked for it, itself or through Python's library or NumPy."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_tool(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or _seen is None or not isinstance(name, (str, os.PathLike)) or str(name).endswith(".pyc"):
        return
    if not is_internal(frame.f_code.co_filename):
        _seen.append((Path(name).name, frame.f_code.co_filename, frame.f_lineno))
