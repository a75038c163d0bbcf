"""The model behind explained.txt: something to say under every heading."""

import torch
from torch import nn
from torch.nn import functional as F

from hetpipe_compiler import Workload


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("table", torch.arange(6.0), persistent=False)
        self.register_buffer("seen", torch.zeros(6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        h = self.embed(ids)
        with torch.no_grad():
            shift = torch.sin(self.frozen(h) + self.table)
            self.seen.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)
        h = self.lstm(h + shift)[0][:, -1] * torch.tensor(2.0) + self.seen
        with torch.autocast(h.device.type, torch.bfloat16):
            h = h @ self.frozen.weight
        h = self.norm(h.float()).clone()
        first = h[0]
        h += 1
        h = F.dropout(h, 0.1, self.training) * first
        return self.head(h if self.training else h.tanh())


def workload():
    return Workload(
        model=Net,
        example=(torch.zeros(4, 5, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
