"""A model of a few operators, two of them alike."""

from __future__ import annotations

import torch
from torch import nn

from hetpipe_compiler import Workload


class Net(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 16)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, ids):
        x = self.embed(ids)
        return self.b(torch.relu(self.a(x))).mean(1)


def workload(batch_size: int = 4, rows: int = 100) -> Workload:
    return Workload(
        model=lambda: Net(rows),
        loss=nn.functional.cross_entropy,
        example=lambda: (torch.zeros(batch_size, 6, dtype=torch.int64), torch.zeros(batch_size, dtype=torch.int64)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
