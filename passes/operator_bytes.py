"""The bytes that an operator's kernels read and write.

1. Each operand is read once and each result written once; an expanded one in its storage alone. So what an operator
   changes in place is read and written, unless it only fills it.
2. What only lends its shape is not read: the template of ``zeros_like``, the scores in the backward of a picked score.
3. A gather reads as much of its table as it makes; a scatter in place reads and writes as much of it as it is given.
   The gradient of an embedding is a scatter into a table that is cleared before.
4. A batch norm goes over its operands twice. The statistics of the whole batch are there only when all has been read
   once; so are, in the backward, the sums that each gradient contains. (Other normalisations work row by row, and a row
   stays in the cache.)
"""

from __future__ import annotations

from typing import Any

import torch

from hetpipe_compiler.passes.live_bytes import tensors_in

#: Operators that pick from a table.
_GATHERS = frozenset({"embedding", "index", "index_select", "gather"})
#: Operators that write rows, or single numbers, of what they change in place.
_SCATTERS = frozenset(
    {"index_put_", "_index_put_impl_", "index_add_", "index_copy_", "index_fill_", "scatter_", "scatter_add_"}
)
#: Operators that overwrite what they change in place.
_FILLS = frozenset({"fill_", "zero_", "copy_", "bernoulli_", "normal_", "uniform_", "random_", "exponential_"})
#: Operators that look at no number of the argument ``self``.
_SHAPE_ONLY = frozenset(
    {
        "nll_loss_backward", "nll_loss2d_backward", "avg_pool2d_backward", "_adaptive_avg_pool2d_backward",
        "max_pool2d_with_indices_backward",
    }
)  # fmt: skip
#: Losses that read one score of each row.
_PICKED = frozenset({"nll_loss_forward", "nll_loss2d_forward"})


def bytes_read(tensor: torch.Tensor) -> int:
    """Bytes that reading a tensor moves: an expanded one is read from its storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def bytes_moved(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Bytes that ``func`` moves when it makes ``out`` of these arguments."""
    name = func._schema.name.removeprefix("aten::")
    outs = _total(tensors_in(out))
    ins = tensors_in((args, kwargs))
    first, rest = (ins[0], ins[1:]) if ins else (None, [])
    if first is None:
        return outs
    if name.endswith("_like") or name.startswith("new_") or name in _FILLS:
        return _total(rest) + outs
    if name in _SHAPE_ONLY:
        # ``self`` comes second, after the gradient.
        return _total([first, *rest[1:]]) + outs
    if name in _PICKED:
        return min(bytes_read(first), _total(rest)) + _total(rest) + outs
    if name in _GATHERS:
        return min(bytes_read(first), outs) + _total(rest) + outs
    if name in _SCATTERS:
        return _total(rest) + 2 * min(bytes_read(first), max(map(bytes_read, rest), default=0))
    if name == "embedding_dense_backward":
        return _total(ins) + outs + 2 * min(bytes_read(first), outs)
    passes = 2 if "batch_norm" in name and _in_training(func, args, kwargs) else 1
    return passes * _total(ins) + outs


def _total(tensors: list[torch.Tensor]) -> int:
    """Of each tensor once."""
    return sum(map(bytes_read, {id(t): t for t in tensors}.values()))


def _in_training(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a batch norm takes its statistics from the batch."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.name in ("training", "train"):
            return bool(args[at] if at < len(args) else kwargs.get(argument.name))
    return True
