"""What an evaluation makes of its minibatches' losses."""

from __future__ import annotations

import io
import math

from rich.console import Console

from hetpipe_compiler.runtime.evaluation_progress import EvaluationProgress


def evaluated(samples: list[int], losses: list[float]) -> tuple[EvaluationProgress, str]:
    out = io.StringIO()
    progress = EvaluationProgress(len(samples), 1, Console(file=out, width=200))
    with progress:
        progress.on_event({"kind": "ready", "time": 0.0})
        for at, (size, loss) in enumerate(zip(samples, losses, strict=True), 1):
            progress.on_event({"kind": "batch", "minibatch": at, "samples": size, "time": float(at)})
            progress.on_event({"kind": "loss", "minibatch": at, "loss": loss, "time": float(at)})
    return progress, out.getvalue()


def test_a_minibatch_counts_as_often_as_it_has_samples() -> None:
    progress, printed = evaluated([3, 1], [1.0, 5.0])
    assert progress.result().loss == 2.0
    assert (progress.result().samples, progress.result().samples_per_s) == (4, 2.0)
    assert printed == "starting 1 process\n"


def test_an_empty_batch_counts_for_nothing() -> None:
    progress, printed = evaluated([3, 0, 1], [1.0, math.nan, 5.0])
    assert progress.result().loss == 2.0
    assert progress.result().minibatches == 3
    assert "not a finite number" not in printed
    nothing, _ = evaluated([0], [math.nan])
    assert nothing.result().samples == 0


def test_a_loss_that_is_none_is_told_once() -> None:
    progress, printed = evaluated([3, 1, 1], [math.nan, 5.0, math.inf])
    assert math.isnan(progress.result().loss)
    assert printed.count("the loss of minibatch 1 is not a finite number") == 1
    assert printed.count("finite") == 1
