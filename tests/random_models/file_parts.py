"""What every random model's file has: classes of submodules before it, the workload after it."""

#: What models are made of.
HEADER = '''
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hetpipe_compiler import Workload


class Average(nn.Module):
    """Takes away a moving average, which only training moves."""

    def __init__(self, size, persistent):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size), persistent=persistent)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.reshape(-1, x.shape[-1]).mean(0), alpha=0.1)
                self.calls += 1
        return x - self.mean


class Gate(nn.Module):
    """Takes an optional mask."""

    def __init__(self, size):
        super().__init__()
        self.fc = nn.Linear(size, size)

    def forward(self, x, mask=None):
        gate = torch.sigmoid(self.fc(x))
        if mask is not None:
            gate = gate.masked_fill(mask, 0.0)
        return x * gate


class Outputs(nn.Module):
    """Returns a dict with a tuple and None in it."""

    def __init__(self, size):
        super().__init__()
        self.one, self.two, self.unused = nn.Linear(size, size), nn.Linear(size, size), nn.Linear(2, 2)

    def forward(self, x, *, scale=None, rest=()):
        pair = (self.one(x), self.two(x) if scale is None else self.two(x) * scale)
        return {"pair": pair, "none": None, "rest": [*rest]}


class Counting(nn.Module):
    """Computes with how often it was called."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("calls", torch.tensor(1))
        self.register_buffer("seen", torch.zeros(size, dtype=torch.bool))

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.seen = self.seen | (x.detach() > 0.5).reshape(-1, x.shape[-1]).any(0)
        calls = self.calls.to(x.dtype)
        return torch.where(self.seen, x / calls, x * calls.sqrt())


class Teacher(nn.BatchNorm1d):
    """Always in eval mode, without gradients."""

    def train(self, mode=True):
        return super().train(False)

    @torch.no_grad()
    def forward(self, x):
        return super().forward(x.reshape(-1, x.shape[-1])).reshape(x.shape)


class Memory(nn.Module):
    """Mixes in what it was called with before."""

    def __init__(self, size):
        super().__init__()
        self.fc = nn.Linear(size, size)
        self.register_buffer("last", torch.ones(size), persistent=False)
        self.register_buffer("before", torch.zeros(size))

    def forward(self, x):
        mixed = self.fc(x) * self.last + self.before
        self.before = self.last
        self.last = mixed.detach().reshape(-1, x.shape[-1]).mean(0)
        return mixed


class Table(nn.Module):
    """Looks rows up in a buffer that is also a view of a larger one."""

    def __init__(self, size):
        super().__init__()
        rows = torch.arange(3 * size).view(3, size) / size
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("first", rows[0])

    def forward(self, x):
        at = (x.detach() > 0).sum(-1) % 3
        return x * self.rows[at] - self.first


def unrolled(cell, x):
    state, states = torch.zeros_like(x[:, 0]), []
    for step in x.unbind(1):
        state = cell(step, state)
        states.append(state)
    return states


class Net(nn.Module):
    def __init__(self):
        super().__init__()
'''

#: The workload of a model that takes ``x`` and ``ids``; the loss is the workload's.
TUPLE = """

def workload():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn({batch}, {width}, generator=generator)
    ids = torch.randint(0, {vocabulary}, ({batch}, {length}), generator=generator)
    y = torch.randint(0, {classes}, ({batch},), generator=generator)
    return Workload(Net, (x, ids, y), lambda p: torch.optim.SGD(p, lr=0.1), nn.CrossEntropyLoss())
"""

#: The workload of a model that takes a nested batch, and returns its own loss.
DICT = """

def workload():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn({batch}, {width}, generator=generator)
    ids = torch.randint(0, {vocabulary}, ({batch}, {length}), generator=generator)
    y = torch.randint(0, {classes}, ({batch},), generator=generator)
    batch = {{"features": {{"x": x, "none": None}}, "ids": [ids, 0.5], "labels": y, "flag": True}}
    return Workload(Net, batch, lambda p: torch.optim.SGD(p, lr=0.1))
"""
