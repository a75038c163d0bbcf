"""Compile, run, compare, compile again with the run's times: the commands on the digits example, nothing emulated."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetpipe_compiler.cli.boundary import run_app, single_command
from hetpipe_compiler.cli.compile import command as compile_command
from hetpipe_compiler.cli.inspect import inspect
from hetpipe_compiler.codegen.compare import compare
from hetpipe_compiler.ir.plan import Plan

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "digits" / "model.py"
#: Far slower than any CPU, so that the estimate is wrong. A kind each, so that no stage's times mix with the other's.
CLUSTER = """
name: here
nodes:
  - {name: n0, devices: {cpu-a: 1, cpu-b: 1}, link: loopback}
kinds:
  cpu-a: &slow {memory_gb: 2, fp32_tflops: 0.001, memory_bandwidth_gb_s: 0.1, reserve_mib: 0}
  cpu-b: *slow
"""


def command(function: Callable[..., Any], *arguments: object) -> None:
    """A command in this process; only training needs processes of its own."""
    app = single_command(function)
    with pytest.raises(SystemExit) as caught:
        run_app(lambda: app(args=[str(a) for a in arguments], prog_name="hetpipe"))
    assert caught.value.code == 0


def train(*arguments: object) -> None:
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    line = [sys.executable, "-m", "hetpipe_compiler.cli.run", *map(str, arguments)]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def errors(plan: Path, run: Path) -> list[float]:
    return [abs(c.error) for c in compare(Plan.load(plan), run)]


def test_a_plan_made_with_a_runs_times_predicts_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    cluster, plan, run, again = (tmp_path / name for name in ("c.yaml", "plan", "run", "again"))
    cluster.write_text(CLUSTER)
    model = (MODEL, "--cluster", cluster, "--set", "batch_size=8")
    command(compile_command, *model, "--policy", "NP", "--nm", 2, "-o", plan)
    train(plan, "--steps", 6, "-o", run)
    capsys.readouterr()
    command(inspect, plan, "--compare", run, "--write-profiles", tmp_path)
    printed = capsys.readouterr().out
    profiles = [tmp_path / f"cpu-{kind}-run.json" for kind in "ab"]
    assert "median error" in printed
    assert all(f"--profile {profile}" in printed for profile in profiles)

    measured = [word for profile in profiles for word in ("--profile", profile)]
    command(compile_command, *model, "--decisions", plan / "decisions.yaml", *measured, "-o", again)
    new, old = Plan.load(again), Plan.load(plan)
    assert (old.predicted, new.predicted, new.runs) == ("roofline", "profile", ("run",))
    assert [s.nodes for s in new.virtual_workers[0].stages] == [s.nodes for s in old.virtual_workers[0].stages]
    assert all(stage.measured for stage in new.virtual_workers[0].stages)
    assert max(errors(again, run)) < 0.01 < statistics.median(errors(plan, run))

    # Left to itself, the planner cuts by these times.
    command(compile_command, *model, "--policy", "NP", "--nm", 2, *measured, "-o", tmp_path / "free")
    free = Plan.load(tmp_path / "free").virtual_workers[0]
    assert free.bottleneck_ms <= new.virtual_workers[0].bottleneck_ms
