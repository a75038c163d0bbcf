"""The work of each ATen operator that runs: its FLOPs, the bytes that it moves, and its class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from hetpipe_compiler.ir.costs import Work
from hetpipe_compiler.ir.storage import storage_of
from hetpipe_compiler.passes.live_bytes import LiveBytes, tensors_in
from hetpipe_compiler.passes.operator_bytes import bytes_moved

#: Operators that make a tensor and move nothing: they rename, or only allocate.
_FREE = frozenset(
    {
        "aten::detach", "aten::alias", "aten::lift_fresh", "aten::_unsafe_view",
        "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
    }
)  # fmt: skip
#: torch's formulas of attention for the kernels that it has none for, and of how many operands they take the shapes.
_ATTENTION: dict[str, tuple[Callable[..., int], int]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (sdpa_flop_count, 3),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (sdpa_backward_flop_count, 4),
}
#: Operators that return a mean and a deviation beside the value.
_NORMALISATIONS = frozenset({"aten::native_batch_norm", "aten::native_layer_norm", "aten::native_group_norm"})
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
        out = _with_real_statistics(func, args, kwargs, func(*args, **kwargs))
        if not func.is_view and func._schema.name not in _FREE and not _only_looks(func, out):
            self.work.append(work_of(func, args, kwargs, out))
        if func is torch.ops.aten._to_copy.default:
            self.casts[storage_of(out)] = (storage_of(args[0]), out.dtype)
        if not func.is_view:
            self.live.note(tensors_in(out), tensors_in((args, kwargs)))
        return out


def _with_real_statistics(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """What a normalisation keeps for its backward, in the dtype that kernels keep it in.

    Of an input in low precision with wider weights (autocast), tensors without values show the input's; kernels keep
    means and deviations as wide as the widest operand.
    """
    if func._schema.name not in _NORMALISATIONS:
        return out
    dtypes = [t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point()]
    widest = max(dtypes, key=lambda dtype: dtype.itemsize)
    value, *statistics = out
    return (
        value,
        *(t if t.dtype.itemsize >= widest.itemsize else torch.empty_like(t, dtype=widest) for t in statistics),
    )


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
    moved = bytes_moved(func, args, kwargs, out)
    dtype = next((t.dtype for t in (*outs, *ins) if t.is_floating_point()), torch.int64)
    return Work(flops, moved, str(dtype).removeprefix("torch."), _operator_class(func._schema.name))


def _operator_class(name: str) -> str:
    if name.removeprefix("aten::").rstrip("_") in _TRANSCENDENTAL:
        return "transcendental"
    return next((kind for kind, parts in _CLASSES if any(part in name for part in parts)), "elementwise")
