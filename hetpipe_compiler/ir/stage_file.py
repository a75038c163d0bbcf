"""Import a stage module from the file that it was written to."""

from __future__ import annotations

import importlib.util
import re
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from hetpipe_compiler.errors import ArtifactError, HetpipeError
from hetpipe_compiler.user_code import USER_ERRORS, told

if TYPE_CHECKING:
    from torch import nn


def import_stage_file(path: Path) -> ModuleType:
    """The module at ``path``, run anew and in no one's way in ``sys.modules``; its class ``Stage`` is the stage.

    Raises:
        ImportError: The name does not end as a Python file's does. Whatever the file raises passes through.
    """
    name = "_hetpipe_stage_" + re.sub(r"\W", "_", str(path.resolve()))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_stage_class(folder: Path, module: str | None) -> type[nn.Module]:
    """Class ``Stage`` of a stage module file in the plan folder; raises `ArtifactError` HP415."""
    if module is None:
        raise ArtifactError(
            "HP415",
            "the plan was made from a profiled graph: there is no model to train",
            where=str(folder),
            hint="compile a model.py",
        )
    path = folder / module
    if not path.is_file():
        raise ArtifactError("HP415", "no such stage module", where=str(path), hint="compile again")
    try:
        loaded = import_stage_file(path)
    except HetpipeError:
        raise
    except USER_ERRORS as error:
        line = error.lineno if isinstance(error, SyntaxError) else traceback.extract_tb(error.__traceback__)[-1].lineno
        raise ArtifactError(
            "HP415", told(error), where=f"{path}:{line}", hint="compile again, or undo the edit"
        ) from error
    stage: type[nn.Module] | None = getattr(loaded, "Stage", None)
    if stage is None:
        raise ArtifactError("HP415", "defines no class Stage", where=str(path), hint="compile again")
    return stage
