"""torchvision's ResNet-152 with ImageNet shapes, as in the HetPipe paper, on made images: nothing to download.

Replace `data` by your own loader to train on real images.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torchvision.models import resnet152

from hetpipe_compiler import Workload


def workload(
    batch_size: int = 32, image_size: int = 224, num_classes: int = 1000, lr: float = 0.01, images: int = 1024
) -> Workload:
    """``--set`` names: batch_size; image_size, in pixels; num_classes; lr; images, how many in an epoch."""

    def image(index: int) -> Tensor:
        return torch.randn(3, image_size, image_size, generator=torch.Generator().manual_seed(index))

    def data(shard: int, num_shards: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(images, generator=torch.Generator().manual_seed(seed))
        for picked in order[shard::num_shards].split(batch_size):
            yield torch.stack([image(index) for index in picked.tolist()]), picked % num_classes

    return Workload(
        model=lambda: resnet152(weights=None, num_classes=num_classes),
        loss=nn.CrossEntropyLoss(),
        example=lambda: (
            torch.zeros(batch_size, 3, image_size, image_size),
            torch.zeros(batch_size, dtype=torch.int64),
        ),
        targets=1,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-4),
        data=data,
    )
