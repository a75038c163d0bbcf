"""What ``hetpipe-profile --calibrate`` measures unless it is given a model: a few sizes of each operator class."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from hetpipe_compiler.ir.workload import Workload

_WIDTHS = (256, 768, 2048)
_CHANNELS = ((16, 112), (64, 56), (256, 14))
#: As of language models: a CPU takes the gradient of such a table from the system anew each time, page by page.
_VOCABULARY = 50_000


class Calibration(nn.Module):
    """Layers side by side; their means add up to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.ModuleList(nn.Embedding(_VOCABULARY, width) for width in _WIDTHS)
        self.linear = nn.ModuleList(nn.Linear(width, width) for width in _WIDTHS)
        self.wide = nn.ModuleList(nn.Linear(width, 4 * width) for width in _WIDTHS)
        self.norm = nn.ModuleList(nn.LayerNorm(width) for width in _WIDTHS)
        self.stem = nn.ModuleList(nn.Conv2d(3, channels, 3, padding=1) for channels, _ in _CHANNELS)
        self.conv = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for channels, _ in _CHANNELS)
        self.point = nn.ModuleList(nn.Conv2d(channels, 2 * channels, 1) for channels, _ in _CHANNELS)
        self.batch_norm = nn.ModuleList(nn.BatchNorm2d(channels) for channels, _ in _CHANNELS)

    def forward(self, ids: Tensor, images: Tensor) -> Tensor:
        """A scalar."""
        parts = [self._text(at, ids) for at in range(len(_WIDTHS))]
        parts += [self._picture(at, images, size) for at, (_, size) in enumerate(_CHANNELS)]
        return torch.stack(parts).sum()

    def _text(self, at: int, ids: Tensor) -> Tensor:
        x = self.linear[at](self.embedding[at](ids))
        heads = x.unflatten(-1, (-1, 64)).transpose(1, 2)
        x = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
        x = functional.gelu(self.wide[at](self.norm[at](x)))
        loss: Tensor = (torch.tanh(x) * 0.5 + x).mean()
        return loss

    def _picture(self, at: int, images: Tensor, size: int) -> Tensor:
        x = torch.relu(self.batch_norm[at](self.conv[at](self.stem[at](images[:, :, :size, :size]))))
        loss: Tensor = self.point[at](x + 1.0).mean()
        return loss


def workload(batch_size: int = 4, seq_len: int = 128) -> Workload:
    """``--set`` names: batch_size, seq_len."""
    return Workload(
        model=Calibration,
        example=lambda: (
            torch.randint(0, _VOCABULARY, (batch_size, seq_len)),
            torch.randn(batch_size, 3, 112, 112),
        ),
        targets=0,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
