"""Predicted against measured peak memory of every stage, on this machine's CPU.

For each model: plan it for some equal CPU devices, then run every stage alone, in a process of its own, by the plan's
schedule with its minibatches in flight (`bench.stage_alone`), and compare the plan's total with the most that it held:
resident, and as tensor storage.

``python -m bench.check_memory --models resnet50,vit_b_16,gpt2 --stages 2,3,4``
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.check_prediction import BATCHES, WORKLOADS, cluster_of
from bench.stage_alone import measured
from hetpipe_compiler.compiler import compile
from hetpipe_compiler.options import CompileOptions


@dataclass(frozen=True)
class Compared:
    """One stage: its predicted parts, and bytes measured: growth of the resident set, and tensor storages."""

    model: str
    stages: int
    stage: int
    in_flight: int
    parts: dict[str, int]
    resident: int
    live: int

    @property
    def error(self) -> float:
        """Of the predicted total, relative to the resident growth."""
        return self.parts["total"] / self.resident - 1

    @property
    def live_error(self) -> float:
        """Of the predicted total, relative to the tensor storages."""
        return self.parts["total"] / self.live - 1


def check(model: str, stage_counts: list[int], *, batch_size: int, nm: int, folder: Path) -> list[Compared]:
    """Plan ``model`` for so many stages with ``nm`` minibatches in flight, and compare each stage."""
    settings: dict[str, Any] = {"name": model, "batch_size": batch_size}
    compared = []
    for count in stage_counts:
        out = folder / f"{model}{count}"
        options = CompileOptions(policy="NP", nm=nm, weights=False)
        stages = compile(WORKLOADS, cluster_of(count), out, settings=settings, options=options).plan
        for stage in stages.virtual_workers[0].stages:
            # Two waves to fill what is kept, and into a third.
            peaks = measured(out, stage.index, 2 * nm + 2)
            row = Compared(
                model, count, stage.index, stage.in_flight, stage.memory_bytes, peaks["resident"], peaks["live"]
            )
            compared.append(row)
    return compared


def table(compared: list[Compared]) -> str:
    """As text, in MB."""
    parts = [name for name in compared[0].parts if name not in ("total", "capacity", "reserve")]
    lines = [
        "  ".join(
            ["model     stage w", *(f"{name[:9]:>9}" for name in parts), "predicted resident  error tensors  error"]
        )
    ]
    for c in compared:
        head = f"{c.model:9} {c.stage}/{c.stages} {c.in_flight:3}"
        cells = (f"{c.parts[name] / 1e6:9.1f}" for name in parts)
        tail = f"{c.parts['total'] / 1e6:9.1f}{c.resident / 1e6:9.1f} {c.error:6.1%}"
        lines.append("  ".join([head, *cells, f"{tail}{c.live / 1e6:8.1f} {c.live_error:6.1%}"]))
    worst = max(abs(c.error) for c in compared)
    median = statistics.median(abs(c.error) for c in compared)
    return "\n".join([*lines, f"{len(compared)} stages: error {median:.1%} in the median, at most {worst:.1%}"])


def main() -> None:
    """Check, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="resnet50,vit_b_16,gpt2")
    parser.add_argument("--stages", default="2,3,4")
    parser.add_argument("--nm", type=int, default=2)
    given = parser.parse_args()
    compared = []
    with tempfile.TemporaryDirectory() as folder:
        for model in given.models.split(","):
            counts = [int(count) for count in given.stages.split(",")]
            compared += check(model, counts, batch_size=BATCHES[model], nm=given.nm, folder=Path(folder))
    print(table(compared))


if __name__ == "__main__":
    main()
