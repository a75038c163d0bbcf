"""Writing files so that there is never half of one."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from hetpipe_compiler.errors import ArtifactError


def check_file(path: Path) -> None:
    """Refuse early what `new_file` could not write. Raises `ArtifactError` HP411."""
    try:
        if _is_special(path):
            return
        folder = Path(os.path.realpath(path)).parent
        if path.is_dir():
            raise cannot_write(path, "it is a folder")
        if not folder.is_dir():
            raise cannot_write(path, f"there is no folder {folder}")
    except OSError as error:
        raise cannot_write(path, error) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise cannot_write(path, f"nothing may be written in {folder}")


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A file to write beside ``path``, whose place it then takes: there is no half-written one.

    Behind a link it takes the place of what the link leads to. What is no file (/dev/stdout, a pipe) is given itself.

    Raises:
        ArtifactError: HP411, it cannot be written.
    """
    check_file(path)
    special, target = _is_special(path), Path(os.path.realpath(path))
    # Names may have 255 bytes; a letter has up to four. Two processes may write the same file at once.
    new = path if special else target.with_name(f".{target.name[:40]}.{os.getpid()}.new")
    try:
        yield new
        if not special:
            if target.exists():
                shutil.copymode(target, new)
            new.replace(target)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        if not special:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write all of a text or none of it (`new_file`). Raises `ArtifactError` HP411."""
    with new_file(path) as new:
        new.write_text(text, encoding="utf-8")


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def cannot_write(path: Path, reason: str | OSError) -> ArtifactError:
    """HP411."""
    if isinstance(reason, OSError):
        reason = reason.strerror or str(reason)
    return ArtifactError("HP411", f"cannot write: {reason}", where=str(path), hint="choose another file, or make room")
