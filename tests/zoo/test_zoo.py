"""The whole zoo; an hour or two, so only with ``-m zoo``. `make zoo` does the same and writes docs/zoo.md."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("timm")
pytest.importorskip("torchvision")
pytest.importorskip("transformers")

import zoo_run


@pytest.mark.zoo
def test_nearly_all_pass_and_none_differs_silently(tmp_path: Path) -> None:
    assert zoo_run.main(["--results", str(tmp_path / "zoo.jsonl"), "--page", str(tmp_path / "zoo.md")]) == 0
