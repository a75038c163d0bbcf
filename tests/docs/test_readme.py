"""The README names every option of hetpipe-compile, and its help lists each under a heading."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hetpipe_compiler.cli.boundary import single_command
from hetpipe_compiler.cli.compile import command

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def options() -> list[str]:
    """The longest name of each option."""
    params = typer.main.get_command(single_command(command)).params
    return [max(param.opts, key=len) for param in params if param.param_type_name == "option"]


def test_the_readme_names_every_option(options: list[str]) -> None:
    table = README.read_text(encoding="utf-8").partition("## The commands")[2].partition("**`hetpipe-inspect")[0]
    missing = [name for name in options if name not in ("--out", "--help") and f"`{name}" not in table]
    assert missing == ["--cluster"]  # it stands in the command's own line
    assert "--cluster C.yaml -o DIR" in table


def test_help_lists_every_option_once_under_its_heading(options: list[str]) -> None:
    text = CliRunner().invoke(single_command(command), ["--help"]).stdout
    sections = {part.partition(":\n")[0]: part for part in text.split("\n\n")}
    assert list(sections)[2:] == ["Arguments", "Options", "The plan", "The model", "What is printed"]
    for name in options:
        assert len(re.findall(rf"^  (?:-\w, )?{name} ", text, re.MULTILINE)) == 1, name
    assert "--policy" in sections["The plan"]
    assert "--opaque" in sections["The model"]
    assert "--memory" in sections["What is printed"]
