"""The numbers and the words of a run's progress."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hetpipe_compiler.runtime.progress import Progress, finite


def minibatch(index: int, loss: float | None) -> dict[str, Any]:
    """An event of the last stage of vw0: ten minibatches a second, four samples each."""
    return {"kind": "minibatch", "vw": 0, "minibatch": index, "loss": loss, "samples": 4, "time": 1000 + index / 10}


@pytest.mark.parametrize("none", [None, float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_not_hidden(tmp_path: Path, none: float | None) -> None:
    """A run that diverged must not show the last loss that was fine."""
    out = io.StringIO()
    with Progress(5, [1], tmp_path / "metrics.jsonl", Console(file=out, width=200)) as progress:
        for index, loss in enumerate([2.0, 1.0, none, none], start=1):
            progress.on_event(minibatch(index, loss))
        (record,) = progress.records(2000.0)
        assert record["loss"] == "nan"
        assert record["minibatches_per_s"] == pytest.approx(10, rel=1e-3)
        assert record["samples_per_s"] == pytest.approx(40, rel=1e-3)
        progress.on_event(minibatch(5, 3.0))
    assert out.getvalue().count("the loss of minibatch 3 is not a finite number") == 1
    assert out.getvalue().count("not a finite number") == 1
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["loss"], last["minibatches"]) == (3.0, 5)


def test_the_loss_is_a_mean_of_the_newest(tmp_path: Path) -> None:
    with Progress(2, [1], tmp_path / "metrics.jsonl", Console(quiet=True)) as progress:
        progress.on_event(minibatch(1, 4.0))
        assert progress.workers[0].loss == 4.0
        progress.on_event(minibatch(2, 2.0))
        assert progress.workers[0].loss == pytest.approx((0.9 * 4.0 + 2.0) / 1.9)


@pytest.mark.parametrize("terminal", [True, False])
def test_the_start_is_told(tmp_path: Path, terminal: bool) -> None:
    """Processes take seconds to start; nothing but zeros meanwhile would look like a run that hangs."""
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=terminal)
    with Progress(5, [1], tmp_path / "metrics.jsonl", console, processes=2) as progress:
        shown = "starting: 0 of 2 processes are ready" if terminal else "starting 2 processes\n"
        assert shown in out.getvalue()
        progress.on_event({"kind": "ready", "process": "server n0", "time": 0.0})
        assert "are ready after" not in out.getvalue()
        progress.on_event({"kind": "ready", "process": "vw0/stage0", "time": 0.0})
        assert "2 processes are ready after 0 s" in out.getvalue()


def test_numbers_that_are_none_stay_valid_json() -> None:
    assert [finite(x) for x in (1.5, None, float("nan"), float("inf"))] == [1.5, None, "nan", "inf"]


def test_slow_minibatches_have_a_rate(tmp_path: Path) -> None:
    out = io.StringIO()
    with Progress(2, [1], tmp_path / "metrics.jsonl", Console(file=out, width=200)) as progress:
        progress.on_event({**minibatch(1, 1.0), "time": 1000.0})
        progress.on_event({**minibatch(2, 1.0), "time": 1040.0})
    assert "minibatches/s 0.025 samples/s 0.1 " in out.getvalue()


@pytest.mark.parametrize("width", [26, 40, 60, 100])
def test_a_narrow_terminal_shows_fewer_columns_whole(tmp_path: Path, width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    with Progress(1000, [1, 1], tmp_path / "metrics.jsonl", console) as progress:
        progress.on_event(minibatch(1, 1.25))
    shown = out.getvalue()
    assert "…" not in shown
    assert all(text in shown for text in ("minibatch", "1/1000", "loss", "1.2500", "vw1"))
    assert ("for weights" in shown) == (width == 100)
