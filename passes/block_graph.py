"""The dependence graph of a block chain: what may be cut apart, and in which orders.

A stage is the difference of two nested *closed sets* (sets of blocks that contain everything their members read). An
edge runs from the block that makes a value to each that reads it. Blocks that must share a stage are one node here,
together with all that lies between them on any path (a strongly connected component once they are tied by edges both
ways): no cut into stages can part those either, so nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx
import numpy as np

from hetpipe_compiler.ir.blocks import BlockChain, FloatArray, SharedBytes
from hetpipe_compiler.ir.topological_order import topological_order
from hetpipe_compiler.passes.kernels.arrays import IntArray, NodeArrays

#: Categories of bytes that a stage holds.
PARAMETERS, FROZEN, SAVED = 0, 1, 2


@dataclass(frozen=True)
class BlockGraph:
    """Nodes in topological order (by first block where several could come next).

    Attributes:
        members: Blocks of each node, ascending.
        predecessors, successors: Rows of nodes as (starts, nodes).
        linear: Whether only one order of the nodes is allowed.
        held: ``[category, node]``: bytes that this node alone holds (a profile's resident bytes count as frozen).
        replay: Per node, bytes that it needs to run its forward again.
        arrays: The rest.
    """

    members: tuple[tuple[int, ...], ...]
    predecessors: tuple[IntArray, IntArray]
    successors: tuple[IntArray, IntArray]
    linear: bool
    held: IntArray
    replay: IntArray
    arrays: NodeArrays

    def __len__(self) -> int:
        return len(self.members)

    def node_ms(self, per_block: FloatArray) -> FloatArray:
        """Sums over the blocks of each node."""
        return np.array([float(per_block[list(blocks)].sum()) for blocks in self.members])


def block_graph(chain: BlockChain, *, merged: Iterable[Sequence[int]] = (), linear: bool = False) -> BlockGraph:
    """The graph of ``chain``.

    Args:
        merged: More groups of blocks that stay together, besides ``chain.colocate``.
        linear: Allow the chain's own order only.
    """
    members = _nodes(chain, [*chain.colocate, *merged])
    node_of = np.zeros(len(chain), dtype=np.int64)
    for node, blocks in enumerate(members):
        node_of[list(blocks)] = node
    count = len(members)
    edges = {(int(node_of[a]), int(node_of[b])) for a, b in _edges(chain)}
    edges |= {(node, node + 1) for node in range(count - 1)} if linear else set()
    successors: list[list[int]] = [[] for _ in range(count)]
    predecessors: list[list[int]] = [[] for _ in range(count)]
    for a, b in sorted(edges):
        if a != b:
            successors[a].append(b)
            predecessors[b].append(a)
    held, arrays = _costs(chain, node_of, count)
    path = all(node + 1 in successors[node] for node in range(count - 1))
    replay = np.zeros(count, dtype=np.int64)
    np.add.at(replay, node_of[: len(chain.replay)], np.array(chain.replay, dtype=np.int64))
    return BlockGraph(members, _rows(predecessors), _rows(successors), path, held, replay, arrays)


def _edges(chain: BlockChain) -> set[tuple[int, int]]:
    edges = {(value.producer, reader) for value in chain.values for reader in value.consumers}
    if chain.ends_fixed:
        last = len(chain) - 1
        edges |= {(0, block) for block in range(1, last + 1)} | {(block, last) for block in range(last)}
    return edges


def _nodes(chain: BlockChain, groups: list[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Blocks that stay together, in topological order."""
    if not groups:
        return tuple((block,) for block in range(len(chain)))
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(chain)))
    graph.add_edges_from(_edges(chain))
    for group in groups:
        for a, b in pairwise(group):
            graph.add_edges_from(((a, b), (b, a)))
    members = sorted(tuple(sorted(part)) for part in nx.strongly_connected_components(graph))
    node_of = {block: node for node, blocks in enumerate(members) for block in blocks}
    readers: list[set[int]] = [set() for _ in members]
    for a, b in graph.edges:
        if node_of[a] != node_of[b]:
            readers[node_of[a]].add(node_of[b])
    return tuple(members[node] for node in topological_order(readers))


def _costs(chain: BlockChain, node_of_block: IntArray, count: int) -> tuple[IntArray, NodeArrays]:
    node_of: list[int] = node_of_block.tolist()
    value_nodes: list[list[int]] = []
    value_bytes: list[tuple[int, int]] = []
    for value in chain.values:
        producer = node_of[value.producer]
        readers = sorted({node_of[b] for b in value.consumers} - {producer})
        if readers and (value.forward_bytes or value.backward_bytes):
            value_nodes.append([producer, *readers])
            value_bytes.append((value.forward_bytes, value.backward_bytes))
    held = [[0] * count for _ in range(3)]
    item_nodes: list[list[int]] = []
    items: list[tuple[int, int]] = []
    for category, item in _held(chain):
        nodes = sorted({node_of[b] for b in item.blocks})
        if len(nodes) == 1:
            held[category][nodes[0]] += item.bytes
        else:
            item_nodes.append(nodes)
            items.append((category, item.bytes))
    most = np.zeros((2, count), dtype=np.int64)
    for block, size in enumerate(chain.workspace):
        most[0, node_of[block]] = max(most[0, node_of[block]], size)
    for item in chain.parameters:
        for block in item.blocks:
            most[1, node_of[block]] = max(most[1, node_of[block]], item.bytes)
    forward, backward = _columns(np.array(value_bytes, dtype=np.int64).reshape(-1, 2))
    categories, sizes = _columns(np.array(items, dtype=np.int64).reshape(-1, 2))
    order = np.argsort(-most, axis=1, kind="stable")
    arrays = NodeArrays(*_rows(value_nodes), forward, backward, *_rows(item_nodes), categories, sizes, most, order)
    return np.array(held, dtype=np.int64), arrays


def _held(chain: BlockChain) -> Iterable[tuple[int, SharedBytes]]:
    if chain.resident is not None:
        return [(FROZEN, SharedBytes("resident", size, (block,))) for block, size in enumerate(chain.resident)]
    categories = ((PARAMETERS, chain.parameters), (FROZEN, chain.frozen), (SAVED, chain.saved))
    return [(category, item) for category, items in categories for item in items]


def _columns(table: IntArray) -> list[IntArray]:
    return [np.ascontiguousarray(column) for column in table.T]


def _rows(rows: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray]:
    """Rows of unlike lengths as (starts, entries): row r is ``entries[starts[r]:starts[r + 1]]``."""
    starts = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=starts[1:])
    return starts, np.array([entry for row in rows for entry in row], dtype=np.int64)
