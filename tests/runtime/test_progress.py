"""The numbers and the words of a run's progress."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hetpipe_compiler.runtime.progress import Progress


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
