"""Optimizers and schedulers that a stage cannot use; those that an engine makes: test_stage.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe_compiler.errors import RunError
from hetpipe_compiler.frontend.load import LoadedWorkload
from hetpipe_compiler.ir.workload import Workload
from hetpipe_compiler.runtime.optimizers import optimizer_and_scheduler, stepping


def test_schedulers_that_look_at_the_loss_are_refused() -> None:
    workload = Workload(
        model=torch.nn.Identity,
        example=(),
        optimizer=torch.optim.SGD,
        scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau,
    )
    with pytest.raises(RunError, match="ReduceLROnPlateau"):
        optimizer_and_scheduler(
            LoadedWorkload(workload, Path("model.py"), {}), {"w": torch.nn.Parameter(torch.zeros(1))}
        )


@pytest.mark.parametrize("end", [lambda: sys.exit(0), lambda: [][1]])
def test_a_step_that_fails_names_the_users_line(end: Any) -> None:
    workload = Workload(model=torch.nn.Identity, example=(), optimizer=torch.optim.SGD)
    with (
        pytest.raises(RunError, match=r"optimizer.step\(\) raised (SystemExit: 0|IndexError: list)") as caught,
        stepping(LoadedWorkload(workload, Path(__file__), {}), "optimizer"),
    ):
        end()
    assert caught.value.code == "HP518"
    assert str(caught.value.where).startswith(f"{__file__}:")
