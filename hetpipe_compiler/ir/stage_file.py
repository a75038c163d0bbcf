"""Import a stage module from the file that it was written to."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType


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
