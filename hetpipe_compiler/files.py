"""Writing files so that there is never half of one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from hetpipe_compiler.errors import ArtifactError


def check_file(path: Path) -> None:
    """Refuse early what `write_text` could not write. Raises `ArtifactError` HP411."""
    try:
        folder = path.absolute().parent
        if path.is_dir():
            raise _cannot_write(path, "it is a folder")
        if not folder.is_dir():
            raise _cannot_write(path, f"there is no folder {folder}")
    except OSError as error:
        raise _cannot_write(path, error.strerror or str(error)) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _cannot_write(path, f"nothing may be written in {folder}")


def write_text(path: Path, text: str) -> None:
    """Write a file beside its place and rename it: there is no half-written one. Raises `ArtifactError` HP411."""
    check_file(path)
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except OSError as error:
        raise _cannot_write(path, error.strerror or str(error)) from error
    finally:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)


def _cannot_write(path: Path, reason: str) -> ArtifactError:
    return ArtifactError("HP411", f"cannot write: {reason}", where=str(path), hint="choose another file, or make room")
