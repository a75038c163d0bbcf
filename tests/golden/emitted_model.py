"""The model behind emitted_stage*.txt: tied weights, a frozen layer, batch norm, a region without gradients, a constant."""

import torch
from torch import nn

from hetpipe_compiler import Workload


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("table", torch.arange(6.0), persistent=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        h = self.embed(ids)
        with torch.no_grad():
            shift = torch.sin(self.frozen(h) + self.table)
        h = self.norm(h + shift) * torch.tensor(2.0)
        return self.head(torch.relu_(h) / ids.shape[0])


def workload():
    return Workload(
        model=Net,
        example=(torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
