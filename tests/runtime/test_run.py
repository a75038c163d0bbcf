"""Whole runs with real processes: hetpipe-run on toy plans."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file
from toy import Network
from toy_run import command, environment, hetpipe_run, write_runnable

from hetpipe_compiler.errors import RunError
from hetpipe_compiler.frontend.load import load_workload
from hetpipe_compiler.ir.plan import Plan
from hetpipe_compiler.runtime.build_model import build_model, initial_values
from hetpipe_compiler.runtime.interpret import interpret
from hetpipe_compiler.runtime.job import Job
from hetpipe_compiler.runtime.launch import launch, prepare
from hetpipe_compiler.runtime.run_options import RunOptions

#: One virtual worker of two stages and one server: the smallest run that has everything.
SMALL: dict[str, Any] = {"cuts": ((2,),), "in_flight": ((2, 1),), "batches": 200}


def events(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The event log of a run."""
    lines = (run / "events.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if kind is None or e["kind"] == kind]


class Trained:
    """A run that ended well: 2 virtual workers with other cuts, BatchNorm, two epochs, a short last wave."""

    def __init__(self, folder: Path) -> None:
        self.plan_folder, self.run = folder / "plan", folder / "run"
        self.plan = write_runnable(
            self.plan_folder, Network(norm=True), cuts=((2,), (3,)), in_flight=((3, 1), (2, 1)), nm=3, batches=5
        )
        self.result = hetpipe_run(
            self.plan_folder, self.run, "--reproducible", "--epochs", "2", "--seed", "3", "--save-every", "2"
        )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"))


def test_a_reproducible_run_equals_the_interpreter_bit_for_bit(trained: Trained) -> None:
    assert trained.result.returncode == 0, trained.result.stderr
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    loaded = load_workload(trained.plan_folder / "model.py")
    reference = interpret(trained.plan, trained.plan_folder, loaded, minibatches=10, seed=3, reproducible=True)
    torch.set_num_threads(threads)
    weights = load_file(trained.run / "weights.safetensors")
    initial = load_file(trained.plan_folder / "weights.safetensors")
    assert set(weights) == set(reference.weights) == set(initial)
    for name, value in weights.items():
        assert torch.equal(value, reference.weights[name]), name
        assert not torch.equal(value, initial[name]), name
    losses: dict[int, dict[int, float]] = {0: {}, 1: {}}
    for event in events(trained.run, "minibatch"):
        losses[event["vw"]][event["minibatch"]] = event["loss"]
    assert (losses[0], losses[1]) == reference.losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nm", "staleness", "in_flight"),
    [
        (1, 0, ((1, 1, 1), (1, 1), (1, 1))),
        (4, 0, ((4, 2, 1), (4, 1), (3, 1))),
        (1, 4, ((1, 1, 1), (1, 1), (1, 1))),
        (4, 4, ((3, 2, 1), (2, 1), (4, 1))),
    ],
)
def test_three_virtual_workers_equal_the_interpreter(
    tmp_path: Path, nm: int, staleness: int, in_flight: tuple[tuple[int, ...], ...]
) -> None:
    """Tied weights cut apart, dropout, frozen parameters; emulated, so that nobody is in step."""
    network = Network(tied=True, dropout=True, frozen=True, norm=True)
    plan = write_runnable(
        tmp_path / "plan",
        network,
        cuts=((1, 3), (2,), (4,)),
        in_flight=in_flight,
        nm=nm,
        staleness=staleness,
        batches=9,
        emulate=2.0,
    )
    result = hetpipe_run(tmp_path / "plan", tmp_path / "run", "--reproducible", "--steps", "14", timeout=120)
    assert result.returncode == 0, result.stderr
    torch.set_num_threads(1)
    loaded = load_workload(tmp_path / "plan" / "model.py")
    reference = interpret(plan, tmp_path / "plan", loaded, minibatches=14, seed=plan.seed, reproducible=True)
    weights = load_file(tmp_path / "run" / "weights.safetensors")
    for name, value in weights.items():
        assert torch.equal(value, reference.weights[name]), name


def test_the_log_shows_that_no_bound_is_broken(trained: Trained) -> None:
    forwards = events(trained.run, "forward")
    assert len(forwards) == 2 * 2 * 10
    for event in forwards:
        assert event["clock"] >= event["need"], event
        assert event["own"] >= event["minibatch"] - trained.plan.nm, event
    assert any(event["need"] > 0 for event in forwards)


def test_the_run_folder_is_complete(trained: Trained) -> None:
    run = trained.run
    names = {path.name for path in run.iterdir()}
    assert names == {
        "run.json",
        "events.jsonl",
        "metrics.jsonl",
        "logs",
        "weights-wave2.safetensors",
        "weights-wave4.safetensors",
        "weights.safetensors",
        "evaluation.json",
    }
    assert {p.name for p in (run / "logs").iterdir()} == {
        "vw0-stage0.log",
        "vw0-stage1.log",
        "vw1-stage0.log",
        "vw1-stage1.log",
        "server-n0.log",
        "server-n1.log",
    }
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-2:]
    assert [(r["vw"], r["minibatches"], r["total"], r["clock"]) for r in last] == [(0, 10, 10, 4), (1, 10, 10, 4)]
    assert all(0 <= r["waiting_for_weights"] <= r["waiting"] <= 1 for r in last)
    kinds = {event["kind"] for event in events(run)}
    assert {"started", "ready", "minibatch", "push", "pull", "forward", "finished", "kept"} <= kinds
    assert "failed" not in kinds


def test_saved_waves_hold_exactly_those_waves(trained: Trained) -> None:
    """Reproducible: the weights of clock 2 equal those of a run of 2 waves; the buffers are those known then."""
    torch.set_num_threads(1)
    loaded = load_workload(trained.plan_folder / "model.py")
    reference = interpret(trained.plan, trained.plan_folder, loaded, minibatches=6, seed=3, reproducible=True)
    saved = load_file(trained.run / "weights-wave2.safetensors")
    for parameter in trained.plan.parameters:
        assert torch.equal(saved[parameter.name], reference.weights[parameter.name]), parameter.name
    with safe_open(trained.run / "weights-wave2.safetensors", "pt") as file:
        assert file.metadata()["clock"] == "2"


def test_the_users_model_is_evaluated_with_the_trained_weights(trained: Trained) -> None:
    weights = load_file(trained.run / "weights.safetensors")
    loaded = load_workload(trained.plan_folder / "model.py")
    model = loaded.workload.model()
    model.load_state_dict(weights, strict=True)
    said = json.loads((trained.run / "evaluation.json").read_text())
    assert said == {"norm": pytest.approx(sum(float(p.detach().norm()) for p in model.parameters()))}


def test_a_run_needs_its_plan_folder_only_to_start(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    gone = f"i == 5 and __import__('shutil').rmtree({str(plan)!r}, ignore_errors=True)"
    write_runnable(plan, Network(norm=True), cuts=((2,),), in_flight=((2, 1),), trouble=gone)
    result = hetpipe_run(plan, tmp_path / "run", "--epochs", "1", timeout=300)
    assert result.returncode == 0, result.stderr
    assert not plan.exists()
    assert len(load_file(tmp_path / "run" / "weights.safetensors")) > 0
    assert (tmp_path / "run" / "evaluation.json").exists()


def test_a_plan_that_is_compiled_again_while_a_run_starts_ends_it(tmp_path: Path) -> None:
    plan, other = tmp_path / "plan", tmp_path / "other"
    write_runnable(plan, **SMALL | {"batches": 4})
    write_runnable(other, **SMALL | {"batches": 4}, staleness=0)
    text = (plan / "model.py").read_text()
    swap = f"if 'HETPIPE_LAUNCHER' in os.environ: os.replace({str(other / 'plan.json')!r}, {str(plan / 'plan.json')!r})"
    (plan / "model.py").write_text(f"import os, contextlib\nwith contextlib.suppress(OSError):\n    {swap}\n{text}")
    result = hetpipe_run(plan, tmp_path / "run", "--epochs", "1", timeout=300)
    assert result.returncode == 2
    assert f"HP406: {plan}: holds another plan now than when the run began" in result.stderr
    assert "next: start the run again" in result.stderr


def test_a_free_running_run_without_saved_weights_trains_too(tmp_path: Path) -> None:
    """The launcher makes the weights; tied ones are saved under both names; an emulated cluster keeps its times."""
    plan = write_runnable(tmp_path / "plan", cuts=((3,),), in_flight=((2, 1),), batches=6, weights=False, emulate=10.0)
    first = plan.parameters[0].model_copy(update={"aliases": ("other.name",)})
    plan = plan.model_copy(update={"parameters": (first, *plan.parameters[1:])})
    (tmp_path / "plan" / "plan.json").write_text(plan.to_json())
    (tmp_path / "plan" / "weights.safetensors").unlink()
    with (tmp_path / "plan" / "model.py").open("a") as file:
        file.write("\n_workload = workload\ndef workload():\n    import dataclasses\n")
        file.write("    return dataclasses.replace(_workload(), evaluate=None)\n")
    result = hetpipe_run(tmp_path / "plan", tmp_path / "run", "--steps", "8", "--seed", str(plan.seed + 1))
    assert result.returncode == 0, result.stderr
    assert "is not the model.py that the plan was made from" in result.stderr
    assert not (tmp_path / "run" / "evaluation.json").exists()
    weights = load_file(tmp_path / "run" / "weights.safetensors")
    initial = load_file(tmp_path / "run" / "initial.safetensors")
    made = initial_values(build_model(load_workload(tmp_path / "plan" / "model.py"), plan.seed))
    assert {name: torch.equal(value, made[name]) for name, value in initial.items()} == {
        p.name: True for p in plan.parameters
    }
    assert set(weights) == set(initial) | {"other.name"}
    assert torch.equal(weights["other.name"], weights[first.name])
    minibatches = events(tmp_path / "run", "minibatch")
    assert len(minibatches) == 8
    # Stage 1 alone computes for 6 ms x 10 a minibatch.
    assert minibatches[-1]["time"] - minibatches[0]["time"] > 7 * 0.06


def failed_run(folder: Path, trouble: str, *options: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """A run in which stage 0 is in trouble before batch 4, once its first wave has arrived; with the seconds it took to
    end after that."""
    log, at = (str(folder / name) for name in ("run/events.jsonl", "at"))
    arrived = f"any('\"push\"' in e and '\"stage\": 0' in e for e in open({log!r}))"
    wait = f"while i == 3 and not {arrived}: time.sleep(0.05)"
    trouble = f"if i == 3: open({at!r}, 'w').close(); {trouble}"
    write_runnable(folder / "plan", **SMALL, trouble=f"{wait}\n            {trouble}")
    result = hetpipe_run(folder / "plan", folder / "run", "--steps", "50", *options)
    seconds = time.time() - (folder / "at").stat().st_mtime
    assert result.returncode == 2, result.stderr
    assert not (folder / "run" / "weights.safetensors").exists()
    saved = load_file(folder / "run" / "weights-interrupted.safetensors")  # the first wave was pushed
    initial = load_file(folder / "plan" / "weights.safetensors")
    assert not torch.equal(saved["fc0.weight"], initial["fc0.weight"])
    assert no_process_of(folder / "run")
    return result, seconds


def no_process_of(run: Path) -> bool:
    """Whether no process of a run is left."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(str(run) in path.read_text())
        except OSError:
            continue
    return not any(found)


def test_a_killed_worker_ends_the_run_in_seconds(tmp_path: Path) -> None:
    result, seconds = failed_run(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert seconds < 10
    assert result.stderr.count("error[") == 1
    assert "error[HP560]: vw0/stage0: the process ended by itself (signal SIGKILL), last seen at" in result.stderr
    assert "vw0-stage0.log" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_raising_worker_is_named_with_its_traceback(tmp_path: Path) -> None:
    result, seconds = failed_run(tmp_path, "raise ValueError('no such picture')")
    assert seconds < 10
    assert result.stderr.count("error[") == 1
    assert "error[HP561]: vw0/stage0: HP517: " in result.stderr
    assert re.search(r"model\.py:\d+: data\(shard=0, num_shards=1, \.\.\.\) raised ValueError: no such", result.stderr)
    assert "vw0/stage1 ended with it" in result.stderr
    assert "Connection closed" not in result.stderr
    (failure,) = [e for e in events(tmp_path / "run", "failed") if not e["consequence"]]
    assert "raise ValueError" in failure["traceback"]


def test_a_stalled_worker_is_reported_with_who_waits_for_whom(tmp_path: Path) -> None:
    result, seconds = failed_run(tmp_path, "time.sleep(600)", "--timeout", "3")
    assert 3 < seconds < 15
    assert "error[HP562]: no process has made progress for 3 s" in result.stderr
    assert "vw0/stage0: at F4 since" in result.stderr
    assert "vw0/stage1: waits for a4<0 from vw0/stage0 since" in result.stderr
    assert "server n0: at wave" in result.stderr


@pytest.fixture
def slow_run(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run that goes on for minutes, once it has pushed something."""
    write_runnable(tmp_path / "plan", Network(norm=True), **SMALL, trouble="time.sleep(0.05)")
    run = tmp_path / "run"
    process = subprocess.Popen(
        command(tmp_path / "plan", run, "--steps", "5000"), stderr=subprocess.PIPE, text=True, env=environment()
    )
    deadline = time.time() + 60
    while not (run / "events.jsonl").exists() or len(events(run, "push")) < 4:
        assert process.poll() is None
        assert time.time() < deadline
        time.sleep(0.1)
    yield process, run
    process.kill()


def test_ctrl_c_saves_the_weights(slow_run: tuple[subprocess.Popen[str], Path]) -> None:
    process, run = slow_run
    start = time.time()
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stderr
    assert time.time() - start < 10
    assert "error" not in stderr
    weights = load_file(run / "weights-interrupted.safetensors")
    initial = load_file(run.parent / "plan" / "weights.safetensors")
    assert not torch.equal(weights["fc0.weight"], initial["fc0.weight"])
    assert int(weights["bn.num_batches_tracked"]) > 0
    load_workload(run.parent / "plan" / "model.py").workload.model().load_state_dict(weights, strict=True)
    assert not (run / "weights.safetensors").exists()
    assert no_process_of(run)


def test_no_process_outlives_a_killed_launcher(slow_run: tuple[subprocess.Popen[str], Path]) -> None:
    process, run = slow_run
    process.kill()
    process.wait()
    deadline = time.time() + 10
    while not no_process_of(run):
        assert time.time() < deadline
        time.sleep(0.2)


def test_a_killed_server_ends_the_run_in_seconds(slow_run: tuple[subprocess.Popen[str], Path]) -> None:
    process, run = slow_run
    (server,) = [event["pid"] for event in events(run, "started") if event["process"] == "server n0"]
    start = time.time()
    os.kill(server, signal.SIGKILL)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 2
    assert time.time() - start < 10
    assert "error[HP560]: server n0: the process ended by itself (signal SIGKILL)" in stderr
    assert no_process_of(run)


# Refused before anything starts: in this process.


@pytest.fixture(scope="module")
def plan_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refused") / "plan"
    write_runnable(folder, **SMALL)
    return folder


def refused(options: RunOptions) -> RunError:
    """The error that keeps a run from starting."""
    with pytest.raises(RunError) as caught:
        launch(options, Console(file=open(os.devnull, "w")))  # noqa: PTH123, SIM115
    assert caught.value.hint
    return caught.value


def test_a_port_in_use_is_refused(plan_folder: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = refused(RunOptions(plan_folder, tmp_path / "run", steps=2, port=port))
        assert error.code == "HP553"
        assert str(port) in str(error)
        # The folder can be taken for the next attempt.
        assert refused(RunOptions(plan_folder, tmp_path / "run", steps=2, port=port)).code == "HP553"


def test_a_run_folder_in_use_is_refused(plan_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "weights.safetensors").touch()
    assert refused(RunOptions(plan_folder, tmp_path / "old")).code == "HP550"
    assert refused(RunOptions(plan_folder, tmp_path / "old" / "weights.safetensors")).code == "HP550"


@pytest.mark.parametrize(
    "options",
    [
        {"epochs": 1, "steps": 1},
        {"steps": 0},
        {"threads": -1},
        {"timeout_s": 0.0},
        {"interpret": True, "save_every": 1},
        {"timeout_s": float("nan")},
        {"steps": 1, "port": 70000},
        {"steps": 1, "seed": 2**63},
        {"steps": 1, "seed": -1},
    ],
)
def test_options_that_make_no_sense_are_refused(plan_folder: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    assert refused(RunOptions(plan_folder, tmp_path / "run", **options)).code == "HP551"
    assert not (tmp_path / "run").exists()


def test_a_run_folder_that_cannot_be_made_is_refused(plan_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = refused(RunOptions(plan_folder, tmp_path / "file" / "run", steps=1))
    assert error.code == "HP554"
    assert "Not a directory" in error.message


def test_no_timeout_at_all_reaches_the_processes(plan_folder: Path, tmp_path: Path) -> None:
    prepared = prepare(RunOptions(plan_folder, tmp_path / "run", steps=1, timeout_s=float("inf")), Console())
    prepared.job.save(tmp_path / "run")
    assert Job.load(tmp_path / "run").timeout_s == prepared.job.timeout_s == float("inf")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
def test_cuda_without_gpus_is_refused(plan_folder: Path, tmp_path: Path) -> None:
    error = refused(RunOptions(plan_folder, tmp_path / "run", backend="cuda"))
    assert error.code == "HP552"
    assert "needs 2 CUDA devices" in error.message


def test_the_interpreter_writes_the_same_files(plan_folder: Path, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    options = RunOptions(plan_folder, tmp_path / "run", steps=5, interpret=True)
    assert launch(options, Console(file=open(os.devnull, "w"))) == 0  # noqa: PTH123, SIM115
    torch.set_num_threads(threads)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"run.json", "events.jsonl", "metrics.jsonl", "weights.safetensors", "evaluation.json"}
    plan = Plan.load(plan_folder)
    assert set(load_file(tmp_path / "run" / "weights.safetensors")) == {p.name for p in plan.parameters}
    assert len(events(tmp_path / "run", "minibatch")) == 5
