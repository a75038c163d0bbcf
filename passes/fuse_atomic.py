"""Group the graph into atomic components: the smallest pieces that a cut may separate.

RaNNC's rule (IPDPS 2021, section III-A), and what correctness adds to it:

1. A *constant* node depends on neither the batch nor a trainable parameter, draws no random numbers, and its memory is
   never written. Constants belong to no component: each stage that needs one computes its own.
2. Every other node starts as a component of its own.
3. ``getitem`` joins the node whose tuple it opens.
4. ``as_strided`` joins what it reads: it counts on a layout in memory that does not travel.
5. All nodes that touch a tensor which some node writes into (an in-place operator left by `normalize`, a buffer that
   training changes) join one component. So a value that crosses a cut is never written by its receiver.
6. A component that no value ties to another, as the count of batches that a normalisation keeps, joins what follows it
   in its module: it would otherwise go to any stage, and double the number of closed sets.
7. Components on a cycle join. The rest is put in an order in which every component comes after what it reads, as close
   to the program's own order as that allows, the loss last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import getitem
from typing import ClassVar

import networkx as nx
import torch
from torch import fx

from hetpipe_compiler.ir.captured import Captured
from hetpipe_compiler.ir.source import module_path
from hetpipe_compiler.passes.base import Compilation, Pass
from hetpipe_compiler.passes.normalize import Storages, is_random

LAYOUT = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_.default)


@dataclass(frozen=True)
class Components:
    """Atomic components in execution order.

    Attributes:
        nodes: For each component, names of its fx nodes in program order. The batch's placeholders are in none.
        constants: Names of the constant nodes and of ``get_attr`` nodes: cloned into every stage that reads them.
    """

    nodes: tuple[tuple[str, ...], ...]
    constants: frozenset[str]

    def __str__(self) -> str:
        return "\n".join(f"{at:4} {' '.join(names)}" for at, names in enumerate(self.nodes))


@dataclass(frozen=True)
class FuseAtomic(Pass):
    """See the module's rules."""

    name: ClassVar[str] = "fuse_atomic"
    requires: ClassVar[tuple[str, ...]] = ("captured",)
    ensures: ClassVar[tuple[str, ...]] = ("components",)

    def run(self, compilation: Compilation) -> None:
        assert compilation.captured is not None
        compilation.components = fuse_atomic(compilation.captured)


def fuse_atomic(captured: Captured) -> Components:
    """Apply the rules; time is linear in the graph but for the ordering's logarithm."""
    graph = captured.graph_module.graph
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    storages = Storages(graph)
    constants = _constants(captured, nodes, storages)
    members = [n for n in nodes if n not in constants]
    groups = nx.utils.UnionFind(members)
    for node in members:
        if (node.target is getitem or node.target in LAYOUT) and node.args[0] in groups.parents:
            groups.union(node.args[0], node)
    for touching in touching_written(graph, storages):
        joined = [n for n in touching if n in groups.parents]
        if joined:
            groups.union(*joined)
    for node, neighbour in _loose(members, groups):
        groups.union(node, neighbour)
    ordered = _order(members, groups, captured.loss_node())
    return Components(
        nodes=tuple(tuple(n.name for n in component) for component in ordered),
        constants=frozenset(n.name for n in constants),
    )


def _constants(captured: Captured, nodes: list[fx.Node], storages: Storages) -> set[fx.Node]:
    """Constant nodes, and all ``get_attr`` nodes."""
    trainable = {t.name for t in captured.parameters if t.trainable}
    written = storages.written(captured.graph_module.graph)
    constants: set[fx.Node] = set()
    for node in nodes:
        if node.op == "get_attr":
            constants.add(node)
            continue
        varies = any(
            n not in constants or (n.op == "get_attr" and str(n.target) in trainable) or storages.of(n) in written
            for n in node.all_input_nodes
        )
        if not varies and not is_random(node) and storages.of(node) not in written:
            constants.add(node)
    return constants


def _loose(members: list[fx.Node], groups: nx.utils.UnionFind) -> Iterator[tuple[fx.Node, fx.Node]]:
    """A node of each component that exchanges values with no other, and what follows it in its module, if anything."""
    home = {node: groups[node] for node in members}
    tied = {
        home[node]
        for node in members
        for other in (*node.all_input_nodes, *node.users)
        if other in home and home[other] is not home[node]
    }
    following: dict[str, fx.Node] = {}
    for node in reversed(members):
        module = module_path(node)
        if home[node] in tied:
            following[module] = node
        elif module in following:
            yield node, following[module]


def touching_written(graph: fx.Graph, storages: Storages) -> Iterator[Iterable[fx.Node]]:
    """For each storage that is written: every node that makes, names or reads a tensor on it."""
    for storage in storages.written(graph):
        holders = storages.sharers(storage)
        yield dict.fromkeys(n for holder in holders for n in (holder, *holder.users) if n.op != "output")


def _order(members: list[fx.Node], groups: nx.utils.UnionFind, loss: fx.Node) -> list[list[fx.Node]]:
    position = {node: at for at, node in enumerate(members)}
    home = {node: groups[node] for node in members}
    quotient = nx.DiGraph()
    quotient.add_nodes_from(home.values())
    for node in members:
        quotient.add_edges_from(
            (home[i], home[node]) for i in node.all_input_nodes if i in home and home[i] is not home[node]
        )
    merged = nx.condensation(quotient)
    of_root = merged.graph["mapping"]
    contents: dict[int, list[fx.Node]] = {c: [] for c in merged}
    for node in members:
        contents[of_root[home[node]]].append(node)
    last = of_root[home[loss]] if loss in home else None
    # A component is placed by its first node; the loss comes last.
    key = {c: (c == last, position[nodes[0]]) for c, nodes in contents.items()}
    return [contents[c] for c in nx.lexicographical_topological_sort(merged, key=key.__getitem__)]
