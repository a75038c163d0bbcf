"""What the batches of a plan must look like: checks a batch, orders its leaves, and tells its samples."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from hetpipe_compiler.errors import RunError

if TYPE_CHECKING:
    from hetpipe_compiler.ir.plan import Plan, Port


class BatchForm:
    """The form of a batch.

    Args:
        plan: Its stage 0 of ``vw`` says what the leaves must look like.
        example: The workload's example batch: says how they are nested.
        source: Which function of the workload makes the batches, for messages.
    """

    def __init__(self, plan: Plan, vw: int, example: Any, source: str = "data()") -> None:
        self._source = source
        self._note = plan.dynamic_batch_note
        self._example = example
        leaves = pytree.tree_leaves(example)
        self._leaves = len(leaves)
        self._fixed = {at: leaf for at, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
        self._ports = tuple(p for p in plan.virtual_workers[vw].stages[0].inputs if p.batch_leaf is not None)
        self._batch_size = plan.batch_size

    def leaves(self, batch: Any, where: str) -> list[Any]:
        """The leaves of a batch in ``tree_flatten`` order of the example.

        Raises:
            RunError: HP516 it is not what the plan was made for; names the leaf, and ``where`` it came from.
        """
        leaves = self._flat(batch, where)
        sizes: dict[str, int] = {}
        for port in self._ports:
            assert port.batch_leaf is not None
            path, value = leaves[port.batch_leaf]
            self._check_leaf(port, value, f"{where}: item {pytree.keystr(path)}", sizes)
        for at, planned in self._fixed.items():
            path, value = leaves[at]
            if not _same(value, planned):
                what = f"is {_told(value)}, the plan was made with {_told(planned)}: what is no tensor never changes"
                raise self._mismatch(f"{where}: item {pytree.keystr(path)}", what)
        return [value for _, value in leaves]

    def samples(self, leaves: list[Any]) -> int:
        """Samples in a batch, given as `leaves` returns it."""
        found = batch_dimension(self._ports, self._ports)
        if found is None:
            return self._batch_size
        leaf = next(port.batch_leaf for port in self._ports if port.name == found[0])
        assert leaf is not None
        return int(leaves[leaf].shape[found[1]])

    def samples_too_few(self, batch: Any, where: str) -> int | None:
        """For a plan whose batch size is fixed: the samples of a batch that has fewer than that, else None."""
        leaves = self._flat(batch, where)
        for port in self._ports:
            if port.kind == "tensor" and port.shape and port.batch_leaf is not None:
                value, want = leaves[port.batch_leaf][1], port.shape[0]
                short = isinstance(value, torch.Tensor) and value.dim() and isinstance(want, int) and len(value) < want
                return len(value) if short else None
        return None

    def _flat(self, batch: Any, where: str) -> list[tuple[Any, Any]]:
        """Leaves with their paths."""
        leaves = pytree.tree_flatten_with_path(self._in_order_of(self._example, batch, where))[0]
        if len(leaves) != self._leaves:
            raise self._mismatch(where, f"has {len(leaves)} tensors and values, the example has {self._leaves}")
        return leaves

    def _check_leaf(self, port: Port, value: Any, where: str, sizes: dict[str, int]) -> None:
        if port.kind == "scalar":
            if type(value).__name__ != port.dtype:
                raise self._mismatch(where, f"is {type(value).__name__}, the plan wants {port.dtype}")
            return
        if not isinstance(value, torch.Tensor):
            raise self._mismatch(where, f"is {type(value).__name__}, the plan wants a {port.dtype} tensor")
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype != port.dtype:
            raise self._mismatch(where, f"has dtype {dtype}, the plan wants {port.dtype}")
        shape = tuple(value.shape)
        fits = len(shape) == len(port.shape) and all(map(_size_fits, shape, port.shape, repeat(sizes)))
        if not fits:
            fixed = f" (the batch size is fixed: {self._note})" if self._note else ""
            raise self._mismatch(where, f"has shape {list(shape)}, the plan wants {list(port.shape)}{fixed}")

    def _in_order_of(self, example: Any, batch: Any, where: str) -> Any:
        """``batch`` with the keys of its dictionaries in the example's order, which is what leaves are counted by."""
        if isinstance(example, Mapping) and isinstance(batch, Mapping):
            if set(example) != set(batch):
                missing, extra = sorted(set(example) - set(batch)), sorted(set(batch) - set(example))
                raise self._mismatch(where, f"has not the example's keys: missing {missing}, unknown {extra}")
            return {key: self._in_order_of(value, batch[key], where) for key, value in example.items()}
        if isinstance(example, (tuple, list)) and isinstance(batch, (tuple, list)) and len(example) == len(batch):
            return [self._in_order_of(e, b, where) for e, b in zip(example, batch, strict=True)]
        return batch

    def _mismatch(self, where: str, message: str) -> RunError:
        return RunError(
            "HP516",
            message,
            where=where,
            hint=f"make {self._source} yield batches of the example's form, or compile with such an example",
        )


def batch_dimension(first: Iterable[Port], inputs: Iterable[Port]) -> tuple[str, int] | None:
    """An input and the dimension of it that is the batch's, or None when no shape names it.

    ``first``: the inputs of stage 0, where the first dimension of the first batch tensor is the batch.
    """
    tensors = [p for p in first if p.batch_leaf is not None and p.kind == "tensor" and p.shape]
    if not tensors or not isinstance(tensors[0].shape[0], str):
        return None
    symbol = tensors[0].shape[0]
    return next(((p.name, p.shape.index(symbol)) for p in inputs if symbol in p.shape), None)


def _same(value: Any, planned: Any) -> bool:
    """Whether something that is no tensor is still what the graph was captured with."""
    if type(value) is not type(planned):
        return False
    try:
        return value is planned or bool(value == planned) or (value != value and planned != planned)
    except Exception:  # an object whose comparison fails
        return False


def _told(value: Any) -> str:
    return f"a {value.dtype} tensor" if isinstance(value, torch.Tensor) else reprlib.repr(value)


def _size_fits(size: int, want: int | str, sizes: dict[str, int]) -> bool:
    """Whether a size is the port's: a name stands for one size per batch; expressions such as ``2*s0`` go unchecked."""
    if isinstance(want, int):
        return size == want
    return not want.isidentifier() or sizes.setdefault(want, size) == size
