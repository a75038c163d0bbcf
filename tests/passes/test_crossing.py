"""Values that cross closed sets, and the computation beyond which a stage reads or makes them, for certain."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from planner_cases import KINDS, chain_of, chains

from hetpipe_compiler.ir.blocks import CrossingValue
from hetpipe_compiler.passes.block_graph import block_graph
from hetpipe_compiler.passes.closed_sets import closed_sets
from hetpipe_compiler.passes.crossing import crossing


@settings(max_examples=40, deadline=None)
@given(chains(least=2))
def test_what_crosses_and_what_a_stage_surely_reads_and_makes(chain):
    graph = block_graph(chain)
    node_ms = np.stack([graph.node_ms(chain.forward_ms[name] + chain.backward_ms[name]) for name in KINDS])
    sets = closed_sets(graph, 1000)
    crosses = crossing(graph, sets, node_ms)
    inside = [set(sets.nodes(index)) for index in range(len(sets))]
    arrays = graph.arrays
    readers = [
        {node for node in range(len(graph)) if value in arrays.reads[slice(*arrays.read_starts[node : node + 2])]}
        for value in range(len(arrays.producer))
    ]
    for index, nodes in enumerate(inside):
        mine = {int(value) for value in crosses.values[crosses.starts[index] : crosses.starts[index + 1]]}
        assert mine == {v for v, made_by in enumerate(arrays.producer) if made_by in nodes and not readers[v] <= nodes}
        for kind, compute_ms in enumerate(node_ms[:, sorted(nodes)].sum(axis=1)):
            for value, made_by in enumerate(arrays.producer):
                if compute_ms > crosses.read_beyond_ms[kind, value]:
                    assert readers[value] <= nodes
                if compute_ms < crosses.made_beyond_ms[kind, value]:
                    assert made_by not in nodes


def test_a_branch_that_a_stage_must_reach_into():
    """Two branches of 1 and 5 ms between a head and a tail: sets beyond 6 ms have begun the short one too."""
    values = [CrossingValue("to_short", 0, (1,), 8, 8), CrossingValue("to_long", 0, (2,), 8, 8)]
    values += [CrossingValue("short", 1, (3,), 8, 8), CrossingValue("long", 2, (3,), 8, 8)]
    graph = block_graph(chain_of({"k": [1.0, 1.0, 5.0, 1.0]}, values=values))
    crosses = crossing(graph, closed_sets(graph, 100), np.array([[1.0, 1.0, 5.0, 1.0]]))
    assert crosses.read_beyond_ms[0] == pytest.approx([6.0, 2.0, 7.0, 7.0])
    assert crosses.made_beyond_ms[0] == pytest.approx([1.0, 1.0, 2.0, 6.0])
