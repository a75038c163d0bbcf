"""The progress of an evaluation: a bar on a terminal, plain lines elsewhere, and the result."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from hetpipe_compiler.codegen.quantities import counted
from hetpipe_compiler.runtime.events import Event
from hetpipe_compiler.runtime.progress import finite, rate

_LINES_EVERY_S = 5.0


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
        loss: Mean over the samples: the loss of each minibatch counts as often as it has samples.
        samples: How many.
        minibatches: In so many minibatches.
        samples_per_s: From when all stages were ready to when the last minibatch was done.
    """

    loss: float
    samples: int
    minibatches: int
    samples_per_s: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which knows no NaN and no infinity: those become text."""
        return {name: finite(v) if isinstance(v, float) else v for name, v in asdict(self).items()}


class EvaluationProgress:
    """Collects events and shows them. Use as a context manager around the evaluation.

    Args:
        minibatches: In the whole evaluation.
        processes: How many must report that they are ready before it begins.
    """

    def __init__(self, minibatches: int, processes: int, console: Console) -> None:
        self._total, self._processes, self._console = minibatches, processes, console
        self._samples: dict[int, int] = {}
        self._losses: dict[int, float] = {}
        self._ready = 0
        self._done, self._sum, self._told_of_nan = 0, 0.0, False
        self._begun, self._ended = 0.0, 0.0
        self._last_line = 0.0
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> EvaluationProgress:
        starting = f"starting {counted(self._processes, 'process')}"
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[told]}"),
            )
            self._bar = Progress(*columns, TimeRemainingColumn(), console=self._console)
            self._task = self._bar.add_task(starting, total=self._total, told="")
            self._bar.start()
        else:
            self.note(starting)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def on_event(self, event: Event) -> None:
        """Take an event; unknown kinds are ignored."""
        kind = event["kind"]
        if kind == "ready":
            self._ready += 1
            if self._ready == self._processes:
                self._begun, self._last_line = event["time"], time.monotonic()
                if self._bar is not None:
                    self._bar.reset(self._task, description="evaluating")
        elif kind == "batch":
            self._samples[event["minibatch"]] = event["samples"]
        elif kind == "loss":
            self._take_loss(event)

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def result(self) -> Evaluation:
        """What has been found, once all minibatches are done."""
        samples = sum(self._samples.values())
        # fsum: rounded once, so it does not matter in which order the minibatches are added. The loss of no samples is
        # NaN, and counts for nothing.
        losses = (loss * self._samples[p] for p, loss in self._losses.items() if self._samples[p])
        loss = math.fsum(losses) / samples if samples else math.nan
        return Evaluation(loss, samples, len(self._losses), samples / max(self._ended - self._begun, 1e-9))

    def _take_loss(self, event: Event) -> None:
        minibatch, loss = event["minibatch"], event["loss"]
        self._losses[minibatch], self._ended = loss, event["time"]
        samples = self._samples.get(minibatch, 0)
        self._done += samples
        self._sum += loss * samples if samples else 0.0
        if not math.isfinite(loss) and samples and not self._told_of_nan:
            self._told_of_nan = True
            self.note(f"the loss of minibatch {minibatch} is not a finite number")
        so_far = f"samples/s {rate(self._done / max(self._ended - self._begun, 1e-9))}"
        so_far += f" loss {self._sum / max(self._done, 1):.4f}"
        if self._bar is not None:
            self._bar.update(self._task, completed=len(self._losses), told=so_far)
        elif time.monotonic() - self._last_line >= _LINES_EVERY_S:
            self._last_line = time.monotonic()
            self.note(f"minibatch {len(self._losses)}/{self._total} {so_far}")
