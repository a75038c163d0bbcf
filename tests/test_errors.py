"""Every error code is in docs/errors.md, and nothing else is."""

from __future__ import annotations

import re
from pathlib import Path

from hetpipe_compiler.errors import ClusterError, HetpipeError

ROOT = Path(__file__).parents[1]


def test_the_page_lists_exactly_the_codes_of_the_sources() -> None:
    folders = ("hetpipe_compiler", "passes", "codegen", "runtime")
    sources = {p.resolve() for folder in folders for p in (ROOT / folder).rglob("*.py")}
    used = {code for source in sources for code in re.findall(r"""["'](HP\d{3})["']""", source.read_text())}
    listed = re.findall(r"^\| (HP\d{3}) \|", (ROOT / "docs" / "errors.md").read_text(), flags=re.MULTILINE)
    assert len(used) > 50
    assert set(listed) == used
    assert listed == sorted(set(listed))


def test_an_error_says_code_place_amount_and_next_step() -> None:
    error = ClusterError("HP206", "0 devices", where="c.yaml: nodes[0]", hint="give 1 or more")
    assert isinstance(error, HetpipeError)
    assert str(error) == "error[HP206]: c.yaml: nodes[0]: 0 devices\n  next: give 1 or more"
    assert str(HetpipeError("HP999", "plain")) == "error[HP999]: plain"
