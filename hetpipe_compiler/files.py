"""Writing files so that there is never half of one."""

from __future__ import annotations

from pathlib import Path

from hetpipe_compiler.errors import ArtifactError


def write_text(path: Path, text: str) -> None:
    """Write a file beside its place and rename it: there is no half-written one. Raises `ArtifactError` HP411."""
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except OSError as error:
        raise ArtifactError("HP411", f"cannot write: {error.strerror}", where=str(path)) from error
