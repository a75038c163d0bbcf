"""Predicted against measured: the plan's stage times beside those of a run (``hetpipe-inspect PLAN --compare RUN``)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hetpipe_compiler.codegen.quantities import digits
from hetpipe_compiler.errors import ArtifactError
from hetpipe_compiler.ir.plan import Plan


@dataclass(frozen=True)
class StageComparison:
    """One stage; milliseconds of one minibatch, predicted and measured (the median of ``count`` minibatches).

    Attributes:
        low_ms, high_ms: Quartiles of the measured forward plus those of the backward.
    """

    vw: int
    stage: int
    device: str
    predicted_ms: tuple[float, float]
    measured_ms: tuple[float, float]
    low_ms: float
    high_ms: float
    count: int

    @property
    def error(self) -> float:
        """Of forward + backward, relative to the measured; 0.0 if nothing was measured."""
        measured = sum(self.measured_ms)
        return sum(self.predicted_ms) / measured - 1 if measured > 0 else 0.0


def compare(plan: Plan, run: Path) -> tuple[StageComparison, ...]:
    """Stages of ``plan`` with the times in the event log of ``run``; of a stage that ran twice, the last.

    A paced run (`paced`) takes predicted times x ``time_scale``: its times are divided by that.

    Raises:
        ArtifactError: HP450, no such log, or one without times (it ended early, or the interpreter ran it); HP451, it
            is the log of another plan.
    """
    options = run_options(run)
    if options.get("computes") not in (None, "", plan.computes()):
        raise ArtifactError(
            "HP451", "another plan's run: its stages are not this plan's", where=str(run), hint="give its plan"
        )
    scale = plan.cluster["emulate"]["time_scale"] if paced(plan, options) else 1.0
    found = []
    for event in _times_events(run):
        vw, index = event["vw"], event["stage"]
        if vw >= len(plan.virtual_workers) or index >= len(plan.virtual_workers[vw].stages):
            raise ArtifactError(
                "HP451", f"has a stage {index} of vw{vw}, which the plan has not", where=str(run), hint="give its plan"
            )
        stage = plan.virtual_workers[vw].stages[index]
        nothing = {"count": 0, "median_ms": 0.0, "low_ms": 0.0, "high_ms": 0.0}
        forward, backward = (event["times"].get(name, nothing) for name in ("forward", "backward"))
        found.append(
            StageComparison(
                vw=vw,
                stage=index,
                device=f"{stage.device} {stage.kind}",
                predicted_ms=(stage.forward_ms, stage.backward_ms),
                measured_ms=(forward["median_ms"] / scale, backward["median_ms"] / scale),
                low_ms=(forward["low_ms"] + backward["low_ms"]) / scale,
                high_ms=(forward["high_ms"] + backward["high_ms"]) / scale,
                count=int(forward["count"]),
            )
        )
    return tuple(sorted({(c.vw, c.stage): c for c in found}.values(), key=lambda c: (c.vw, c.stage)))


def run_options(run: Path) -> dict[str, Any]:
    """What ``run.json`` of a run says (`hetpipe_compiler.runtime.job.Job`); empty where there is none."""
    try:
        options = json.loads((run / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return options if isinstance(options, dict) else {}


def paced(plan: Plan, options: Mapping[str, Any]) -> bool:
    """Whether a run with these options took predicted times by waiting: an emulated cluster, on CPUs."""
    return bool(plan.cluster.get("emulate")) and options.get("backend") != "cuda"


def _times_events(run: Path) -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        raise ArtifactError(
            "HP450", "no events.jsonl here", where=str(run), hint="give the folder that hetpipe-run -o wrote"
        ) from None
    events = [json.loads(line) for line in lines if '"times"' in line]
    times = [event for event in events if event.get("kind") == "times"]
    if not times:
        raise ArtifactError(
            "HP450",
            "the run's log has no times of stages",
            where=str(path),
            hint="they come at the end of a run that is neither interrupted nor --interpret",
        )
    return times


def compare_table(compared: Sequence[StageComparison]) -> list[RenderableType]:
    """A row per stage, and the median error."""
    title = "predicted and measured, ms of one minibatch"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in ("vw", "stage", "device", "forward", "measured", "backward", "measured", "error", "minibatches"):
        table.add_column(name, justify="left" if name == "device" else "right", no_wrap=name != "device")
    for c in compared:
        table.add_row(
            str(c.vw),
            str(c.stage),
            c.device,
            digits(c.predicted_ms[0]),
            digits(c.measured_ms[0]),
            digits(c.predicted_ms[1]),
            digits(c.measured_ms[1]),
            f"{c.error:+.0%}",
            str(c.count),
        )
    errors = sorted(abs(c.error) for c in compared)
    median = errors[len(errors) // 2] if errors else 0.0
    return [table, Text(f"median error of forward + backward: {median:.0%}", style="dim")]
