"""Named tensors laid out in one flat buffer per dtype, so that copies, sums and messages are few and large."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Each view starts at a multiple of this many bytes, as torch's own allocations do: kernels that treat unaligned heads
#: apart would sum in another order, and results would no longer equal those of separate tensors bit for bit.
ALIGNMENT_BYTES = 64


class FlatTensors:
    """Named tensors as views of one zero-initialised flat buffer per dtype.

    Attributes:
        flats: dtype -> the whole buffer. The gaps that alignment leaves hold zeros and take part in sums harmlessly.
        views: Name -> the tensor, in the order given. Views share their flat's version counter, so an in-place write to
            either makes autograd refuse a backward that saved a view.
    """

    def __init__(self, like: Mapping[str, Tensor], device: torch.device | str) -> None:
        places: list[tuple[str, torch.dtype, int, torch.Size]] = []
        ends: dict[torch.dtype, int] = {}
        for name, tensor in like.items():
            step = max(1, ALIGNMENT_BYTES // tensor.element_size())
            start = ends.get(tensor.dtype, 0)
            places.append((name, tensor.dtype, start, tensor.shape))
            ends[tensor.dtype] = start + -(-tensor.numel() // step) * step
        self.flats: dict[torch.dtype, Tensor] = {d: torch.zeros(n, dtype=d, device=device) for d, n in ends.items()}
        self.views: dict[str, Tensor] = {
            name: self.flats[dtype][start : start + shape.numel()].view(shape) for name, dtype, start, shape in places
        }
        self._device = device

    def empty_like(self) -> FlatTensors:
        """Another one of the same layout, zeros."""
        return FlatTensors(self.views, self._device)

    def copy_(self, other: FlatTensors) -> None:
        """Take the values of ``other`` (same layout)."""
        for dtype, flat in self.flats.items():
            flat.copy_(other.flats[dtype])

    def add_(self, other: FlatTensors) -> None:
        """``self += other``."""
        for dtype, flat in self.flats.items():
            flat.add_(other.flats[dtype])

    def becomes_difference(self, after: FlatTensors) -> None:
        """``self = after - self``: turns a copy of old values into the change since."""
        for dtype, flat in self.flats.items():
            torch.sub(after.flats[dtype], flat, out=flat)
