"""How errors of a user's functions are told."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from hetpipe_compiler.errors import RunError, WorkloadError
from hetpipe_compiler.user_code import first_line, telling, told, user_line, user_place


class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no width"), "ValueError: no width"),
        (ValueError("\n one\n\n  two  "), "ValueError: one two"),
        (SystemExit(), "SystemExit"),
        (SystemExit(3), "SystemExit: 3"),
        (SpeechlessError(), "SpeechlessError"),
        (OSError("x" * 400), f"OSError: {'x' * 300}..."),
    ],
)
def test_an_error_in_one_line(error: BaseException, text: str) -> None:
    assert told(error) == text


def test_the_first_line_of_a_text_that_goes_on() -> None:
    assert first_line(RuntimeError("\n  what is wrong\nframe #0: at::detail")) == "what is wrong"
    assert first_line(StopIteration()) == "StopIteration"
    assert first_line(SpeechlessError()) == "SpeechlessError"


def test_the_place_is_a_line_of_the_users_not_of_pythons_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    with pytest.raises(SystemExit) as caught:
        argparse.ArgumentParser().parse_args(["--unknown"])
    place = user_place(caught.value)
    assert place is not None
    assert place.startswith("test_user_code.py:"), place
    assert user_place(ValueError("never raised")) is None


def test_the_innermost_line_of_the_users_file(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text("def f():\n    return g()\ndef g():\n    return int('x')\n")
    scope: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    with pytest.raises(ValueError, match="invalid literal") as caught:
        scope["f"]()
    assert user_line(caught.value, path) == f"{path}:4"
    assert user_line(caught.value, tmp_path / "other.py") == str(tmp_path / "other.py")


@pytest.mark.parametrize("error", [ValueError("no width"), StopIteration(), SystemExit(3)])
def test_what_a_users_function_raises_is_told_with_its_line(error: BaseException) -> None:
    path = Path(__file__)
    with (
        pytest.raises(RunError) as caught,
        telling(RunError, "HP518", "optimizer() raised", path, hint="look at it"),
    ):
        raise error
    line = next(at for at, text in enumerate(path.read_text().splitlines(), 1) if text == "        raise error")
    assert str(caught.value) == f"error[HP518]: {path}:{line}: optimizer() raised {told(error)}\n  next: look at it"
    assert caught.value.__cause__ is error


def test_an_error_of_ours_passes_as_it_is() -> None:
    own = WorkloadError("HP106", "the example holds no tensor")
    with pytest.raises(WorkloadError) as caught, telling(RunError, "HP518", "it raised", Path(__file__), hint=""):
        raise own
    assert caught.value is own
