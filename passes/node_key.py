"""What makes two calls cost the same: operator, shapes, dtypes, layouts and constants, as one line of text.

Repeated layers share a key, so that a profile measures them once. The text is stable: it is what profile files are
keyed with. Such as ``aten.relu.default(float32[8, 64, 56, 56] grad)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hetpipe_compiler.frontend.regions import Context


def node_key(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], contexts: tuple[Context, ...]) -> str:
    """The key of a call with these arguments; only the metadata of tensors is looked at."""
    given = [_text(arg) for arg in args] + [f"{name}={_text(value)}" for name, value in kwargs.items()]
    name = str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))
    inside = "".join(f" in {' '.join(str(part) for part in context)}" for context in contexts)
    return f"{name}({', '.join(given)}){inside}"


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, torch.device):
        return "device"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return repr(value) if isinstance(value, float) else str(value)


def _tensor(tensor: torch.Tensor) -> str:
    text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if not tensor.is_contiguous():
        text += f" strides {list(tensor.stride())}"
    return f"{text} grad" if tensor.requires_grad else text
