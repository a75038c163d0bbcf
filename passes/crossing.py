"""What a border of stages parts, and how much computation proves that a stage reads or makes a value itself.

A closed set parts what some of its nodes have in common with some outside: a value that is made inside and read
outside (it crosses the border), or a thing that nodes on both sides hold.

A stage that begins at a set need not read all that crosses it: a branch may pass it by. But a stage that ends at a set
with more computation than any closed set without one of the value's readers has them all inside, and one that begins at
a set with less computation than the value's producer and all before it take does not have the producer behind it. Both
are sums that depend on the value alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hetpipe_compiler.ir.blocks import FloatArray
from hetpipe_compiler.passes.block_graph import BlockGraph
from hetpipe_compiler.passes.cached_kernel import cached_kernel
from hetpipe_compiler.passes.closed_sets import ClosedSets
from hetpipe_compiler.passes.kernels.arrays import Int32Array, IntArray, NodeArrays, WordArray

#: Sums in another order differ by less, relative to the whole model.
_ROUNDING = 1e-11


class Beyond(NamedTuple):
    """Computation that proves something of a value.

    Attributes:
        read_ms: ``[class, value]``: closed sets with more have all readers of the value inside.
        made_ms: ``[class, value]``: closed sets with less do not have its producer inside.
    """

    read_ms: FloatArray
    made_ms: FloatArray


def beyond(graph: BlockGraph, node_ms: FloatArray) -> Beyond:
    """For ``node_ms[class, node]``."""
    nodes = graph.arrays
    count, whole = len(graph), node_ms.sum(axis=1, keepdims=True)
    before = _closure_sums(np.arange(count), *graph.predecessors, node_ms)
    after = _closure_sums(np.arange(count - 1, -1, -1), *graph.successors, node_ms)
    without = np.full((len(node_ms), len(nodes.forward_bytes)), -np.inf)
    reads = np.ones(len(nodes.value_nodes), dtype=np.bool_)
    reads[nodes.value_starts[:-1]] = False
    value = np.repeat(np.arange(len(nodes.forward_bytes)), np.diff(nodes.value_starts))[reads]
    for kind in range(len(node_ms)):
        np.maximum.at(without[kind], value, (whole - after)[kind, nodes.value_nodes[reads]])
    slack = _ROUNDING * whole
    made = np.ascontiguousarray(before[:, nodes.value_nodes[nodes.value_starts[:-1]]] - slack)
    return Beyond(without + slack, made)


def parted(sets: ClosedSets, starts: IntArray, nodes: IntArray) -> tuple[IntArray, Int32Array]:
    """Which things each set parts, as rows; thing i belongs to ``nodes[starts[i]:starts[i + 1]]``, two or more.

    Each set's parent comes before it.
    """
    return _parted(sets.parent, sets.added, sets.words, starts, nodes, *_things_of_nodes(sets, starts, nodes))


def shared_bytes(sets: ClosedSets, nodes: NodeArrays) -> IntArray:
    """``[category, set]``: bytes that several nodes hold, counted once where some of these are in the set."""
    sums = np.zeros((3, len(sets)), dtype=np.int64)
    if len(nodes.item_bytes):
        things = _things_of_nodes(sets, nodes.item_starts, nodes.item_nodes)
        rows = nodes.item_starts, nodes.item_nodes, *things, nodes.item_category, nodes.item_bytes
        _add_shared(sets.parent, sets.added, sets.words, *rows, sums)
    return sums


def _things_of_nodes(sets: ClosedSets, starts: IntArray, nodes: IntArray) -> tuple[IntArray, IntArray]:
    """The things of each node, as rows."""
    most = 64 * sets.words.shape[1]
    of_node = np.zeros(most + 1, dtype=np.int64)
    np.cumsum(np.bincount(nodes, minlength=most), out=of_node[1:])
    return of_node, np.repeat(np.arange(len(starts) - 1), np.diff(starts))[np.argsort(nodes, kind="stable")]


@cached_kernel
def _count_inside(words: WordArray, nodes: IntArray) -> int:
    count = 0
    for node in nodes:
        count += (words[node >> 6] >> np.uint64(node & 63)) & np.uint64(1)
    return count


@cached_kernel
def _parted(
    parent: Int32Array,
    added: Int32Array,
    words: WordArray,
    starts: IntArray,
    nodes: IntArray,
    things_starts: IntArray,
    things: IntArray,
) -> tuple[IntArray, Int32Array]:
    count = parent.shape[0]
    row_starts, rows, used = np.zeros(count + 1, dtype=np.int64), np.empty(1024, dtype=np.int32), 0
    for index in range(1, count):
        before, node = parent[index], added[index]
        first, last = row_starts[before], row_starts[before + 1]
        opened_first, opened_last = things_starts[node], things_starts[node + 1]
        if used + last - first + opened_last - opened_first > len(rows):
            more = np.empty(2 * (used + last - first + opened_last - opened_first), dtype=np.int32)
            more[:used] = rows[:used]
            rows = more
        for thing in rows[first:last]:
            mine = nodes[starts[thing] : starts[thing + 1]]
            if _count_inside(words[index], mine) < len(mine):
                rows[used] = thing
                used += 1
        for thing in things[opened_first:opened_last]:
            if _count_inside(words[index], nodes[starts[thing] : starts[thing + 1]]) == 1:
                rows[used] = thing
                used += 1
        row_starts[index + 1] = used
    return row_starts, rows[:used].copy()


@cached_kernel
def _add_shared(
    parent: Int32Array,
    added: Int32Array,
    words: WordArray,
    starts: IntArray,
    nodes: IntArray,
    things_starts: IntArray,
    things: IntArray,
    category: IntArray,
    n_bytes: IntArray,
    sums: IntArray,
) -> None:
    for index in range(1, parent.shape[0]):
        before, node = parent[index], added[index]
        sums[:, index] = sums[:, before]
        for item in things[things_starts[node] : things_starts[node + 1]]:
            if _count_inside(words[index], nodes[starts[item] : starts[item + 1]]) == 1:
                sums[category[item], index] += n_bytes[item]


@cached_kernel
def _closure_sums(order: IntArray, starts: IntArray, neighbours: IntArray, node_ms: FloatArray) -> FloatArray:
    """Per class and node, the sum over the node and all that ``neighbours`` lead to; ``order`` has those first."""
    count = len(order)
    sums = np.zeros(node_ms.shape)
    within = np.zeros((count, (count + 63) // 64), dtype=np.uint64)
    for node in order:
        within[node, node >> 6] |= np.uint64(1) << np.uint64(node & 63)
        for other in neighbours[starts[node] : starts[node + 1]]:
            within[node] |= within[other]
        for other in range(count):
            if (within[node, other >> 6] >> np.uint64(other & 63)) & np.uint64(1):
                sums[:, node] += node_ms[:, other]
    return sums
