"""``self.buffer = value`` in ``forward``.

A buffer of a plan is one place in memory for good, so export is shown a write of the value into the buffer at the end
of the call. What the model has read of the buffer until then is the old tensor, which keeps its numbers: autograd may
have saved it, and another buffer may have become it. So the graph reads it from a copy that is made before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import torch
from torch import fx
from torch.fx.traceback import annotate, preserve_node_meta

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.ir.storage import storage_of

#: A module's buffers by its own names.
_Buffers: TypeAlias = dict[str, torch.Tensor | None]

_MARK = "hetpipe_assigned"


class AssignedBuffers:
    """The buffers of a model before its call, to see afterwards which are other tensors then."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._before = list(_buffers(model))

    def write(self, path: Path, line_of: Callable[[torch.nn.Module, str, Path], str]) -> None:
        """Put the old tensors back, with the new ones' values.

        Args:
            path: The user's file.
            line_of: The line of a module's class that assigns an attribute.

        Raises:
            WorkloadError: HP113, a new tensor has another shape or dtype; HP116, the old one or the new one is, or
                shares the memory of, another buffer or parameter, which would go its own way from then on.
        """
        assigned: list[tuple[_Buffers, str, torch.Tensor, torch.Tensor]] = []
        for module, holder, name, old in self._before:
            new = holder.get(name)
            if new is old:
                continue
            if new is None or new.shape != old.shape or new.dtype != old.dtype:
                raise WorkloadError(
                    "HP113",
                    f"forward puts another kind of tensor in the place of buffer '{name}'",
                    where=line_of(module, name, path),
                    hint="keep its shape and dtype, and change it in place",
                )
            if (other := self._kept_elsewhere(holder, name, old, new)) is not None:
                raise WorkloadError(
                    "HP116",
                    f"forward puts another tensor in the place of buffer '{name}', and one of them is also '{other}'",
                    where=line_of(module, name, path),
                    hint="change it in place, or put a copy there: value.clone()",
                )
            assigned.append((holder, name, old, new))
        olds = {storage_of(old) for _, _, old, _ in assigned}
        with torch.no_grad():
            values = [new.clone() if storage_of(new) in olds else new for *_, new in assigned]
            with preserve_node_meta(), annotate({_MARK: True}):
                for (_, _, old, _), value in zip(assigned, values, strict=True):
                    old.copy_(value)
        for holder, name, old, _ in assigned:
            holder[name] = old

    def _kept_elsewhere(self, holder: _Buffers, name: str, old: torch.Tensor, new: torch.Tensor) -> str | None:
        """Another name that the call leaves to the old tensor, or gives to the new one's memory."""
        before = {(id(h), n): value for _, h, n, value in self._before}
        for _, other, title, value in _buffers(self._model):
            if other is holder and title == name:
                continue
            tied = before.get((id(other), title)) is old
            if (tied and value is old) or (_shares(value, new) and not (tied and value is new)):
                return title
        parameters = self._model.named_parameters()
        return next((n.removeprefix("model.") for n, p in parameters if _shares(p, new)), None)


def read_assigned_from_copies(graph: fx.Graph) -> None:
    """Read each buffer that the call assigns from a copy that is made before all else that touches it."""
    order = {node: at for at, node in enumerate(graph.nodes)}
    for write in [n for n in graph.nodes if n.meta.get("custom", {}).get(_MARK)]:
        buffer = _attribute(write)
        reads = [n for n in graph.nodes if n.op == "get_attr" and n.target == buffer.target]
        users = [user for node in reads for user in node.users if user is not write]
        with graph.inserting_before(min((*users, write), key=order.__getitem__)):
            kept = graph.get_attr(str(buffer.target))
            kept.meta = dict(buffer.meta)
            copy = graph.call_function(torch.ops.aten.clone.default, (kept,))
        if users:
            copy.meta = dict(users[0].meta)
        copy.meta["val"] = buffer.meta["val"].clone()
        for node in reads:
            node.replace_all_uses_with(copy)
        write.replace_input_with(write.args[0], kept)
        if not users:
            graph.erase_node(copy)


def _attribute(write: fx.Node) -> fx.Node:
    """The buffer that is written; after writes in place a graph calls it by their names."""
    node = write
    while node.op != "get_attr":
        target = node.args[0]
        assert isinstance(target, fx.Node)
        node = target
    return node


def _buffers(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, _Buffers, str, torch.Tensor]]:
    """Each module's buffers by its own names. (While exporting, a module is another object at each look, around the
    same dictionaries.)"""
    seen: set[int] = set()
    for module in model.modules():
        if id(module._buffers) not in seen:
            seen.add(id(module._buffers))
            yield from ((module, module._buffers, name, b) for name, b in module._buffers.items() if b is not None)


def _shares(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return storage_of(tensor) == storage_of(other) and tensor.numel() > 0
