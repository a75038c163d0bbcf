"""Stage modules that cannot be imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetpipe_compiler.errors import ArtifactError
from hetpipe_compiler.ir.stage_file import load_stage_class


def test_missing_stage_modules_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("")
    for module in (None, "gone.py", "empty.py"):
        with pytest.raises(ArtifactError, match="HP415"):
            load_stage_class(tmp_path, module)
