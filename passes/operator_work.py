"""The work of each ATen operator that runs: its FLOPs, the bytes that it moves, and its class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from hetpipe_compiler.ir.costs import Work
from hetpipe_compiler.passes.live_bytes import LiveBytes, tensors_in

#: Operators that make a tensor and move nothing: they rename, or allocate lazily.
_FREE = frozenset({"aten::detach", "aten::alias", "aten::lift_fresh", "aten::empty", "aten::_unsafe_view"})
#: torch's formulas of attention for the kernels that it has none for, and of how many operands they take the shapes.
_ATTENTION: dict[str, tuple[Callable[..., int], int]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (sdpa_flop_count, 3),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (sdpa_backward_flop_count, 4),
}
#: Operators that pick from a table.
_GATHERS = frozenset({"aten::embedding", "aten::index", "aten::index_select", "aten::gather"})
#: Parts of operator names, in the order in which they are looked for.
_CLASSES = (
    ("attention", ("attention",)),
    ("convolution", ("conv",)),
    ("normalisation", ("norm", "softmax")),
    ("embedding", ("embedding", "index", "gather", "scatter")),
    ("matrix", ("mm", "matmul", "linear", "einsum", "dot", "addmv", "::mv")),
)
#: Operators with functions that take many instructions an element. (Backwards of tanh and sigmoid only multiply.)
_TRANSCENDENTAL = frozenset(
    {
        "gelu", "gelu_backward", "silu", "silu_backward", "mish", "mish_backward", "softplus", "elu", "tanh", "sigmoid",
        "exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "erf", "erfc", "sin", "cos", "tan", "pow",
    }
)  # fmt: skip


class WorkMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the work of each operator that reaches a kernel, and the storages that operators make.

    Attributes:
        live: The storages.
        casts: Storage of a cast -> storage that was cast, and to what.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: list[Work] = []
        self.live = LiveBytes()
        self.casts: dict[int, tuple[int, torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not func.is_view and func._schema.name not in _FREE and not _only_looks(func, out):
            self.work.append(work_of(func, args, kwargs, out))
        if func is torch.ops.aten._to_copy.default:
            self.casts[out.untyped_storage()._cdata] = (args[0].untyped_storage()._cdata, out.dtype)
        if not func.is_view:
            self.live.note(tensors_in(out), tensors_in((args, kwargs)))
        return out


def _only_looks(func: Any, out: Any) -> bool:
    """Whether an operator asks for a device or a size: fake tensors ask often, and move nothing by it."""
    return not func._schema.is_mutable and not tensors_in(out)


def work_of(func: Any, args: Any, kwargs: Any, out: Any) -> Work:
    """What the operator ``func`` does when it makes ``out`` of these arguments."""
    outs = tensors_in(out)
    ins = tensors_in((args, kwargs))
    formula = flop_registry.get(func._overloadpacket)
    if func._schema.name in _ATTENTION:
        count, operands = _ATTENTION[func._schema.name]
        flops = count(*(t.shape for t in args[:operands]))
    else:
        flops = int(formula(*args, **kwargs, out_val=out)) if formula else sum(t.numel() for t in outs)
    unique = {id(t): t for t in (*ins, *outs)}
    # A gather reads the rows that it picks, not the whole table.
    most = sum(map(bytes_read, outs)) if func._schema.name in _GATHERS else None
    moved = sum(bytes_read(t) if most is None else min(most, bytes_read(t)) for t in unique.values())
    dtype = next((t.dtype for t in (*outs, *ins) if t.is_floating_point()), torch.int64)
    return Work(flops, moved, str(dtype).removeprefix("torch."), _operator_class(func._schema.name))


def _operator_class(name: str) -> str:
    if name.removeprefix("aten::").rstrip("_") in _TRANSCENDENTAL:
        return "transcendental"
    return next((kind for kind, parts in _CLASSES if any(part in name for part in parts)), "elementwise")


def bytes_read(tensor: torch.Tensor) -> int:
    """Bytes that reading a tensor moves: an expanded one is read from its storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
