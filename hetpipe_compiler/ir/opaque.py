"""A submodule kept whole (``--opaque``): one node of the graph, into which no pass looks.

The node calls the operator ``hetpipe::opaque``, which exists for the graph alone: it has shapes and no kernel. What it
stands for hangs on the node (`opaque_call`); the stage module calls the user's own module there
(`hetpipe_compiler.runtime.opaque`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.utils import _pytree as pytree

#: A number that is always the same, or one that follows the batch size: ``(per_batch, fixed)``.
Size: TypeAlias = "int | tuple[int, int]"

_KEY = "hetpipe_opaque"


@dataclass(frozen=True)
class Slot:
    """The place of a tensor or of a number that follows the batch among a call's arguments: the index-th of its
    kind."""

    kind: str
    index: int


@dataclass(frozen=True)
class TensorForm:
    """A tensor that a call returns. ``order``: its dimensions from the outermost in memory to the innermost."""

    dtype: torch.dtype
    sizes: tuple[Size, ...]
    order: tuple[int, ...]

    def empty(self, batch: Any, device: torch.device) -> torch.Tensor:
        """One of this form at a batch size (a number or a symbol)."""
        sizes = [size_at(self.sizes[at], batch) for at in self.order]
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return torch.empty(sizes, dtype=self.dtype, device=device).permute(inverse)


@dataclass(frozen=True)
class OpaqueCall:
    """One call of a module that is kept whole.

    Attributes:
        module: Its path in the user's model.
        arguments: Positional and keyword arguments, with a `Slot` for each tensor and for each number that follows the
            batch size; the rest are constants.
        returns: The leaves of what it returns: a `TensorForm`, a `Size`, or a constant.
        structure: How ``returns`` lie in the value.
        batch: Where the batch size is read: ``(tensor, dimension, per_batch, fixed)`` of the arguments; None where no
            size follows it.
        state: Names, within the module, of the tensors that it has (parameters, buffers, and plain attributes that are
            tensors) and does not write; ``written``: of the buffers that it does write.
        call: Calls the user's own module on the example batch's values: ``call(tensors) -> output``. With ``example``,
            the tensors, and ``own``, the tensors of the module itself.
    """

    module: str
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    returns: tuple[Any, ...]
    structure: pytree.TreeSpec
    batch: tuple[int, int, int, int] | None
    state: tuple[str, ...]
    written: tuple[str, ...]
    example: tuple[torch.Tensor, ...] = field(compare=False)
    own: tuple[torch.Tensor, ...] = field(compare=False)
    call: Callable[[Sequence[torch.Tensor]], Any] = field(compare=False)

    def batch_of(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The batch size that a call with these tensors has (a symbol while export looks)."""
        if self.batch is None:
            return 0
        tensor, dimension, per_batch, fixed = self.batch
        size = tensors[tensor].shape[dimension]
        return size if (per_batch, fixed) == (1, 0) else (size - fixed) // per_batch


def size_at(size: Size, batch: Any) -> Any:
    """The number at a batch size."""
    return size if isinstance(size, int) else size[0] * batch + size[1]


def fill(template: Any, tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
    """``template`` with these in the places of its slots."""
    if isinstance(template, Slot):
        return (tensors if template.kind == "tensor" else numbers)[template.index]
    if isinstance(template, (tuple, list)):
        return type(template)(fill(part, tensors, numbers) for part in template)
    if isinstance(template, dict):
        return {key: fill(part, tensors, numbers) for key, part in template.items()}
    return template


def opaque_call(node: fx.Node) -> OpaqueCall | None:
    """What a node stands for that is a module kept whole; None for other nodes."""
    found: OpaqueCall | None = node.meta.get(_KEY)
    return found


def set_opaque_calls(graph_module: fx.GraphModule, calls: Mapping[str, OpaqueCall]) -> None:
    """Hang ``calls`` on the nodes that were exported under their keys, also in regions; name those after the module."""
    graphs = [module.graph for module in graph_module.modules() if isinstance(module, fx.GraphModule)]
    for node in [n for graph in graphs for n in graph.nodes]:
        if node.target is OPAQUE:
            call = calls[str(node.args[0])]
            node.meta[_KEY] = call
            node.update_arg(0, call.module)
            node._rename(call.module.replace(".", "_"))


_exporting: ContextVar[Mapping[str, OpaqueCall]] = ContextVar("_exporting")


@contextmanager
def exporting(calls: Mapping[str, OpaqueCall]) -> Iterator[None]:
    """While export looks: what the keys mean that `OPAQUE` is called with."""
    token = _exporting.set(calls)
    try:
        yield
    finally:
        _exporting.reset(token)


# It may draw random numbers, so it is neither dropped when unread nor taken for a constant.
torch.library.define(
    "hetpipe::opaque",
    "(str call, Tensor[] inputs, SymInt[] numbers, Tensor[] state, Tensor(a!)[] written) -> Tensor[]",
    tags=(torch.Tag.nondeterministic_seeded,),
)
OPAQUE = torch.ops.hetpipe.opaque.default


@torch.library.register_fake("hetpipe::opaque")  # type: ignore[untyped-decorator]
def _shapes(
    call: str,
    inputs: Sequence[torch.Tensor],
    numbers: Sequence[int],  # noqa: ARG001
    state: Sequence[torch.Tensor],
    written: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    known = _exporting.get()[call]
    device = next((t.device for t in (*inputs, *state, *written)), torch.device("cpu"))
    batch = known.batch_of(inputs)
    return [form.empty(batch, device) for form in known.returns if isinstance(form, TensorForm)]
