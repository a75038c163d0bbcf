"""Predicted beside measured: from the event log of a run to a table."""

from __future__ import annotations

import json

import pytest
from handmade_plans import equal_distribution, with_cluster
from rich.console import Console

from hetpipe_compiler.cli.boundary import run_app, single_command
from hetpipe_compiler.cli.inspect import inspect
from hetpipe_compiler.codegen.compare import compare, compare_table
from hetpipe_compiler.errors import ArtifactError


def write_log(folder, plan, factor=2.0, extra=()):
    """Every stage took ``factor`` times what is predicted."""
    folder.mkdir(exist_ok=True)
    events = [{"kind": "ready"}, *extra]
    for worker in plan.virtual_workers:
        for stage in worker.stages:
            times = {
                name: {"count": 9, "median_ms": ms * factor, "low_ms": ms, "high_ms": 3 * ms}
                for name, ms in (("forward", stage.forward_ms), ("backward", stage.backward_ms))
            }
            events.append({"kind": "times", "vw": worker.index, "stage": stage.index, "times": times})
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_errors_are_relative_to_the_measured(tmp_path):
    plan = equal_distribution()
    compared = compare(plan, write_log(tmp_path, plan))
    assert [(c.vw, c.stage) for c in compared] == [
        (worker.index, stage.index) for worker in plan.virtual_workers for stage in worker.stages
    ]
    first = plan.virtual_workers[0].stages[0]
    assert compared[0].measured_ms == (2 * first.forward_ms, 2 * first.backward_ms)
    assert all(c.error == pytest.approx(-0.5) for c in compared)
    console = Console(width=120)
    with console.capture() as capture:
        console.print(*compare_table(compared))
    assert capture.get().count("-50%") == len(compared)
    assert "median error of forward + backward: 50%" in capture.get()


def test_an_emulated_run_is_scaled_back(tmp_path):
    plan = equal_distribution()
    plan = plan.model_copy(update={"cluster": plan.cluster | {"emulate": {"time_scale": 2.0}}})
    assert all(c.error == pytest.approx(0.0) for c in compare(plan, write_log(tmp_path, plan)))


def test_a_log_without_times_and_one_of_another_plan(tmp_path):
    plan = equal_distribution()
    with pytest.raises(ArtifactError) as caught:
        compare(plan, tmp_path)
    assert caught.value.code == "HP450"
    (tmp_path / "events.jsonl").write_text('{"kind": "ready"}\n')
    with pytest.raises(ArtifactError) as caught:
        compare(plan, tmp_path)
    assert caught.value.code == "HP450"
    other = [{"kind": "times", "vw": 77, "stage": 0, "times": {}}]
    with pytest.raises(ArtifactError) as caught:
        compare(plan, write_log(tmp_path, plan, extra=other))
    assert caught.value.code == "HP451"


def test_as_a_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    plan = with_cluster(equal_distribution())
    out = tmp_path / "out"
    out.mkdir()
    (out / "plan.json").write_text(plan.to_json())
    app = single_command(inspect)
    arguments = [str(out), "--compare", str(write_log(tmp_path / "run", plan)), "--vw", "0"]
    with pytest.raises(SystemExit) as caught:
        run_app(lambda: app(args=arguments, prog_name="hetpipe-inspect"))
    assert caught.value.code == 0
    assert capsys.readouterr().out.count("-50%") == len(plan.virtual_workers[0].stages)
