"""Rewrite the captured graph into the form that the other passes expect, without changing what it computes.

1. An in-place operator becomes its functional twin where that is exact: the twin exists, gives the same dtype and shape, and
   nothing that shares the storage is read later except through the changed tensor itself. Elsewhere it stays in place;
   `fuse_atomic` keeps everything that touches the storage together.
2. Runtime assertions of export go. What nobody reads goes, unless it changes a tensor or draws random numbers.
3. A conversion to the dtype that a tensor already has goes: all tensors of a stage are on its device, so nothing is left to do.
4. Buffers that training changes are marked as mutated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from hetpipe_compiler.ir.captured import Captured
from hetpipe_compiler.passes.base import Compilation, Pass

#: Export's runtime checks: they return nothing and hold no meaning for training.
_ASSERTIONS = frozenset(
    {
        "aten::_assert_tensor_metadata",
        "aten::_assert_async",
        "aten::_assert_scalar",
        "aten::sym_constrain_range",
        "aten::sym_constrain_range_for_size",
    }
)


@dataclass(frozen=True)
class Normalize(Pass):
    """See the module's rules."""

    name: ClassVar[str] = "normalize"
    requires: ClassVar[tuple[str, ...]] = ("captured",)
    ensures: ClassVar[tuple[str, ...]] = ("captured",)

    def run(self, compilation: Compilation) -> None:
        assert compilation.captured is not None
        compilation.captured = normalize(compilation.captured)

    def dump(self, compilation: Compilation) -> str:
        assert compilation.captured is not None
        return str(compilation.captured.graph_module.graph)


def normalize(captured: Captured) -> Captured:
    """Apply the rules to the graph in place; returns the capture with its mutated buffers marked."""
    graph = captured.graph_module.graph
    _drop_assertions(graph)
    _drop_idle_conversions(graph)
    _functionalize(captured)
    _drop_unread(graph)
    captured.graph_module.recompile()
    mutated = mutated_attributes(graph)
    buffers = tuple(replace_mutated(b, b.name in mutated) for b in captured.buffers)
    return replace(captured, buffers=buffers)


def replace_mutated(tensor: Any, mutated: bool) -> Any:
    """The same plan entry with its ``mutated`` flag set."""
    return tensor.model_copy(update={"mutated": mutated})


def mutated_arguments(node: fx.Node) -> list[fx.Node]:
    """Nodes whose tensors ``node`` writes into. Batch norm in train mode writes its statistics without saying so."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    written = [
        value
        for value, argument in zip(node.args, node.target._schema.arguments, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, fx.Node)
    ]
    if node.target._schema.name == "aten::batch_norm" and node.args[5] is True:
        written += [value for value in node.args[3:5] if isinstance(value, fx.Node)]
    if node.target._schema.name == "aten::instance_norm" and node.args[5] is True:
        written += [value for value in node.args[3:5] if isinstance(value, fx.Node)]
    return written


def mutated_attributes(graph: fx.Graph) -> set[str]:
    """Targets of ``get_attr`` nodes that the graph writes into."""
    return {str(a.target) for node in graph.nodes for a in mutated_arguments(node) if a.op == "get_attr"}


def is_random(node: fx.Node) -> bool:
    """Whether the node draws random numbers."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def _drop_assertions(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in _ASSERTIONS:
            graph.erase_node(node)


def _drop_idle_conversions(graph: fx.Graph) -> None:
    """``x.to(device)`` comes out of export as a conversion to x's own dtype; it would pin a model to the dtype it had here."""
    for node in list(graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.name != "aten::to":
            continue
        source, copies = node.args[0], node.kwargs.get("copy") or True in node.args[2:]
        before, after = source.meta.get("val") if isinstance(source, fx.Node) else None, node.meta.get("val")
        if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and before.dtype == after.dtype:
            if copies or node.kwargs.get("memory_format") or before.stride() != after.stride():
                continue
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _drop_unread(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op in ("output", "placeholder") or node.users:
            continue
        # Regions (no_grad, autocast) may write inside; they are kept.
        region = isinstance(node.target, torch._ops.HigherOrderOperator)
        if not region and not mutated_arguments(node) and not is_random(node):
            graph.erase_node(node)


def storage_of(node: fx.Node) -> int | None:
    """Identity of the storage behind a node's tensor, as export saw it; None for what is no tensor."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _functionalize(captured: Captured) -> None:
    graph = captured.graph_module.graph
    order = {node: at for at, node in enumerate(graph.nodes)}
    sharers: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        storage = storage_of(node)
        if storage is not None:
            sharers.setdefault(storage, []).append(node)
    for node in list(graph.nodes):
        written = mutated_arguments(node)
        twin = _functional_twin(node) if len(written) == 1 else None
        if twin is None:
            continue
        target = written[0]
        storage = storage_of(target)
        if target.op == "get_attr" or storage is None:
            continue
        # After the write, the changed tensor may be read as `target` or as `node`; any other name that the storage had
        # before would miss the change once the operator is functional.
        names = {target, node} | _same_tensor(target)
        others = [s for s in sharers[storage] if s not in names and order.get(s, -1) < order[node]]
        if any(order.get(user, -1) > order[node] for other in others for user in other.users):
            continue
        if any(other.op in ("get_attr", "placeholder") for other in (*others, target)) or not _same_kind(node, target):
            continue
        _replace(graph, node, target, twin, order)


def _same_tensor(node: fx.Node) -> set[fx.Node]:
    """Results of earlier in-place operators on the same tensor: other names for it."""
    names: set[fx.Node] = set()
    for user in node.users:
        if node in mutated_arguments(user) and user.args[0] is node:
            names.add(user)
    return names


def _functional_twin(node: fx.Node) -> torch._ops.OpOverload | None:
    """``add`` for ``add_``, same overload and arguments, returning instead of writing; None where there is none."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    namespace, name = target._schema.name.split("::")
    if not name.endswith("_") or name.startswith("__"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    twin = getattr(packet, target._overloadname, None) if packet is not None else None
    if twin is None or twin._schema.is_mutable:
        return None
    ours = [(a.name, str(a.type)) for a in twin._schema.arguments]
    theirs = [(a.name, str(a.type)) for a in target._schema.arguments]
    return twin if ours[: len(theirs)] == theirs else None


def _same_kind(node: fx.Node, target: fx.Node) -> bool:
    """Whether the functional result has the dtype and shape of the tensor written into (no promotion, no broadcast)."""
    into: torch.Tensor = target.meta["val"]
    inputs = [a.meta.get("val") for a in node.all_input_nodes]
    floats = [v for v in inputs if isinstance(v, torch.Tensor) and v.dim() and v.dtype != into.dtype]
    # Another dtype among the operands could promote; masks and indices do not.
    if any(v.dtype not in (torch.bool, torch.int64) or not into.dtype.is_floating_point for v in floats):
        return False
    if into.dtype in (torch.bool, torch.int64, torch.int32) and any(isinstance(a, float) for a in node.args):
        return False
    return all(
        not isinstance(v, torch.Tensor) or v is into or v.dim() <= into.dim() or v.dtype == torch.int64 for v in inputs
    )


def _replace(
    graph: fx.Graph, node: fx.Node, target: fx.Node, twin: torch._ops.OpOverload, order: dict[fx.Node, int]
) -> None:
    with graph.inserting_before(node):
        functional = graph.call_function(twin, node.args, node.kwargs)
    functional.meta = dict(node.meta)
    functional._rename(re.sub(r"_(?=_\d|$)", "", node.name) or node.name)
    order[functional] = order[node]
    later = [user for user in target.users if order[user] > order[node]]
    for user in later:
        user.replace_input_with(target, functional)
    # Names for the tensor from earlier in-place operators are read as the new value too.
    for alias in _same_tensor(target) - {node}:
        for user in [u for u in alias.users if order[u] > order[node]]:
            user.replace_input_with(alias, functional)
    node.replace_all_uses_with(functional)
    graph.erase_node(node)
