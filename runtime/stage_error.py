"""An exception inside a stage module, told with the line of the user's model that the stage was running."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hetpipe_compiler.errors import RunError

if TYPE_CHECKING:
    from hetpipe_compiler.ir.plan import Stage


@contextlib.contextmanager
def calling_stage(folder: Path, stage: Stage) -> Iterator[None]:
    """Around the call of a stage module from the plan folder.

    Raises:
        RunError: HP519 from what the stage raised: names the user's line, and the emitted one.
    """
    try:
        yield
    except Exception as error:
        line = _emitted_line(error, folder / str(stage.module))
        if line is None:
            raise
        text = (folder / str(stage.module)).read_text(encoding="utf-8").splitlines()
        module, place = _heading(text, line)
        told = next((part.strip() for part in str(error).splitlines() if part.strip()), "")
        raise RunError(
            "HP519",
            f"stage {stage.index} raised {type(error).__name__}: {told}",
            where=f"{place or 'the model'} ({module})",
            hint=f"it ran `{text[line - 1].strip()}` ({stage.module}:{line})",
        ) from error


def _emitted_line(error: BaseException, path: Path) -> int | None:
    """The line of the stage's file that the innermost frame in it was at."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == path.resolve()]
    return frames[-1].lineno if frames else None


def _heading(text: list[str], line: int) -> tuple[str, str]:
    """Module path and place in the comment above a line: ``# features.0  model.py:31``."""
    for above in reversed(text[: line - 1]):
        if above.strip().startswith("# "):
            module, _, place = above.strip()[2:].partition("  ")
            return module, place
    return "(model)", ""
