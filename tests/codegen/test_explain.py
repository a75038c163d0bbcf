"""What --explain tells about a capture."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kinds import MODELS

from hetpipe_compiler.compiler import explain

GOLDEN = Path(__file__).parents[1] / "golden"


def test_golden() -> None:
    """Rewrite with: UPDATE_GOLDEN=1 pytest tests/codegen/test_explain.py"""
    text = explain(GOLDEN / "explained_model.py") + "\n"
    golden = GOLDEN / "explained.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
    assert max(len(line) for line in text.splitlines()) <= 80


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("FixedBatch", ["batch size  fixed at 4: the model turns the batch size into a constant"]),
        ("InplaceNet", ["random      no operator draws random numbers", "regions     none", "buffers     none"]),
        ("SkipOver", ["in place    nothing is written in place", "constants   none"]),
        ("BNConvNet", ["evaluation  yes; operators that follow the mode: 3, that run in training only: 3"]),
    ],
)
def test_entries(name: str, lines: list[str]) -> None:
    text = explain(MODELS, {"name": name})
    assert set(lines) <= set(text.splitlines()), text
    assert max(len(line) for line in text.splitlines()) <= 80
