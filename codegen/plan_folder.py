"""A plan folder as a thing on disk: where one may be written, and how it takes its place at once. Needs no torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from hetpipe_compiler.errors import ArtifactError


def check_target(folder: Path) -> None:
    """Refuse early what `replace_folder` could not write, or must not.

    Raises:
        ArtifactError: HP410 something else is there, or the command was called from inside; HP411 it cannot be written.
    """
    try:
        target = folder.resolve()
        free = not target.exists() or (
            target.is_dir() and (not any(target.iterdir()) or (target / "plan.json").exists())
        )
        if not free:
            message = "exists and is no plan folder: it is left as it is"
            raise ArtifactError("HP410", message, where=str(folder), hint="choose another -o DIR")
        if target.exists() and Path.cwd().is_relative_to(target):
            message = "is where you are, and another folder would take its place"
            raise ArtifactError(
                "HP410", message, where=str(folder), hint="choose another -o DIR, or leave it with cd .."
            )
        above = next(parent for parent in target.parents if parent.exists())
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError
        raise _cannot_write(folder, error) from error
    if not above.is_dir():
        raise _unwritable(folder, f"{above} is no folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise _unwritable(folder, f"nothing may be written in {above}")


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Call ``write`` with the path of a folder to make beside ``folder``, then put that in its place.

    A link is followed: the folder that it names is replaced.

    Raises:
        ArtifactError: HP410 as `check_target`, HP411 it cannot be written. Whatever is raised, ``folder`` is as it was.
    """
    check_target(folder)
    target = folder.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Names may have 255 bytes; a letter has up to four.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name[:40]}-") as name:
            new = Path(name) / "new"
            write(new)
            _put(new, target, Path(name) / "old")
    except OSError as error:
        raise _cannot_write(folder, error) from error


def _put(new: Path, target: Path, old: Path) -> None:
    """Rename ``new`` to ``target``; what is there becomes ``old``, and comes back whatever is raised in between."""
    try:
        if target.exists():
            target.rename(old)
        new.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise


def _cannot_write(folder: Path, error: OSError | RuntimeError) -> ArtifactError:
    return _unwritable(folder, getattr(error, "strerror", None) or str(error))


def _unwritable(folder: Path, reason: str) -> ArtifactError:
    return ArtifactError("HP411", f"cannot write: {reason}", where=str(folder), hint="choose another -o DIR")
