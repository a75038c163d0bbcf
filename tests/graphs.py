"""Small modules captured as graphs, for tests of passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetpipe_compiler.frontend.capture import capture
from hetpipe_compiler.frontend.load import LoadedWorkload
from hetpipe_compiler.ir.captured import Captured
from hetpipe_compiler.ir.workload import Workload


class Body(nn.Module):
    """A linear layer, then what ``then`` does with its result, then the mean: ``then(module, h)``."""

    def __init__(self, then: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.fc2 = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("state", torch.zeros(4))
        self._then = then

    def forward(self, x: Tensor) -> Tensor:
        return self._then(self, self.fc(x)).mean()


def job(then: Callable[[Any, Tensor], Tensor], batch: int = 3) -> LoadedWorkload:
    """A workload of `Body`; the loss is its output."""
    workload = Workload(lambda: Body(then), (torch.ones(batch, 4),), lambda p: torch.optim.SGD(p, lr=0.1), targets=0)
    return LoadedWorkload(workload, Path(__file__), {})


def captured(then: Callable[[Any, Tensor], Tensor]) -> Captured:
    """The graph of `Body` before any pass."""
    return capture(job(then))


def calls(capture: Captured) -> list[str]:
    """Names of the operators called, in order, with their overloads."""
    nodes = capture.graph_module.graph.nodes
    return [str(n.target).removeprefix("aten.") for n in nodes if n.op == "call_function"]
