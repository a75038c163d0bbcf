"""A model whose layers all differ in size; what the first makes is read twice, so that gradients are added up."""

from __future__ import annotations

import torch
from torch import nn

from hetpipe_compiler import Workload


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((16, 24), (24, 24), (24, 40), (40, 10)))

    def forward(self, x):
        a, b, c, d = self.layers
        y = a(x).relu()
        return d(c(y + b(y).tanh()).relu())


def workload() -> Workload:
    return Workload(
        model=Net,
        loss=nn.functional.cross_entropy,
        example=lambda: (torch.zeros(8, 16), torch.zeros(8, dtype=torch.int64)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
