"""Rewrite the captured graph into the form that the other passes expect, without changing what it computes.

1. An in-place operator becomes its functional twin where that is exact: the twin exists, gives the same dtype and
   shape, and nothing that shares the storage is read later except through the changed tensor itself. Elsewhere it stays
   in place; `fuse_atomic` keeps everything that touches the storage together. A write into a parameter is refused:
   updates belong to the optimizer, and a stage keeps several versions of its parameters.
2. Runtime assertions of export go. What nobody reads goes, unless it changes a tensor or draws random numbers.
3. A conversion to the dtype that a tensor already has goes: all tensors of a stage are on its device, so nothing is
   left to do. Not so where autocast is at work, because dtypes then depend on the device.
4. A ``view`` of memory that nobody writes becomes a ``reshape``: how a kernel lays out its result differs between
   devices, and export writes ``view`` wherever the layout that it saw allowed one.
5. Buffers that training changes are marked as mutated.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any, ClassVar

import torch
from torch import fx

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.regions import contexts_of, uses_autocast
from hetpipe_compiler.ir.captured import Captured
from hetpipe_compiler.ir.opaque import OPAQUE
from hetpipe_compiler.ir.source import module_path, source_place
from hetpipe_compiler.ir.storage import storage_of
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

#: Operators that write ``running_mean`` and ``running_var``, and the argument that makes them do so.
_WRITES_STATISTICS = {
    "aten::batch_norm": "training",
    "aten::cudnn_batch_norm": "training",
    "aten::miopen_batch_norm": "training",
    "aten::native_batch_norm": "training",
    "aten::_batch_norm_impl_index": "training",
    "aten::instance_norm": "use_input_stats",
}

#: Operators that autocast leaves alone in both forms.
_UNTOUCHED_BY_AUTOCAST = frozenset(
    f"aten::{name}_"
    for name in ("relu", "dropout", "silu", "hardtanh", "leaky_relu", "hardswish", "elu", "zero", "fill")
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
    """Apply the rules to the graph in place; returns the capture with its mutated buffers marked.

    Raises:
        WorkloadError: HP117, ``forward`` writes into a parameter; HP125, an embedding's gradient is sparse.
    """
    graph = captured.graph_module.graph
    _drop_assertions(graph)
    _drop_idle_detaches(graph)
    if not uses_autocast(graph):
        _drop_idle_conversions(graph)
    storages = Storages(graph)
    _refuse_written_parameters(captured, storages)
    _refuse_other_writes(captured, storages)
    _refuse_sparse_gradients(captured)
    _functionalize(graph, storages, frozenset(t.name for t in captured.parameters if t.trainable))
    _free_layouts(graph, storages)
    _drop_unread(graph)
    captured.graph_module.recompile()
    mutated = _written_attributes(graph, storages)
    buffers = tuple(b.model_copy(update={"mutated": b.name in mutated}) for b in captured.buffers)
    return replace(captured, buffers=buffers)


def _refuse_written_parameters(captured: Captured, storages: Storages) -> None:
    parameters = {t.name for t in captured.parameters}
    graph = captured.graph_module.graph
    held = {storages.of(n): str(n.target) for n in graph.nodes if n.op == "get_attr" and n.target in parameters}
    for node in graph.nodes:
        for written in mutated_arguments(node):
            if storages.of(written) in held:
                raise WorkloadError(
                    "HP117",
                    f"forward writes into parameter '{held[storages.of(written)]}'",
                    where=source_place(node, captured.root) or None,
                    hint="compute with a changed copy, or let the optimizer change it; or make it a buffer",
                )


def _refuse_sparse_gradients(captured: Captured) -> None:
    """Gradients are summed and pushed to the servers as dense tensors."""
    for node in captured.graph_module.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        names = (a.name for a in node.target._schema.arguments)
        if (dict(zip(names, node.args, strict=False)) | node.kwargs).get("sparse") is True:
            raise WorkloadError(
                "HP125",
                f"{module_path(node) or 'the model'} asks for a sparse gradient; stages and servers add up dense ones",
                where=source_place(node, captured.root) or None,
                hint="leave out sparse=True",
            )


def _refuse_other_writes(captured: Captured, storages: Storages) -> None:
    """What is written must be a buffer, alone on its memory: nothing else is state that stages have and give back."""
    graph = captured.graph_module.graph
    constants, buffers = ({t.name for t in tensors} for tensors in (captured.constants, captured.buffers))
    for node in graph.nodes:
        for written in mutated_arguments(node):
            held = sorted({str(n.target) for n in storages.sharers(written) if n.op == "get_attr"})
            plain = [name.removeprefix("constant_") for name in held if name in constants]
            several = [name for name in held if name in buffers]
            if plain:
                raise WorkloadError(
                    "HP113",
                    f"forward writes into '{plain[0]}', a tensor that is no buffer",
                    where=source_place(node, captured.root) or None,
                    hint="make it a buffer (register_buffer): then it is kept, saved and moved with the model",
                )
            if len(several) > 1:
                raise WorkloadError(
                    "HP116",
                    f"forward writes into buffer '{several[0]}', which shares memory with '{several[1]}'",
                    where=source_place(node, captured.root) or None,
                    hint="register one buffer, and take the other as a view of it in forward",
                )


class Storages:
    """Which nodes' tensors share memory: what export saw, and what operators' schemas say."""

    def __init__(self, graph: fx.Graph) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}
        self._sharers: dict[fx.Node, list[fx.Node]] = {}
        first: dict[int, fx.Node] = {}
        # A tensor attribute may be read by several nodes of the same target.
        attributes: dict[str, fx.Node] = {}
        for node in graph.nodes:
            for value in _tensors(node):
                self._join(node, first.setdefault(storage_of(value), node))
            if node.op == "get_attr":
                self._join(node, attributes.setdefault(str(node.target), node))
            for source in _aliased_arguments(node):
                self._join(node, source)
        for node in graph.nodes:
            self._sharers.setdefault(self.of(node), []).append(node)

    def of(self, node: fx.Node) -> fx.Node:
        """A node that stands for the memory of ``node``'s tensors."""
        root = node
        while self._parent.get(root, root) is not root:
            root = self._parent[root]
        return root

    def sharers(self, node: fx.Node) -> list[fx.Node]:
        """All nodes with tensors on that memory, ``node`` among them."""
        return self._sharers[self.of(node)]

    def written(self, graph: fx.Graph) -> dict[fx.Node, None]:
        """What stands for each memory that the graph now writes, in the order of the first writes."""
        return dict.fromkeys(self.of(argument) for node in graph.nodes for argument in mutated_arguments(node))

    def replaced(self, node: fx.Node, by: fx.Node) -> None:
        """``by`` has taken the place of ``node``."""
        self._parent[by] = self.of(node)
        self.sharers(node).append(by)

    def _join(self, node: fx.Node, other: fx.Node) -> None:
        self._parent[self.of(node)] = self.of(other)


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]


def _aliased_arguments(node: fx.Node) -> list[fx.Node]:
    """Arguments whose memory the node's results may share."""
    if node.target is getitem:
        return [a for a in node.args[:1] if isinstance(a, fx.Node)]
    if node.target is OPAQUE:  # may return what it was given
        inputs: Any = node.args[1]
        return list(inputs)
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    schema = node.target._schema
    if not any(r.alias_info is not None for r in schema.returns):
        return []
    return [
        value
        for value, argument in zip(node.args, schema.arguments, strict=False)
        if argument.alias_info is not None and isinstance(value, fx.Node)
    ]


def mutated_arguments(node: fx.Node) -> list[fx.Node]:
    """Nodes whose tensors ``node`` writes into. Norms in train mode write their statistics without saying so."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    schema = node.target._schema
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if given.get(_WRITES_STATISTICS.get(schema.name, "")) is True:
        names += ["running_mean", "running_var"]
    written: list[fx.Node] = []
    for name in names:
        value = given.get(name)
        values = value if isinstance(value, (list, tuple)) else [value]
        written += [v for v in values if isinstance(v, fx.Node)]
    return written


def _written_attributes(graph: fx.Graph, storages: Storages) -> set[str]:
    """Targets of ``get_attr`` nodes whose memory the graph writes, also through views."""
    written = storages.written(graph)
    return {str(n.target) for n in graph.nodes if n.op == "get_attr" and storages.of(n) in written}


def is_random(node: fx.Node) -> bool:
    """Whether the node draws random numbers."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def _drop_assertions(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in _ASSERTIONS:
            graph.erase_node(node)


def _drop_idle_detaches(graph: fx.Graph) -> None:
    """``torch.tensor(1.0)`` in forward is followed by an in-place detach of what never had a gradient."""
    fresh = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default)
    for node in list(graph.nodes):
        source = node.args[0] if node.target is torch.ops.aten.detach_.default else None
        if isinstance(source, fx.Node) and (source.target in fresh or str(source.target).startswith("constant_")):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _drop_idle_conversions(graph: fx.Graph) -> None:
    """``x.to(device)`` comes out of export as a conversion to x's own dtype; it would pin a model to the dtype it had
    here."""
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
        if not mutated_arguments(node) and not is_random(node):
            graph.erase_node(node)


def _free_layouts(graph: fx.Graph, storages: Storages) -> None:
    written = storages.written(graph)
    for node in graph.nodes:
        if node.target is torch.ops.aten.view.default and storages.of(node) not in written:
            node.target = torch.ops.aten.reshape.default


def _functionalize(graph: fx.Graph, storages: Storages, trainable: frozenset[str]) -> None:
    order = {node: at for at, node in enumerate(graph.nodes)}
    trained = _reached_by(graph, storages, trainable)
    for node in list(graph.nodes):
        written = mutated_arguments(node)
        twin = _functional_twin(node) if len(written) == 1 else None
        if twin is None or contexts_of(node) != contexts_of(written[0]) or not _same_under_autocast(node):
            continue
        target = written[0]
        others = [s for s in storages.sharers(target) if s not in (node, target) and order[s] < order[node]]
        # After the write the changed tensor may be read as `target` or as `node`; any other name that the memory had
        # before would miss the change once the operator is functional.
        if any(order[user] > order[node] for other in others for user in other.users):
            continue
        # The model's state outlives the call; the batch is the stage's own.
        if any(s.op == "get_attr" for s in (*others, target)) or not _same_result(node, target, twin, trained):
            continue
        storages.replaced(node, _replace(graph, node, target, twin, order))


def _reached_by(graph: fx.Graph, storages: Storages, parameters: frozenset[str]) -> set[fx.Node]:
    """Nodes whose values may have a gradient: what is computed from one of these parameters, or written into so."""
    reached: set[fx.Node] = set()
    for node in graph.nodes:
        if str(node.target) in parameters if node.op == "get_attr" else reached.intersection(node.all_input_nodes):
            reached.add(node)
            reached.update(sharer for target in mutated_arguments(node) for sharer in storages.sharers(target))
    return reached


def _same_under_autocast(node: fx.Node) -> bool:
    cast = any(kind == "autocast" for kind, *_ in contexts_of(node))
    return not cast or (
        isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in _UNTOUCHED_BY_AUTOCAST
    )


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
    # The tensor itself may go by another name (`self`, `input`).
    ours = [(a.name if at else "", str(a.type)) for at, a in enumerate(twin._schema.arguments)]
    theirs = [(a.name if at else "", str(a.type)) for at, a in enumerate(target._schema.arguments)]
    return twin if ours[: len(theirs)] == theirs else None


def _same_result(node: fx.Node, target: fx.Node, twin: torch._ops.OpOverload, trained: Container[fx.Node]) -> bool:
    """Whether the twin gives the dtype and the shape of the tensor written into (no promotion, no broadcast), does it
    without touching that tensor's memory, and has a gradient (`aten.copy` has none) if a ``trained`` value comes in."""
    if twin is torch.ops.aten.detach.default:
        # Says nothing about memory, only about gradients.
        return True
    values = {n: _on_meta(n.meta["val"]) for n in node.all_input_nodes}
    for source, value in values.items():
        if source in trained and isinstance(value, torch.Tensor) and value.is_floating_point():
            value.requires_grad_()
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    into = values[target]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        result = twin(*args, **kwargs)
    if not isinstance(result, torch.Tensor) or storage_of(result) == storage_of(into):
        return False
    if type(result.grad_fn).__name__ == "NotImplemented":
        return False
    return bool(result.dtype == into.dtype and result.shape == into.shape)


def _on_meta(value: Any) -> Any:
    """The same with the example's sizes: some operators cannot be tried with free ones."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.hint
    if not isinstance(value, torch.Tensor):
        return value
    sizes, strides = (list(map(_on_meta, numbers)) for numbers in (value.shape, value.stride()))
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")


def _replace(
    graph: fx.Graph, node: fx.Node, target: fx.Node, twin: torch._ops.OpOverload, order: dict[fx.Node, int]
) -> fx.Node:
    with graph.inserting_before(node):
        functional = graph.call_function(twin, node.args, node.kwargs)
    functional.meta = dict(node.meta)
    functional._rename(re.sub(r"_(?=_\d|$)", "", node.name) or node.name)
    order[functional] = order[node]
    for user in [user for user in target.users if order[user] > order[node]]:
        user.replace_input_with(target, functional)
    node.replace_all_uses_with(functional)
    graph.erase_node(node)
    return functional
