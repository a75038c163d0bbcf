"""The values that cross each closed set, and how much computation proves that a stage reads or makes one itself.

A value crosses a set if it is made inside and read outside. A stage that begins at a set need not read all that crosses
it: a branch may pass it by. But a stage that ends at a set with more computation than any closed set without one of the
value's readers has them all inside, and one that begins at a set with less computation than the value's producer and
all before it take does not have the producer behind it. Both are sums that depend on the value alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from hetpipe_compiler.ir.blocks import FloatArray
from hetpipe_compiler.passes.block_graph import BlockGraph, IntArray, NodeArrays
from hetpipe_compiler.passes.closed_sets import ClosedSets, Int32Array, WordArray

#: Sums in another order differ by less, relative to the whole model.
_ROUNDING = 1e-11


class Crossing(NamedTuple):
    """``values[starts[s]:starts[s + 1]]`` cross set s.

    Attributes:
        read_beyond_ms: ``[class, value]``: closed sets with more computation have all readers of the value inside.
        made_beyond_ms: ``[class, value]``: closed sets with less computation do not have its producer inside.
    """

    starts: IntArray
    values: Int32Array
    read_beyond_ms: FloatArray
    made_beyond_ms: FloatArray


def crossing(graph: BlockGraph, sets: ClosedSets, node_ms: FloatArray) -> Crossing:
    """For ``node_ms[class, node]``; each set's parent comes before it."""
    nodes = graph.arrays
    count, whole = len(graph), node_ms.sum(axis=1, keepdims=True)
    before = _closure_sums(np.arange(count), *graph.predecessors, node_ms)
    after = _closure_sums(np.arange(count - 1, -1, -1), *graph.successors, node_ms)
    without = np.full((len(node_ms), len(nodes.producer)), -np.inf)
    reader = np.repeat(np.arange(count), np.diff(nodes.read_starts))
    for kind in range(len(node_ms)):
        np.maximum.at(without[kind], nodes.reads, (whole - after)[kind, reader])
    starts, values = _crossing(nodes, sets.parent, sets.added, sets.words, *_readers(nodes))
    slack = _ROUNDING * whole
    made = np.ascontiguousarray(before[:, nodes.producer] - slack)
    return Crossing(starts, values, without + slack, made)


def _readers(nodes: NodeArrays) -> tuple[IntArray, IntArray]:
    """Rows of the nodes that read each value."""
    reader = np.repeat(np.arange(len(nodes.read_starts) - 1), np.diff(nodes.read_starts))
    starts = np.zeros(len(nodes.producer) + 1, dtype=np.int64)
    np.cumsum(np.bincount(nodes.reads, minlength=len(nodes.producer)), out=starts[1:])
    return starts, reader[np.argsort(nodes.reads, kind="stable")]


@numba.njit(cache=True)
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


@numba.njit(cache=True)
def _crossing(
    nodes: NodeArrays,
    parent: Int32Array,
    added: Int32Array,
    words: WordArray,
    reader_starts: IntArray,
    readers: IntArray,
) -> tuple[IntArray, Int32Array]:
    count = parent.shape[0]
    starts, values, used = np.zeros(count + 1, dtype=np.int64), np.empty(1024, dtype=np.int32), 0
    for index in range(1, count):
        before, node = parent[index], added[index]
        first, last = starts[before], starts[before + 1]
        made_first, made_last = nodes.made_starts[node], nodes.made_starts[node + 1]
        if used + last - first + made_last - made_first > len(values):
            more = np.empty(2 * (used + last - first + made_last - made_first), dtype=np.int32)
            more[:used] = values[:used]
            values = more
        for value in values[first:last]:
            for reader in readers[reader_starts[value] : reader_starts[value + 1]]:
                if not (words[index, reader >> 6] >> np.uint64(reader & 63)) & np.uint64(1):
                    values[used] = value
                    used += 1
                    break
        for at in range(made_first, made_last):
            values[used] = nodes.made[at]
            used += 1
        starts[index + 1] = used
    return starts, values[:used].copy()
