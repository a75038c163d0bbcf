"""An exception inside a stage module, told with the line of the user's model that the stage was running."""

from __future__ import annotations

import contextlib
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch

from hetpipe_compiler.errors import RunError
from hetpipe_compiler.ir.source import is_internal, short_path

if TYPE_CHECKING:
    from hetpipe_compiler.ir.plan import Stage

#: File and line, the outermost frame of a stack first.
_Frames: TypeAlias = Sequence[tuple[str, int]]


@contextlib.contextmanager
def calling_stage(folder: Path, stage: Stage) -> Iterator[None]:
    """Around the call of a stage module from the plan folder.

    Raises:
        RunError: HP519 from what the stage raised: names the user's line, and the emitted one.
    """
    try:
        yield
    except Exception as error:
        told = _told(_frames(error), folder, stage)
        if told is None:
            raise
        where, ran = told
        raise RunError(
            "HP519", f"stage {stage.index} raised {_text(error)}", where=where, hint=f"it ran {ran}"
        ) from error


def backward_error(error: Exception, folder: Path, stage: Stage, minibatch: int, again: Callable[[], None]) -> RunError:
    """HP521 from what the backward of a stage raised: names the user's line whose backward it was.

    Autograd does not remember where an operator was called unless it is told to before the forward, which costs as much
    as the forward itself. So ``again`` runs forward and backward of the minibatch once more, with that switched on. If
    that does not raise, or memory has run out, the line stays unknown.
    """
    told = None
    if not isinstance(error, torch.OutOfMemoryError):
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            with contextlib.suppress(Exception), torch.autograd.detect_anomaly(check_nan=False):
                again()
        stacks = [_FRAME.findall(str(w.message)) for w in noted if "Traceback of forward call" in str(w.message)]
        told = next((t for s in stacks if (t := _told([(f, int(n)) for f, n in s], folder, stage))), None)
    own = [(file, line) for file, line in _frames(error) if not is_internal(file)]
    raised = f" at {short_path(Path(own[-1][0]), folder.resolve())}:{own[-1][1]}" if own else ""
    where, ran = told or (f"stage {stage.index}", "")
    return RunError(
        "HP521",
        f"the backward of stage {stage.index}, minibatch {minibatch}, raised {_text(error)}{raised}",
        where=where,
        hint=f"it was the backward of {ran}" if ran else "run one training step on the batch in plain PyTorch",
    )


_FRAME = re.compile(r'File "(.+?)", line (\d+)')


def _text(error: Exception) -> str:
    told = next((part.strip() for part in str(error).splitlines() if part.strip()), "")
    return f"{type(error).__name__}: {told}"


def _frames(error: BaseException) -> _Frames:
    return [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)]


def _told(frames: _Frames, folder: Path, stage: Stage) -> tuple[str, str] | None:
    """The user's place and the emitted statement for a stack that passes through the stage's file."""
    path = (folder / str(stage.module)).resolve()
    at = max((i for i, (file, _) in enumerate(frames) if Path(file).resolve() == path), default=None)
    if at is None:
        return None
    line = frames[at][1]
    text = path.read_text(encoding="utf-8").splitlines()
    module, place = _heading(text, line)
    # A module that is kept whole goes on in the user's own code.
    own = [frame for frame in frames[at + 1 :] if not is_internal(frame[0])]
    if own:
        place = f"{short_path(Path(own[-1][0]), folder.resolve())}:{own[-1][1]}"
    if module != "(model)":
        place = f"{place or 'the model'} ({module})"
    return place or "the model or its loss", f"`{text[line - 1].strip()}` ({stage.module}:{line})"


def _heading(text: list[str], line: int) -> tuple[str, str]:
    """Module path and place in the comment above a line: ``# features.0  model.py:31``."""
    for above in reversed(text[: line - 1]):
        if above.strip().startswith("# "):
            module, _, place = above.strip()[2:].partition("  ")
            return module, place
    return "(model)", ""
