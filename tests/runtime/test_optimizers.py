"""Optimizers and schedulers that a stage cannot use; those that an engine makes: test_stage.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetpipe_compiler.errors import RunError
from hetpipe_compiler.frontend.load import LoadedWorkload
from hetpipe_compiler.ir.workload import Workload
from hetpipe_compiler.runtime.optimizers import optimizer_and_scheduler


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
