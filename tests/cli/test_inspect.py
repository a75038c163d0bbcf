"""hetpipe-inspect: what it prints, what it writes, and its one error a mistake."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from handmade_plans import node_partition, with_cluster

from hetpipe_compiler.cli.boundary import run_app, single_command
from hetpipe_compiler.cli.inspect import inspect
from hetpipe_compiler.codegen.memory_tables import memory_text
from hetpipe_compiler.codegen.tables import plan_text
from hetpipe_compiler.ir.plan import Plan
from hetpipe_compiler.ir.schedule import Schedule
from hetpipe_compiler.passes.schedules.wsp import wsp_program


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan folder without stage modules."""
    monkeypatch.setenv("COLUMNS", "120")
    plan = with_cluster(node_partition())
    out = tmp_path / "out"
    out.mkdir()
    (out / "plan.json").write_text(plan.to_json())
    programs = [wsp_program([s.in_flight for s in w.stages], plan.nm, 0) for w in plan.virtual_workers]
    (out / "schedule.csv").write_text(Schedule(plan.nm, 0, tuple(programs)).to_csv())
    return out


def run(*arguments: object) -> int:
    """Exit status of the command, in this process."""
    app = single_command(inspect)
    with pytest.raises(SystemExit) as caught:
        run_app(lambda: app(args=[str(a) for a in arguments], prog_name="hetpipe-inspect"))
    code = caught.value.code
    assert isinstance(code, int)
    return code


def test_tables_are_what_it_prints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder) == 0
    plan = Plan.load(folder)
    printed = "".join(line.rstrip() + "\n" for line in capsys.readouterr().out.splitlines())
    assert printed == plan_text(plan, width=120)
    assert run(folder, "--memory") == 0
    printed = "".join(line.rstrip() + "\n" for line in capsys.readouterr().out.splitlines())
    assert printed == plan_text(plan, width=120) + memory_text(plan, width=120)


def test_json_is_the_plan_and_nothing_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--json", "--dot", folder / "p.dot") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads((folder / "plan.json").read_text())
    assert f"wrote {folder / 'p.dot'}" in printed.err


def test_dot_and_timeline_are_written_and_the_tables_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--dot", folder / "p.dot", "--timeline", folder / "t.json", "--vw", 1, "--waves", 2) == 0
    assert capsys.readouterr().out == ""
    assert "cluster_vw1" in (folder / "p.dot").read_text()
    trace = json.loads((folder / "t.json").read_text())
    assert trace["otherData"]["minibatches"] == 8


def test_a_picture_without_graphviz_leaves_the_dot(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    assert run(folder, "--svg", folder / "p.svg") == 2
    assert "error[HP442]" in capsys.readouterr().err
    assert (folder / "p.dot").is_file()


def test_no_file_is_written_where_another_cannot_be(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--dot", folder / "first.dot", "--timeline", folder / "none" / "t.json") == 2
    assert "error[HP411]" in capsys.readouterr().err
    assert not (folder / "first.dot").exists()


def test_onnx_of_a_profiled_plan_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--onnx", folder / "m.onnx") == 2
    assert "error[HP445]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["{folder}/none"], "HP401"),
        (["{folder}", "--vw", "9"], "HP441"),
        (["{folder}", "--dot", "{folder}/none/p.dot"], "HP411"),
        (["{folder}", "--timeline", "{folder}"], "HP411"),
        (["{folder}", "--svg", "{folder}/p.dot"], "HP444"),
        (["{folder}", "--svg", ""], "HP411"),
        (["{folder}", "--png", "{folder}"], "HP411"),
    ],
)
def test_mistakes_of_the_user(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: str
) -> None:
    assert run(*(a.format(folder=folder) for a in arguments)) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error[{code}]")
    assert printed.out == ""


@pytest.mark.parametrize(
    "options",
    [["--ops"], ["--waves", "5"], ["--waves", "1001", "--timeline", "t.json"], ["--json", "--memory"], ["--wat"]],
)
def test_options_that_would_do_nothing_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    assert run(folder, *options) == 2
    assert options[0] in capsys.readouterr().err


def test_help_is_quick_and_imports_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['hetpipe-inspect', '--help']\n"
        "from hetpipe_compiler.cli.inspect import main\n"
        "try: main()\n"
        "finally: sys.stderr.write(','.join(m for m in ('torch', 'numba', 'onnx', 'numpy') if m in sys.modules))"
    )
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}, check=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # Processor time: that does not depend on what else the machine does.
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert "--timeline" in done.stdout
    assert done.stderr == ""
    assert min(seconds) < 0.5
