"""The model of test_run_evaluation: what evaluation must get right, in one small net in double precision.

BatchNorm and dropout; a skip over the middle stage; a weight tied across stages; a buffer that is not saved; a batch
size that is free. Environment variables make its evaluation data go wrong.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hetpipe_compiler import Workload

WIDTH, CLASSES = 8, 5
SIZES = (6, 6, 6, 6, 6, 6, 6, 6, 4)


class Net(nn.Module):
    """Features (batch, 8) and kinds (batch,) -> class scores (batch, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm1 = nn.BatchNorm1d(WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.BatchNorm1d(WIDTH)
        self.kinds = nn.Embedding(CLASSES, WIDTH)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.register_buffer("gain", torch.linspace(0.5, 1.5, WIDTH), persistent=False)

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        first = self.drop(self.norm1(self.first(x)))
        middle = self.middle(first)
        middle = middle + self.kinds(kind)  # RAISES
        middle = self.drop(torch.relu(self.norm2(middle)))
        return self.last(middle * self.gain + first + torch.arange(WIDTH, device=x.device))


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for size in SIZES:
        x = torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
        kinds, labels = torch.randint(0, CLASSES, (2, size), generator=generator)
        yield x, kinds, labels


class Slow:
    """Thousands of batches, twenty a second."""

    def __len__(self) -> int:
        return 5000

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for _ in range(5000):
            time.sleep(0.05)
            yield next(batches(1))


def evaluation_data() -> object:
    trouble = os.environ.get("EVALUATION_TROUBLE")
    if trouble == "slow":
        return Slow()
    if trouble == "kind":
        return [(x, kinds + 1000 * (at == 2), labels) for at, (x, kinds, labels) in enumerate(batches(1))]
    return batches(1)


def workload() -> Workload:
    def data(shard: int, num_shards: int, seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        return list(batches(seed))[shard::num_shards]

    return Workload(
        model=lambda: Net().double(),
        loss=nn.CrossEntropyLoss(),
        example=lambda: next(batches(0)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        data=data,
        evaluation_data=evaluation_data,
    )
