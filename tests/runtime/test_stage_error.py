"""What a stage module raises is told with the user's line, and the emitted one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kinds import MODELS, cluster_of

from hetpipe_compiler.compiler import CompileOptions, compile
from hetpipe_compiler.errors import RunError
from hetpipe_compiler.frontend.load import load_workload
from hetpipe_compiler.runtime.forward_only import ForwardOnly
from hetpipe_compiler.runtime.stage_error import calling_stage


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


def test_what_happens_outside_the_stage_passes(tmp_path: Path) -> None:
    options = CompileOptions(policy="NP", nm=1, splits=((),))
    plan = compile(MODELS, cluster_of(1), tmp_path / "out", settings={"name": "Identity"}, options=options).plan
    with pytest.raises(ZeroDivisionError), calling_stage(tmp_path / "out", plan.virtual_workers[0].stages[0]):
        torch.zeros(1 // 0)
