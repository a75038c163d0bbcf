"""Tensors as bytes and back, for every transport: any dtype, any shape, never pickle.

bool and bfloat16 have no NumPy or Gloo form of their own, so everything travels as bytes with the dtype's name beside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

#: ``(name, dtype, shape)`` of a tensor.
TensorSpec = tuple[str, str, tuple[int, ...]]


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """``bfloat16`` -> ``torch.bfloat16``; raises `ValueError` for anything that is no dtype's name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"'{name}' is no dtype")
    return dtype


def as_bytes(tensor: Tensor) -> Tensor:
    """The values as one flat uint8 tensor on the same device; shares memory with ``tensor`` if that is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def to_frame(tensor: Tensor) -> memoryview:
    """The values as a buffer in host memory; shares memory with ``tensor`` if that is contiguous and on the CPU."""
    return as_bytes(tensor).cpu().numpy().data


def from_frame(buffer: Any, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of its own with the values in ``buffer`` (any object with the buffer protocol)."""
    out = torch.empty(shape, dtype=dtype_of(dtype))
    if out.numel():
        out.view(-1).view(torch.uint8).numpy().data[:] = memoryview(buffer).cast("B")
    return out


def pack(tensors: Mapping[str, Tensor]) -> tuple[list[TensorSpec], list[memoryview]]:
    """Split named tensors into what describes them and their raw values, in their order."""
    specs = [(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()]
    return specs, [to_frame(t) for t in tensors.values()]


def unpack(specs: list[TensorSpec], buffers: list[Any]) -> dict[str, Tensor]:
    """The inverse of `pack`; the tensors share nothing with ``buffers``. Raises `ValueError` if they do not match."""
    if len(specs) != len(buffers):
        raise ValueError(f"{len(specs)} tensors announced, {len(buffers)} came")
    return {
        name: from_frame(buffer, dtype, tuple(shape))
        for (name, dtype, shape), buffer in zip(specs, buffers, strict=True)
    }
