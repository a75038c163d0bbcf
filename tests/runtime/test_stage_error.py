"""What a stage module raises is told with the user's line, and the emitted one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import MODELS, cluster_of

from hetpipe_compiler.compiler import CompileOptions, compile
from hetpipe_compiler.errors import RunError
from hetpipe_compiler.frontend.load import load_workload
from hetpipe_compiler.runtime.forward_only import ForwardOnly
from hetpipe_compiler.runtime.interpret import interpret
from hetpipe_compiler.runtime.stage_error import backward_error, calling_stage


def test_the_line_of_the_model(tmp_path: Path) -> None:
    options = CompileOptions(policy="NP", nm=1, splits=(("c",),))
    plan = compile(MODELS, cluster_of(1), tmp_path / "out", settings={"name": "SkipOver"}, options=options).plan
    ids, targets = load_workload(MODELS, {"name": "SkipOver"}).workload.example_batch()
    with pytest.raises(RunError) as caught:
        ForwardOnly(tmp_path / "out", plan).loss([ids + 1000, targets])
    error = caught.value
    assert error.code == "HP519"
    assert error.message == "stage 0 raised IndexError: index out of range in self"
    line = next(at for at, text in enumerate(MODELS.read_text().splitlines(), 1) if "e = self.embed(ids)" in text)
    assert error.where == f"models.py:{line} (embed)"
    assert "embedding = aten.embedding.default(self.embed.weight, input_0)" in str(error.hint)
    emitted = str(error.hint).rpartition(":")[2].rstrip(")")
    stage = tmp_path / "out" / str(plan.virtual_workers[0].stages[0].module)
    assert "aten.embedding.default" in stage.read_text().splitlines()[int(emitted) - 1]
    assert isinstance(error.__cause__, IndexError)
    with pytest.raises(RunError, match="Target 1001 is out of bounds") as caught:
        ForwardOnly(tmp_path / "out", plan).loss([ids, torch.full_like(targets, 1001)])
    line = next(at for at, text in enumerate(MODELS.read_text().splitlines(), 1) if "logits.flatten(0, 1)" in text)
    assert caught.value.where == f"models.py:{line}", "the loss is a plain function"


MODEL = """
import torch
from torch import nn
from hetpipe_compiler import Workload


class Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        if (ctx.saved_tensors[0] > 100).any():
            raise ValueError("too large")  # RAISES
        return gradient * 2


class Part(nn.Module):
    def __init__(self, refuses):
        super().__init__()
        self.refuses = refuses

    def forward(self, x):
        h = torch.sin(x)
        if not self.refuses:
            return h
        return h + Refuses.apply(x)  # CALLS


class Net(nn.Module):
    def __init__(self, writes, refuses):
        super().__init__()
        self.a, self.part, self.b, self.writes = nn.Linear(4, 4), Part(refuses), nn.Linear(4, 1), writes
        self.register_buffer("gain", torch.ones(4))

    def forward(self, x):
        h = self.part(self.a(x)) * self.gain  # SAVES
        if self.writes:
            self.gain.add_(1)
        return self.b(h).mean()


def workload(scale=1.0, writes=False, refuses=True):
    return Workload(
        model=lambda: Net(writes, refuses),
        example=(torch.ones(3, 4),),
        targets=0,
        data=lambda *_: [(torch.full((3, 4), scale),)],
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
"""


def _trained(folder: Path, settings: dict[str, Any], recompute: bool = False) -> tuple[RunError, Callable[[str], str]]:
    """What training raises, and the place of the model's line with a mark."""
    model = folder / "model.py"
    model.write_text(MODEL)
    options = CompileOptions(
        policy="NP",
        nm=2,
        splits=(("b",),),
        opaque=("part",) if settings.get("refuses", True) else (),
        recompute="always" if recompute else "never",
    )
    plan = compile(model, cluster_of(1), folder / "out", settings=settings, options=options).plan
    assert plan.virtual_workers[0].stages[0].recompute == recompute
    loaded = load_workload(model, settings)
    with pytest.raises(RunError) as caught:
        interpret(plan, folder / "out", loaded, minibatches=1, seed=0, reproducible=True)
    lines = MODEL.splitlines()
    return caught.value, lambda mark: f"model.py:{next(at for at, t in enumerate(lines, 1) if t.endswith('# ' + mark))}"


def test_a_backward_of_ones_own_is_told_with_both_its_lines(tmp_path: Path) -> None:
    error, line = _trained(tmp_path, {"scale": 1e4})
    assert error.code == "HP521"
    told = "the backward of stage 0, minibatch 1, raised ValueError: too large"
    assert error.message == f"{told} at {line('RAISES')}"
    assert error.where == f"{line('CALLS')} (part)"
    assert "it was the backward of `part = part_module(self, {}, linear)` (stages/" in str(error.hint)
    assert isinstance(error.__cause__, ValueError)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_backward_that_misses_what_was_written_over(tmp_path: Path, recompute: bool) -> None:
    error, line = _trained(tmp_path, {"writes": True, "refuses": not recompute}, recompute)
    assert error.code == "HP521"
    assert "modified by an inplace operation" in error.message
    assert error.where == line("SAVES")
    assert "aten.mul.Tensor(" in str(error.hint)


def test_a_backward_that_fails_once_has_no_line(tmp_path: Path) -> None:
    options = CompileOptions(policy="NP", nm=1, splits=((),))
    plan = compile(MODELS, cluster_of(1), tmp_path / "out", settings={"name": "Identity"}, options=options).plan
    stage = plan.virtual_workers[0].stages[0]
    for raised in (ValueError("once"), torch.OutOfMemoryError("full")):
        error = backward_error(raised, tmp_path / "out", stage, 7, lambda: None)
        assert error.message == f"the backward of stage 0, minibatch 7, raised {type(raised).__name__}: {raised}"
        assert error.where == "stage 0"


def test_what_happens_outside_the_stage_passes(tmp_path: Path) -> None:
    options = CompileOptions(policy="NP", nm=1, splits=((),))
    plan = compile(MODELS, cluster_of(1), tmp_path / "out", settings={"name": "Identity"}, options=options).plan
    with pytest.raises(ZeroDivisionError), calling_stage(tmp_path / "out", plan.virtual_workers[0].stages[0]):
        torch.zeros(1 // 0)
