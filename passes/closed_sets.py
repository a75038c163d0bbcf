"""All closed sets of a block graph, and how each grows by one node.

Sets are rows of 64-bit words. They are found breadth first from the empty set (each grows by any node whose
predecessors it contains) and told apart by a hash table; the order of discovery depends on the graph alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from hetpipe_compiler.ir.blocks import FloatArray
from hetpipe_compiler.passes.block_graph import BlockGraph
from hetpipe_compiler.passes.cached_kernel import cached_kernel
from hetpipe_compiler.passes.kernels.arrays import Int32Array, IntArray, WordArray

#: Integers or floating point numbers.
Numbers = TypeVar("Numbers", IntArray, FloatArray)


@dataclass(frozen=True)
class ClosedSets:
    """Closed sets, the empty one first, the full one last, each after its subsets.

    Attributes:
        words: ``[set, word]``: bit b of word w is node 64 w + b.
        grow_starts, grow_nodes, grow_sets: Set s plus node ``grow_nodes[i]`` is set ``grow_sets[i]``, for i in
            ``grow_starts[s]:grow_starts[s + 1]``; -1 where that set is not among these.
        parent, added: A set from which this one is made, and by which node (-1 for the empty set).
    """

    words: WordArray
    grow_starts: IntArray
    grow_nodes: Int32Array
    grow_sets: Int32Array
    parent: Int32Array
    added: Int32Array

    def __len__(self) -> int:
        return len(self.parent)

    def nodes(self, index: int) -> tuple[int, ...]:
        """Nodes of a set, ascending."""
        bits = np.unpackbits(self.words[index].view(np.uint8), bitorder="little")
        return tuple(int(node) for node in np.flatnonzero(bits))

    def sums(self, rows: Numbers) -> Numbers:
        """``[row, set]``: the sum over the set's nodes of ``rows[row, node]``."""
        return _sums(self.parent, self.added, rows)

    def reordered(self, order: IntArray) -> ClosedSets:
        """The same sets, set ``order[i]`` now being set i."""
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        counts = np.diff(self.grow_starts)[order]
        starts = np.zeros(len(order) + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        pick = np.repeat(self.grow_starts[:-1][order] - starts[:-1], counts) + np.arange(starts[-1])
        parent = self.parent[order]
        return ClosedSets(
            words=np.ascontiguousarray(self.words[order]),
            grow_starts=starts,
            grow_nodes=self.grow_nodes[pick],
            grow_sets=np.where(self.grow_sets[pick] >= 0, place[self.grow_sets[pick]], -1).astype(np.int32),
            parent=np.where(parent >= 0, place[parent], -1).astype(np.int32),
            added=self.added[order],
        )


def closed_sets(graph: BlockGraph, limit: int, band: int | None = None) -> ClosedSets | None:
    """The closed sets of ``graph``; None if there are more than ``limit``.

    With ``band`` only those whose last node comes less than ``band`` nodes after the first one that they lack, in the
    graph's own order. Any two nested ones are still linked by sets that grow a node at a time.
    """
    count = len(graph)
    tokens = np.random.default_rng(20200715).integers(1, 1 << 63, count, dtype=np.int64).astype(np.uint64)
    band = count if band is None else band
    found = _enumerate(count, *graph.predecessors, *graph.successors, tokens, limit, band)
    return ClosedSets(*found) if len(found[0]) <= limit else None


def widest_band(graph: BlockGraph, limit: int) -> ClosedSets:
    """The closed sets within the widest band that holds at most ``limit`` (or one, the graph's own order)."""
    best, low, high = closed_sets(graph, len(graph) + 1, 1), 1, 2
    while (wider := closed_sets(graph, limit, high)) is not None:
        if high >= len(graph):
            return wider
        best, low, high = wider, high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if (wider := closed_sets(graph, limit, middle)) is not None:
            best, low = wider, middle
        else:
            high = middle
    assert best is not None
    return best


@cached_kernel
def _sums(parent: Int32Array, added: Int32Array, rows: Numbers) -> Numbers:
    """Each set's parent comes before it."""
    sums: Numbers = np.zeros((rows.shape[0], parent.shape[0]), dtype=rows.dtype)
    for index in range(1, parent.shape[0]):
        for row in range(rows.shape[0]):
            sums[row, index] = sums[row, parent[index]] + rows[row, added[index]]
    return sums


@cached_kernel
def _holds_all(words: WordArray, nodes: IntArray) -> bool:
    for node in nodes:  # noqa: SIM110 (numba)
        if not (words[node >> 6] >> np.uint64(node & 63)) & np.uint64(1):
            return False
    return True


@cached_kernel
def _first_missing(words: WordArray) -> int:
    at = 0
    while at < 64 * words.shape[0] and (words[at >> 6] >> np.uint64(at & 63)) & np.uint64(1):
        at += 1
    return at


@cached_kernel
def _find(table: Int32Array, hashes: WordArray, sets: WordArray, key: np.uint64, words: WordArray) -> int:
    """Where in ``table`` the set ``words`` is, or the free place where it belongs."""
    mask = np.uint64(len(table) - 1)
    at = key & mask
    while table[at] >= 0:
        held = table[at]
        if hashes[held] == key:
            same = True
            for w in range(words.shape[0]):
                if sets[held, w] != words[w]:
                    same = False
                    break
            if same:
                break
        at = (at + np.uint64(1)) & mask
    return int(at)


@cached_kernel
def _rehash(size: int, hashes: WordArray, count: int) -> Int32Array:
    table = np.full(size, -1, dtype=np.int32)
    mask = np.uint64(size - 1)
    for index in range(count):
        at = hashes[index] & mask
        while table[at] >= 0:
            at = (at + np.uint64(1)) & mask
        table[at] = index
    return table


@cached_kernel
def _longer(array: Any) -> Any:
    """Twice as many entries, or rows."""
    longer = np.zeros((2 * len(array),) + array.shape[1:], dtype=array.dtype)  # noqa: RUF005 (numba)
    longer[: len(array)] = array
    return longer


@cached_kernel
def _enumerate(
    nodes: int,
    predecessor_starts: IntArray,
    predecessors: IntArray,
    successor_starts: IntArray,
    successors: IntArray,
    tokens: WordArray,
    limit: int,
    band: int,
) -> tuple[WordArray, IntArray, Int32Array, Int32Array, Int32Array, Int32Array]:
    """Stops as soon as there are more than ``limit`` sets."""
    width = max(1, (nodes + 63) // 64)
    room = 1024
    sets, hashes = np.zeros((room, width), dtype=np.uint64), np.zeros(room, dtype=np.uint64)
    parent, added = np.full(room, -1, dtype=np.int32), np.full(room, -1, dtype=np.int32)
    starts = np.zeros(room + 1, dtype=np.int64)
    grow_nodes, grow_sets = np.empty(room, dtype=np.int32), np.empty(room, dtype=np.int32)
    table = _rehash(4 * room, hashes, 1)
    ready, words = np.empty(nodes, dtype=np.int64), np.empty(width, dtype=np.uint64)
    count, current, used = 1, 0, 0
    while current < count and count <= limit:
        # What can be added: what could be added to the parent, and what waited for the last node.
        many = 0
        if current == 0:
            for node in range(nodes):
                if predecessor_starts[node] == predecessor_starts[node + 1]:
                    ready[many] = node
                    many += 1
        else:
            last, before = added[current], parent[current]
            for at in range(starts[before], starts[before + 1]):
                if grow_nodes[at] != last:
                    ready[many] = grow_nodes[at]
                    many += 1
            for node in successors[successor_starts[last] : successor_starts[last + 1]]:
                if _holds_all(sets[current], predecessors[predecessor_starts[node] : predecessor_starts[node + 1]]):
                    ready[many] = node
                    many += 1
        while used + many > len(grow_nodes):
            grow_nodes, grow_sets = _longer(grow_nodes), _longer(grow_sets)
        end = _first_missing(sets[current]) + band
        for node in ready[:many]:
            if node >= end:
                grow_nodes[used], grow_sets[used] = node, -1
                used += 1
                continue
            words[:] = sets[current]
            words[node >> 6] |= np.uint64(1) << np.uint64(node & 63)
            key = hashes[current] ^ tokens[node]
            place = _find(table, hashes, sets, key, words)
            if table[place] < 0:
                if count == room:
                    sets, hashes, starts = _longer(sets), _longer(hashes), _longer(starts)
                    parent, added = _longer(parent), _longer(added)
                    room *= 2
                    table = _rehash(4 * room, hashes, count)
                    place = _find(table, hashes, sets, key, words)
                sets[count], hashes[count] = words, key
                parent[count], added[count] = current, node
                table[place] = count
                count += 1
            grow_nodes[used], grow_sets[used] = node, table[place]
            used += 1
        current += 1
        starts[current] = used
    return (
        sets[:count].copy(),
        starts[: count + 1].copy(),
        grow_nodes[:used].copy(),
        grow_sets[:used].copy(),
        parent[:count].copy(),
        added[:count].copy(),
    )
