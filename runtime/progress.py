"""The progress of a run: a live table on a terminal, plain lines elsewhere, and RUN/metrics.jsonl in any case."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from hetpipe_compiler.runtime.events import Event, JsonLines

_WINDOW_S = 10.0
_METRICS_EVERY_S = 2.0
_LINES_EVERY_S = 5.0
_SMOOTHING = 0.9
#: What a narrow terminal does without, the least important first.
_DISPENSABLE = ("for weights", "minibatches/s", "clock", "waiting", "samples/s")


@dataclass
class WorkerProgress:
    """What is known of one virtual worker.

    Attributes:
        done: Minibatches that its last stage has finished.
        samples: In them.
        loss: Mean weighted towards the newest (0.9 a minibatch); None before the first, NaN after one that is none.
        pushed: Stage -> waves that the servers have of it.
        waiting, waiting_for_weights: Per stage, the share of its time since it began, from its status events.
    """

    vw: int
    done: int = 0
    samples: int = 0
    loss: float | None = None
    pushed: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, float] = field(default_factory=dict)
    waiting_for_weights: dict[int, float] = field(default_factory=dict)
    _weight: float = 0.0
    _recent: deque[tuple[float, int]] = field(default_factory=deque)

    def finished_minibatch(self, event: Event) -> None:
        """Take a ``minibatch`` event."""
        self.done += 1
        self.samples += event["samples"]
        self._recent.append((event["time"], event["samples"]))
        while self._recent[0][0] < event["time"] - _WINDOW_S and len(self._recent) > 2:
            self._recent.popleft()
        if event["loss"] is None or not math.isfinite(event["loss"]):
            self.loss, self._weight = math.nan, 0.0
        else:
            # The mean with weights 0.9^age, exact from the first minibatch on.
            mean = self.loss if self._weight and self.loss is not None else 0.0
            total = mean * self._weight * _SMOOTHING + event["loss"]
            self._weight = self._weight * _SMOOTHING + 1.0
            self.loss = total / self._weight

    def rates(self) -> tuple[float, float]:
        """Minibatches and samples a second over the last ten seconds that had any."""
        if len(self._recent) < 2:
            return 0.0, 0.0
        seconds = self._recent[-1][0] - self._recent[0][0]
        if seconds <= 0:
            return 0.0, 0.0
        samples = sum(n for _, n in list(self._recent)[1:])
        return (len(self._recent) - 1) / seconds, samples / seconds

    @property
    def clock(self) -> int:
        """Complete waves that the servers have of all its stages."""
        return min(self.pushed.values(), default=0)


class Progress:
    """Collects events and shows them. Use as a context manager around the run.

    Args:
        minibatches: Of each virtual worker in the whole run.
        stages: Per virtual worker.
        metrics: The JSONL file; a line per virtual worker every two seconds, and one at the end.
        processes: How many must report that they are ready before training begins; their start is shown.
    """

    def __init__(
        self,
        minibatches: int,
        stages: list[int],
        metrics: Path,
        console: Console | None = None,
        *,
        processes: int = 0,
    ) -> None:
        self._total = minibatches
        self._stages = stages
        self._console = console or Console(stderr=True)
        self._metrics = JsonLines(metrics)
        self.workers = [WorkerProgress(vw) for vw in range(len(stages))]
        self._start: float | None = None
        self._last_metrics = self._last_line = 0.0
        self._live: Live | None = None
        self._told: set[int] = set()
        self._processes, self._ready = processes, 0
        self._begun = time.monotonic()

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live = Live(self._table(), console=self._console, refresh_per_second=4, transient=False)
            self._live.start(refresh=True)
        elif self._processes:
            self.note(f"starting {self._processes} processes")
        return self

    def __exit__(self, *_: object) -> None:
        now = time.time()
        self._write_metrics(now)
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            self._live.stop()
        elif self._start is not None:
            self._print_lines(now)
        self._metrics.close()

    def on_event(self, event: Event) -> None:
        """Take an event; unknown kinds are ignored."""
        kind = event["kind"]
        if kind == "minibatch":
            if self._start is None:
                self._start = event["time"]
                self._last_line = self._last_metrics = time.time()
            worker = self.workers[event["vw"]]
            worker.finished_minibatch(event)
            if worker.loss is not None and math.isnan(worker.loss) and worker.vw not in self._told:
                self._told.add(worker.vw)
                self.note(f"vw{worker.vw}: the loss of minibatch {event['minibatch']} is not a finite number")
        elif kind == "push" and event["accepted"]:
            pushed = self.workers[event["vw"]].pushed
            pushed[event["stage"]] = max(pushed.get(event["stage"], 0), event["wave"] + 1)
        elif kind == "status" and "vw" in event:
            worker = self.workers[event["vw"]]
            counted_s = max(event["counted_s"], 1e-3)
            worker.waiting[event["stage"]] = min(1.0, event["waited_s"] / counted_s)
            worker.waiting_for_weights[event["stage"]] = min(1.0, event["waited_for_weights_s"] / counted_s)
        elif kind == "ready":
            self._one_ready()
        self._show()

    def _one_ready(self) -> None:
        self._ready += 1
        if self._live is not None:
            self._live.update(self._table())
        if self._ready == self._processes:
            self.note(f"{self._processes} processes are ready after {time.monotonic() - self._begun:.0f} s")

    def note(self, text: str) -> None:
        """Print a line above the display."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def records(self, now: float) -> list[dict[str, Any]]:
        """One dict per virtual worker, as written to metrics.jsonl; shares of time are between 0 and 1."""
        elapsed_s = now - self._start if self._start else 0.0
        records = []
        for worker, stages in zip(self.workers, self._stages, strict=True):
            minibatches_per_s, samples_per_s = worker.rates()
            records.append(
                {
                    "time": round(now, 3),
                    "elapsed_s": round(elapsed_s, 3),
                    "vw": worker.vw,
                    "minibatches": worker.done,
                    "total": self._total,
                    "minibatches_per_s": round(minibatches_per_s, 4),
                    "samples_per_s": round(samples_per_s, 4),
                    "loss": finite(worker.loss),
                    "clock": worker.clock,
                    "waiting": round(sum(worker.waiting.values()) / stages, 4),
                    "waiting_for_weights": round(sum(worker.waiting_for_weights.values()) / stages, 4),
                }
            )
        return records

    def _show(self) -> None:
        now = time.time()
        if self._start is None:
            return
        if now - self._last_metrics >= _METRICS_EVERY_S:
            self._write_metrics(now)
            if self._live is not None:
                self._live.update(self._table())
        if self._live is None and now - self._last_line >= _LINES_EVERY_S:
            self._print_lines(now)

    def _write_metrics(self, now: float) -> None:
        self._last_metrics = now
        for record in self.records(now):
            self._metrics.write(record)

    def _print_lines(self, now: float) -> None:
        self._last_line = now
        for r in self.records(now):
            cells = " ".join(f"{name} {value}" for name, value in _cells(r).items())
            self.note(f"vw{r['vw']}: {cells}")

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        if self._start is None and self._ready < self._processes:
            table.title = f"starting: {self._ready} of {self._processes} processes are ready"
            table.title_justify = "left"
        table.add_column("worker", no_wrap=True)
        records = self.records(time.time())
        rows = [_cells(record) for record in records]
        columns = _that_fit(rows, self._console.width - len("worker"))
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        for record, row in zip(records, rows, strict=True):
            table.add_row(f"vw{record['vw']}", *(row[name] for name in columns))
        return table


def finite(value: float | None) -> float | str | None:
    """JSON knows no NaN and no infinity: those become text."""
    return value if value is None or math.isfinite(value) else str(value)


def _cells(record: dict[str, Any]) -> dict[str, str]:
    loss = record["loss"]
    return {
        "minibatch": f"{record['minibatches']}/{record['total']}",
        "minibatches/s": rate(record["minibatches_per_s"]),
        "samples/s": rate(record["samples_per_s"]),
        "loss": f"{loss:.4f}" if isinstance(loss, float) else str(loss or "-"),
        "clock": str(record["clock"]),
        "waiting": f"{100 * record['waiting']:.0f}%",
        "for weights": f"{100 * record['waiting_for_weights']:.0f}%",
    }


def _that_fit(rows: list[dict[str, str]], width: int) -> list[str]:
    """The columns to show in so many characters, two between columns: whole ones, rather than all of them cut short."""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    for name in _DISPENSABLE:
        if sum(widths.values()) + 2 * len(widths) <= width:
            break
        del widths[name]
    return list(widths)


def rate(per_s: float) -> str:
    """Two or three digits that say something, also of a minibatch that takes a minute."""
    return f"{per_s:.0f}" if per_s >= 100 or not per_s else f"{per_s:.1f}" if per_s >= 1 else f"{per_s:.2g}"
