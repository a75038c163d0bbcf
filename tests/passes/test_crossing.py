"""What closed sets part, what their nodes hold, and the computation that proves that a stage reads or makes a value."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from planner_cases import KINDS, chain_of, chains

from hetpipe_compiler.ir.blocks import CrossingValue
from hetpipe_compiler.passes.block_graph import block_graph
from hetpipe_compiler.passes.closed_sets import closed_sets
from hetpipe_compiler.passes.crossing import beyond, parted, shared_bytes


def rows(starts, entries):
    return [[int(entry) for entry in entries[a:b]] for a, b in pairwise(starts)]


@settings(max_examples=40, deadline=None)
@given(chains(least=2))
def test_what_crosses_and_what_a_stage_surely_reads_and_makes(chain):
    graph = block_graph(chain)
    node_ms = np.stack([graph.node_ms(chain.forward_ms[name] + chain.backward_ms[name]) for name in KINDS])
    sets = closed_sets(graph, 1000)
    arrays, proves = graph.arrays, beyond(graph, node_ms)
    inside = [set(sets.nodes(index)) for index in range(len(sets))]
    of_value = rows(arrays.value_starts, arrays.value_nodes)
    crossing = rows(*parted(sets, arrays.value_starts, arrays.value_nodes))
    for nodes, mine in zip(inside, crossing, strict=True):
        assert set(mine) == {v for v, (by, *readers) in enumerate(of_value) if by in nodes and not {*readers} <= nodes}
        assert len(set(mine)) == len(mine)
        for kind, compute_ms in enumerate(node_ms[:, sorted(nodes)].sum(axis=1)):
            for value, (made_by, *readers) in enumerate(of_value):
                if compute_ms > proves.read_ms[kind, value]:
                    assert {*readers} <= nodes
                if compute_ms < proves.made_ms[kind, value]:
                    assert made_by not in nodes


@settings(max_examples=40, deadline=None)
@given(chains(least=2))
def test_what_several_nodes_hold_is_parted_and_counts_once(chain):
    graph = block_graph(chain)
    sets, arrays = closed_sets(graph, 1000), graph.arrays
    holders = [set(nodes) for nodes in rows(arrays.item_starts, arrays.item_nodes)]
    shared = shared_bytes(sets, arrays)
    for index, mine in enumerate(rows(*parted(sets, arrays.item_starts, arrays.item_nodes))):
        nodes = set(sets.nodes(index))
        assert set(mine) == {item for item, held_by in enumerate(holders) if held_by & nodes and held_by - nodes}
        expected = [0, 0, 0]
        for held_by, category, size in zip(holders, arrays.item_category, arrays.item_bytes, strict=True):
            expected[category] += size if held_by & nodes else 0
        assert shared[:, index].tolist() == expected


def test_a_branch_that_a_stage_must_reach_into():
    """Two branches of 1 and 5 ms between a head and a tail: sets beyond 6 ms have begun the short one too."""
    values = [CrossingValue("to_short", 0, (1,), 8, 8), CrossingValue("to_long", 0, (2,), 8, 8)]
    values += [CrossingValue("short", 1, (3,), 8, 8), CrossingValue("long", 2, (3,), 8, 8)]
    graph = block_graph(chain_of({"k": [1.0, 1.0, 5.0, 1.0]}, values=values))
    proves = beyond(graph, np.array([[1.0, 1.0, 5.0, 1.0]]))
    assert proves.read_ms[0] == pytest.approx([6.0, 2.0, 7.0, 7.0])
    assert proves.made_ms[0] == pytest.approx([1.0, 1.0, 2.0, 6.0])
