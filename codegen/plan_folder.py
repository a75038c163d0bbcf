"""A plan folder as a thing on disk: where one may be written, and how it takes its place at once. Needs no torch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from hetpipe_compiler.errors import ArtifactError


def check_target(folder: Path) -> None:
    """Refuse to write over what is no plan folder: `ArtifactError` HP410."""
    if folder.exists() and not (folder.is_dir() and (not any(folder.iterdir()) or (folder / "plan.json").exists())):
        raise ArtifactError(
            "HP410",
            "exists and is no plan folder: it is left as it is",
            where=str(folder),
            hint="choose another -o DIR",
        )


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Call ``write`` with the path of a folder to make beside ``folder``, then put that in its place.

    Raises:
        ArtifactError: HP410 as `check_target`, HP411 it cannot be written. Whatever is raised, ``folder`` is as it was.
    """
    check_target(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as name:
            new = Path(name) / "new"
            write(new)
            if folder.exists():
                folder.rename(Path(name) / "old")
            new.rename(folder)
    except OSError as error:
        raise ArtifactError("HP411", f"cannot write: {error.strerror}", where=str(folder)) from error
