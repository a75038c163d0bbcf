"""How errors of a user's functions are told."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from hetpipe_compiler.user_code import first_line, told, user_place


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
