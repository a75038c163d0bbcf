"""Bring down the number of closed sets of a graph that has too many to search: its lightest nodes get out of the way.

Both ways of it leave the same nodes, so that few closed sets remain, and what lies between them is what the light nodes
weigh:

* *merged*: each light node joins the first heavier one that reads it, directly or through other light ones. What is
  merged so stays in order (whatever reads a light node comes no earlier than the first that does), and a plan of it is
  a plan of the graph.
* *left out*: the light nodes are gone, with their time, their bytes and their values; what they kept in order stays in
  order. Every plan of the graph is one of what is left, of no greater cost over the fastest link, so a bound on those
  is a bound for the graph. (A stage of light nodes alone would be gone too: hence the fastest link, as its neighbours
  could not do worse over another. The first and the last stage are never of light nodes alone: what nothing is read by,
  or reads nothing, is not light.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetpipe_compiler.ir.blocks import BlockChain, CrossingValue
from hetpipe_compiler.ir.cluster import Link
from hetpipe_compiler.passes.block_graph import BlockGraph, block_graph
from hetpipe_compiler.passes.closed_sets import ClosedSets, closed_sets
from hetpipe_compiler.passes.device_classes import DeviceClasses


@dataclass(frozen=True)
class Lightened:
    """A graph whose closed sets are too many, merged and with nodes left out; and all closed sets of either."""

    merged: BlockGraph
    merged_sets: ClosedSets
    rest: BlockChain
    rest_graph: BlockGraph
    rest_sets: ClosedSets


def lightened(chain: BlockChain, graph: BlockGraph, max_sets: int) -> Lightened | None:
    """With as few light nodes as leave at most ``max_sets`` closed sets; None if even all together leave more."""
    times = np.mean([graph.node_ms(chain.forward_ms[k] + chain.backward_ms[k]) for k in chain.forward_ms], axis=0)
    inner = (np.diff(graph.predecessors[0]) > 0) & (np.diff(graph.successors[0]) > 0)
    lightest = [int(node) for node in np.argsort(times, kind="stable") if inner[node]]
    in_order = chain.permuted([block for blocks in graph.members for block in blocks])
    ends = np.cumsum([0, *map(len, graph.members)]).tolist()

    def without(count: int) -> tuple[BlockChain, BlockGraph, ClosedSets] | None:
        rest = left_out(in_order, [range(ends[node], ends[node + 1]) for node in lightest[:count]])
        rest_graph = block_graph(rest)
        sets = closed_sets(rest_graph, max_sets)
        return None if sets is None else (rest, rest_graph, sets)

    best, low, high = without(len(lightest)), 0, len(lightest)
    if best is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        fewer = without(middle)
        low, high, best = (middle, high, best) if fewer is None else (low, middle, fewer)
    merged = block_graph(chain, merged=_joined(graph, lightest[:high]))
    merged_sets = closed_sets(merged, max_sets)
    assert merged_sets is not None, "fewer than with the light nodes left out"
    return Lightened(merged, merged_sets, *best)


def _joined(graph: BlockGraph, light: Sequence[int]) -> list[list[int]]:
    """The blocks of each node that is not light, with those of the light ones that join it."""
    starts, readers = graph.successors
    home = np.arange(len(graph))
    for node in sorted(light, reverse=True):
        home[node] = home[readers[starts[node] : starts[node + 1]]].min()
    groups: dict[int, list[int]] = {}
    for node in light:
        into = int(home[node])
        groups.setdefault(into, [*graph.members[into]]).extend(graph.members[node])
    return [sorted(blocks) for blocks in groups.values()]


def left_out(chain: BlockChain, runs: Sequence[range]) -> BlockChain:
    """The chain without these runs of blocks; what came after one of them still comes after all that came before it."""
    gone = {block: at for at, run in enumerate(runs) for block in run}
    place = {block: at for at, block in enumerate(b for b in range(len(chain)) if b not in gone)}
    before: list[set[int]] = [set() for _ in runs]
    order: set[tuple[int, int]] = set()
    values = []
    for value in sorted(chain.values, key=lambda value: value.producer):
        sources = before[gone[value.producer]] if value.producer in gone else {value.producer}
        for reader in value.consumers:
            if reader in gone:
                before[gone[reader]] |= sources
            elif value.producer in gone:
                order |= {(place[source], place[reader]) for source in sources}
        kept = tuple(place[reader] for reader in value.consumers if reader not in gone)
        if kept and value.producer not in gone:
            values.append(replace(value, producer=place[value.producer], consumers=kept))
    values += [CrossingValue(f"order{a}-{b}", a, (b,), 0, 0) for a, b in sorted(order)]
    return chain.picked(list(place), tuple(values))


def over_the_fastest_link(classes: DeviceClasses) -> DeviceClasses:
    """The same devices, any two of them linked by the largest bandwidth and the least latency that any two have."""
    if len(classes.links) < 2:
        return classes
    bandwidth = max(link.bandwidth_gb_s for link in classes.links)
    link = Link("fastest", bandwidth, min(link.latency_us for link in classes.links))
    return replace(classes, links=(link,), link_between=np.where(classes.link_between >= 0, 0, -1))
