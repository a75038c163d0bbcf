"""Merge a chain's blocks along its graph, so that fewer are left: RaNNC's block level (IPDPS 2021, section III-B).

1. *Coarsening*, round after round until few enough groups are left or none can be merged: groups in ascending order of
   time, each with the neighbour, not merged in this round, that makes the least time with it (equal times: the one with
   which it shares more bytes). What is merged stays convex: one of the two is read by nothing else, or reads nothing
   else. And what they hold must fit on the largest device.
2. *Uncoarsening*, back through the rounds: a group of an earlier round moves into a neighbour's group where fewer bytes
   then cross between groups, it fits there, and the group gets no slower than slow ones are (the mean and twice the
   standard deviation). Groups keep their order, and everything stays after what it reads.
3. *Compaction*: while there are still too many, the group with the least time joins a neighbour in order
   (`merge_blocks.smallest_merged`).

Blocks that must share a stage are one from the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hetpipe_compiler.ir.blocks import BlockChain, FloatArray
from hetpipe_compiler.ir.topological_order import topological_order
from hetpipe_compiler.passes.block_graph import BlockGraph, block_graph
from hetpipe_compiler.passes.merge_blocks import merge_blocks, smallest_merged

#: A chain of so many blocks is planned on 16 devices of 4 kinds in two seconds: no more are left by default.
MOST_BLOCKS = 2048

#: Group of each node, or of each group of the round before.
Home = list[int]


def shorten_chain(chain: BlockChain, max_blocks: int, most_bytes: int = 1 << 62) -> BlockChain:
    """The chain with its blocks merged into at most ``max_blocks`` by the module's rules, in an order of its own.

    ``most_bytes``: what the blocks that one is made of may hold.
    """
    if len(chain) <= max_blocks:
        return chain
    groups = merged_along_graph(chain, max_blocks, most_bytes)
    ends = np.cumsum([0, *map(len, groups)]).tolist()
    return merge_blocks(chain.permuted([block for group in groups for block in group]), tuple(pairwise(ends)))


def merged_along_graph(chain: BlockChain, most_groups: int, most_bytes: int) -> list[tuple[int, ...]]:
    """Groups of blocks, in topological order, each ascending; at most ``most_groups``, unless more must stay apart.

    Args:
        most_bytes: What the blocks of one group may hold.
    """
    graph = block_graph(chain)
    items = _Items.of(chain, graph)
    rounds: list[Home] = []
    level = _Level.of(chain, graph, items)
    while len(level) > most_groups:
        home = _matched(level, most_groups, most_bytes)
        if len(set(home)) == len(level):
            break
        rounds.append(home)
        level = level.merged(home)
    groups = _ordered(level)
    place = {group: at for at, group in enumerate(groups)}
    home = [place[group] for group in _composed(rounds, len(graph))]
    _refined(home, rounds, items, level, most_bytes)
    times = np.bincount(home, weights=items.time_ms, minlength=len(groups))
    bounds = smallest_merged(times.tolist(), items.cut_bytes(home, len(groups)), most_groups)
    members: list[list[int]] = [[] for _ in groups]
    for node, group in enumerate(home):
        members[group] += graph.members[node]
    return [tuple(sorted(block for group in members[lo:hi] for block in group)) for lo, hi in bounds]


@dataclass(frozen=True)
class _Items:
    """What the graph's nodes weigh and share.

    Attributes:
        time_ms, held: Per node, the mean over device kinds, and bytes.
        values: The nodes of each value, the one that makes it first; ``sizes``: its bytes, both ways.
        of_node: The values of each node.
        near: Of each node, those that make what it reads and that read what it makes.
    """

    time_ms: FloatArray
    held: list[int]
    values: list[list[int]]
    sizes: list[int]
    of_node: list[list[int]]
    near: list[list[int]]

    @classmethod
    def of(cls, chain: BlockChain, graph: BlockGraph) -> _Items:
        node_of = {block: node for node, blocks in enumerate(graph.members) for block in blocks}
        times = [graph.node_ms(chain.forward_ms[kind] + chain.backward_ms[kind]) for kind in chain.forward_ms]
        values: list[list[int]] = []
        sizes: list[int] = []
        of_node: list[list[int]] = [[] for _ in graph.members]
        near: list[list[int]] = [[] for _ in graph.members]
        for value in chain.values:
            maker = node_of[value.producer]
            readers = sorted({node_of[block] for block in value.consumers} - {maker})
            if readers:
                for node in (maker, *readers):
                    of_node[node].append(len(values))
                near[maker] += readers
                for node in readers:
                    near[node].append(maker)
                values.append([maker, *readers])
                sizes.append(value.forward_bytes + value.backward_bytes)
        return cls(np.mean(times, axis=0), graph.held.sum(axis=0).tolist(), values, sizes, of_node, near)

    def crossing_bytes(self, nodes: Iterable[int], home: Home) -> int:
        """Of these nodes' values, those that nodes of several groups share."""
        total = 0
        for value in {value for node in nodes for value in self.of_node[node]}:
            first, *others = self.values[value]
            total += self.sizes[value] if any(home[node] != home[first] for node in others) else 0
        return total

    def cut_bytes(self, home: Home, groups: int) -> list[int]:
        """Bytes that cross between each group and the next."""
        change = np.zeros(groups, dtype=np.int64)
        for nodes, size in zip(self.values, self.sizes, strict=True):
            places = [home[node] for node in nodes]
            change[min(places)] += size
            change[max(places)] -= size
        cuts: list[int] = np.cumsum(change).tolist()
        return cuts


@dataclass(frozen=True)
class _Level:
    """Groups of one round, and who reads whom.

    Attributes:
        after, before: Bytes by group that reads a group's values, and by group whose values it reads.
        ends: The groups of the batch and of the loss, where these are fixed: all others lie between.
    """

    time_ms: list[float]
    held: list[int]
    after: list[dict[int, int]]
    before: list[dict[int, int]]
    ends: tuple[int, int] | None

    def __len__(self) -> int:
        return len(self.time_ms)

    @classmethod
    def of(cls, chain: BlockChain, graph: BlockGraph, items: _Items) -> _Level:
        after: list[dict[int, int]] = [{} for _ in graph.members]
        for (maker, *readers), size in zip(items.values, items.sizes, strict=True):
            for reader in readers:
                after[maker][reader] = after[maker].get(reader, 0) + size
        ends = (0, len(graph) - 1) if chain.ends_fixed else None
        return cls(items.time_ms.tolist(), list(items.held), after, _reversed(after), ends)

    def merged(self, home: Home) -> _Level:
        """The groups that ``home`` makes of these."""
        count = max(home) + 1
        time_ms, held = [0.0] * count, [0] * count
        after: list[dict[int, int]] = [{} for _ in range(count)]
        for group, into in enumerate(home):
            time_ms[into] += self.time_ms[group]
            held[into] += self.held[group]
            for reader, size in self.after[group].items():
                if home[reader] != into:
                    after[into][home[reader]] = after[into].get(home[reader], 0) + size
        ends = (home[self.ends[0]], home[self.ends[1]]) if self.ends is not None else None
        return _Level(time_ms, held, after, _reversed(after), ends)

    def may_merge(self, first: int, second: int) -> bool:
        """Whether a group and one that reads it have no other path between them, for certain."""
        alone_after, alone_before = len(self.after[first]) == 1, len(self.before[second]) == 1
        if (first, second) == self.ends:
            return len(self) == 2
        if self.ends is not None and first == self.ends[0]:
            return alone_before
        if self.ends is not None and second == self.ends[1]:
            return alone_after
        return alone_after or alone_before


def _reversed(after: Sequence[dict[int, int]]) -> list[dict[int, int]]:
    before: list[dict[int, int]] = [{} for _ in after]
    for group, readers in enumerate(after):
        for reader, size in readers.items():
            before[reader][group] = size
    return before


def _matched(level: _Level, most_groups: int, most_bytes: int) -> Home:
    """One round of coarsening: the new group of each group."""
    mate: dict[int, int] = {}
    left = len(level)
    for group in sorted(range(len(level)), key=lambda g: (level.time_ms[g], g)):
        if left <= most_groups:
            break
        if group in mate:
            continue
        near = {w: size for w, size in level.after[group].items() if level.may_merge(group, w)}
        near |= {w: size for w, size in level.before[group].items() if level.may_merge(w, group)}
        fitting = [w for w in near if w not in mate and level.held[group] + level.held[w] <= most_bytes]
        if fitting:
            other = min(fitting, key=lambda w: (level.time_ms[w], -near[w], w))
            mate[group], mate[other] = other, group
            left -= 1
    home: Home = []
    groups = 0
    for group in range(len(level)):
        first = min(group, mate.get(group, group))
        home.append(home[first] if first < group else groups)
        groups += first == group
    return home


def _composed(rounds: Sequence[Home], nodes: int) -> Home:
    """Where each node is after all rounds."""
    home = list(range(nodes))
    for step in rounds:
        home = [step[group] for group in home]
    return home


def _ordered(level: _Level) -> list[int]:
    """Groups in topological order: of those that may come next the first, the batch's first and the loss's last."""
    first, last = level.ends or (-1, -1)
    return topological_order(level.after, lambda group: (group == last, group != first))


def _refined(home: Home, rounds: Sequence[Home], items: _Items, level: _Level, most_bytes: int) -> None:
    """Uncoarsening: move parts of groups in ``home`` (per node, places in order), larger parts first."""
    groups = len(level)
    time_ms = np.bincount(home, weights=items.time_ms, minlength=groups)
    held = np.bincount(home, weights=items.held, minlength=groups)
    slow_ms = float(time_ms.mean() + 2 * time_ms.std())
    fixed = {0, len(home) - 1} if level.ends is not None else set()
    for depth in range(len(rounds) - 1, -1, -1):
        parts: dict[int, list[int]] = {}
        for node, part in enumerate(_composed(rounds[:depth], len(home))):
            parts.setdefault(part, []).append(node)
        of_group = np.zeros(groups, dtype=np.int64)
        for nodes in parts.values():
            of_group[home[nodes[0]]] += 1
        for nodes in parts.values():
            source = home[nodes[0]]
            if all(home[other] == source for node in nodes for other in items.near[node]):
                continue
            if of_group[source] == 1 or not fixed.isdisjoint(nodes):
                continue
            targets = _reachable(nodes, home, items)
            if not targets:
                continue
            mine_ms, mine_held = float(items.time_ms[nodes].sum()), sum(items.held[node] for node in nodes)
            for target in targets:
                if held[target] + mine_held > most_bytes or time_ms[target] + mine_ms > max(slow_ms, time_ms[source]):
                    continue
                before = items.crossing_bytes(nodes, home)
                _move(nodes, target, home)
                if items.crossing_bytes(nodes, home) < before:
                    for sums, mine in ((time_ms, mine_ms), (held, mine_held), (of_group, 1)):
                        sums[source] -= mine
                        sums[target] += mine
                    break
                _move(nodes, source, home)


def _move(nodes: Sequence[int], group: int, home: Home) -> None:
    for node in nodes:
        home[node] = group


def _reachable(nodes: Sequence[int], home: Home, items: _Items) -> list[int]:
    """Neighbours' groups into which ``nodes`` may move: not before what they read, nor after what reads them."""
    mine = set(nodes)
    least, most, near = 0, len(home), set()
    for value in {value for node in nodes for value in items.of_node[node]}:
        maker, *readers = items.values[value]
        if maker in mine:
            others = [home[reader] for reader in readers if reader not in mine]
            most = min([most, *others])
        else:
            others = [home[maker]]
            least = max(least, home[maker])
        near.update(others)
    return sorted(group for group in near - {home[nodes[0]]} if least <= group <= most)
