"""hetpipe-run --evaluate: equal to the model itself, and refused or ended with words. What it checks first: golden."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import threading
import time
from pathlib import Path

import evaluated_model
import pytest
import torch
from kinds import cluster_of
from rich.console import Console
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from hetpipe_compiler.compiler import CompileOptions, compile
from hetpipe_compiler.errors import RunError
from hetpipe_compiler.frontend.load import LoadedWorkload, load_workload
from hetpipe_compiler.ir.plan import Plan
from hetpipe_compiler.runtime import checkpoint
from hetpipe_compiler.runtime.forward_only import ForwardOnly
from hetpipe_compiler.runtime.interpret import interpret
from hetpipe_compiler.runtime.launch import launch
from hetpipe_compiler.runtime.run_options import RunOptions

MODEL = Path(evaluated_model.__file__)


class Trained:
    """A plan of three stages, and weights as a run writes them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.weights = folder / "plan", folder / "weights.safetensors"
        options = CompileOptions(policy="NP", nm=2, splits=(("middle", "last"),))
        self.plan: Plan = compile(MODEL, cluster_of(1), self.folder, options=options).plan
        self.loaded: LoadedWorkload = load_workload(self.folder / "model.py")
        trained = interpret(self.plan, self.folder, self.loaded, minibatches=9, seed=1, reproducible=True)
        checkpoint.save(self.weights, checkpoint.state_dict(self.plan, trained.weights))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"))


def evaluate(trained: Trained, run: Path) -> tuple[int, str]:
    """Exit status and what was printed."""
    out = io.StringIO()
    status = launch(RunOptions(trained.folder, run, evaluate=trained.weights), Console(file=out, width=200))
    return status, out.getvalue()


def losses_of(run: Path) -> list[float]:
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    found = {event["minibatch"]: event["loss"] for event in events if event["kind"] == "loss"}
    return [found[p] for p in range(1, len(found) + 1)]


def test_the_loss_is_that_of_the_model_in_eval_mode(trained: Trained, tmp_path: Path) -> None:
    stages = trained.plan.virtual_workers[0].stages
    assert len(stages) == 3
    assert set(stages[0].sends) == {1, 2}, "the skip goes straight to its stage"
    assert any(not buffer.persistent for buffer in trained.plan.buffers)
    status, printed = evaluate(trained, tmp_path / "run")
    assert status == 0, printed
    saved = load_file(trained.weights)
    model = trained.loaded.workload.model()
    model.load_state_dict(saved, strict=True)
    model.eval()
    chained = ForwardOnly(trained.folder, weights=saved)
    with torch.no_grad():
        eager = [float(cross_entropy(model(x, kinds), labels)) for x, kinds, labels in evaluated_model.batches(1)]
    one_process = [float(chained.loss(batch)) for batch in evaluated_model.batches(1)]
    found = losses_of(tmp_path / "run")
    assert found == one_process
    assert found == pytest.approx(eager, rel=1e-12, abs=0)
    sizes = evaluated_model.SIZES
    mean = math.fsum(loss * size for loss, size in zip(found, sizes, strict=True)) / sum(sizes)
    result = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert (result["loss"], result["samples"], result["minibatches"]) == (mean, 52, 9)
    assert result["weights"] == str(trained.weights)
    assert result["samples_per_s"] > 0
    last = printed.splitlines()[-1]
    assert re.fullmatch(rf"loss {mean:.6g} over 52 samples in 9 minibatches, [\d.]+ samples/s", last), printed
    # Trained weights and statistics, not the plan folder's first ones.
    assert one_process != [float(ForwardOnly(trained.folder).loss(batch)) for batch in evaluated_model.batches(1)]


def test_what_a_stage_raises_is_told_with_the_models_line(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVALUATION_TROUBLE", "kind")
    with pytest.raises(RunError) as caught:
        evaluate(trained, tmp_path / "run")
    line = next(at for at, text in enumerate(MODEL.read_text().splitlines(), 1) if text.endswith("# RAISES"))
    assert caught.value.code == "HP561"
    assert caught.value.where == "vw0/stage1"
    assert f"HP519: {MODEL.name}:{line} (kinds): stage 1 raised" in caught.value.message
    assert "IndexError: index out of range" in caught.value.message
    assert not (tmp_path / "run" / "evaluation.json").exists()


def test_ctrl_c_ends_every_process_and_leaves_nothing(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVALUATION_TROUBLE", "slow")
    log = tmp_path / "run" / "events.jsonl"
    pids = []

    def interrupt() -> None:
        deadline = time.monotonic() + 300
        while not (log.exists() and '"loss"' in log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        events = map(json.loads, log.read_text().splitlines())
        pids.extend(event["pid"] for event in events if event["kind"] == "started")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        evaluate(trained, tmp_path / "run")
    thread.join()
    assert len(pids) == 3
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not list(tmp_path.iterdir())
