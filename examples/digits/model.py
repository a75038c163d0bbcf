"""A small CNN on scikit-learn's 8x8 digits: 1797 real images, ten classes, nothing to download.

BatchNorm is there on purpose: its statistics are buffers that training changes, each virtual worker has its own, and
hetpipe-run merges them for evaluation.
"""

from __future__ import annotations

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from hetpipe_compiler import Workload

TRAIN_IMAGES = 1437
#: The split must be the same in every process and every run.
SPLIT_SEED = 0


def conv_block(inputs: int, outputs: int) -> nn.Sequential:
    """3x3 convolution, BatchNorm, ReLU; keeps height and width."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class DigitsNet(nn.Module):
    """Images (batch, 1, 8, 8) -> class scores (batch, 10)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = conv_block(1, width)
        self.body = nn.Sequential(conv_block(width, width), nn.MaxPool2d(2), conv_block(width, 2 * width))
        self.tail = nn.Sequential(conv_block(2 * width, 2 * width), nn.MaxPool2d(2), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(8 * width, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.tail(self.body(self.stem(images))))


@cache
def load_split() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """``((train images, train labels), (test images, test labels))``, pixels scaled to -1 ... 1."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8.0 - 1.0
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    train, test = order[:TRAIN_IMAGES], order[TRAIN_IMAGES:]
    return (images[train], labels[train]), (images[test], labels[test])


def evaluate(model: nn.Module) -> dict[str, float]:
    """Share of the 360 held-out images that the model names right."""
    _, (images, labels) = load_split()
    device = next(model.parameters()).device
    with torch.no_grad():
        predicted = model(images.to(device)).argmax(dim=1).cpu()
    return {"test_accuracy": (predicted == labels).float().mean().item()}


def workload(batch_size: int = 32, width: int = 32, lr: float = 0.001) -> Workload:
    """``--set`` names: batch_size; width, the channels of the first convolution; lr, the learning rate."""

    def data(shard: int, num_shards: int, seed: int) -> list[tuple[Tensor, Tensor]]:
        (images, labels), _ = load_split()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        # Every num_shards-th image of one common shuffle: shards never overlap. The last batch may be smaller.
        return [(images[picked], labels[picked]) for picked in order[shard::num_shards].split(batch_size)]

    def evaluation_data() -> list[tuple[Tensor, Tensor]]:
        _, (images, labels) = load_split()
        return list(zip(images.split(batch_size), labels.split(batch_size), strict=True))

    return Workload(
        model=lambda: DigitsNet(width),
        loss=nn.CrossEntropyLoss(),
        example=lambda: (torch.zeros(batch_size, 1, 8, 8), torch.zeros(batch_size, dtype=torch.int64)),
        targets=1,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        data=data,
        evaluate=evaluate,
        evaluation_data=evaluation_data,
    )
