"""Stages run forward only give the eval loss of the model itself."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
import torch
from kinds import cluster_of, compile_kind, load_stage
from torch.utils import _pytree as pytree

from hetpipe_compiler.compiler import CompileOptions, compile
from hetpipe_compiler.errors import RunError
from hetpipe_compiler.frontend.capture import build_real
from hetpipe_compiler.frontend.load import LoadedWorkload, load_workload
from hetpipe_compiler.frontend.training_step import TrainingStep
from hetpipe_compiler.runtime.forward_only import ForwardOnly, evaluate

EXAMPLES = Path(__file__).parents[2] / "examples"


def eager_loss(loaded: LoadedWorkload) -> torch.Tensor:
    """Of the model in eval mode, with the plan's initial weights."""
    batch = loaded.workload.example_batch()
    step = TrainingStep(loaded.workload, build_real(loaded, 0), batch).eval()
    torch.manual_seed(11)
    with torch.no_grad():
        found: torch.Tensor = step(*(x.clone() for x in pytree.tree_leaves(batch) if isinstance(x, torch.Tensor)))
    return found


def staged_loss(folder: Path, loaded: LoadedWorkload, worker: int) -> torch.Tensor:
    stages = ForwardOnly(folder, worker=worker)
    torch.manual_seed(11)
    return stages.loss(pytree.tree_leaves(loaded.workload.example_batch()))


@pytest.mark.parametrize("name", sorted(models.KINDS))
def test_kinds_evaluate_as_the_model_does(name: str, tmp_path: Path) -> None:
    folder, loaded, plan = compile_kind(name, tmp_path / "out", most=2)
    assert plan.evaluation, plan.evaluation_note
    expected = eager_loss(loaded)
    for worker in plan.virtual_workers:
        found = staged_loss(folder, loaded, worker.index)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
