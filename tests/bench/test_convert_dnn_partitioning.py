"""Graphs of dnn-partitioning as graph files: a stage must cost what their definition of a device's load gives."""

from __future__ import annotations

import json
import random

import pytest
from converters import DATA, load

from hetpipe_compiler.frontend.profiled_graph import graph_chain, parse_profiled_graph
from hetpipe_compiler.passes.stage_sums import stage_sums

FILES = sorted((DATA / "dnn-partitioning").glob("*.json"))
needs_data = pytest.mark.skipif(not FILES, reason="the public profiles are not here")


def _load_ms(content, ours):
    """Their definition (the README of the data): latencies, outside producers once, own nodes that feed others once."""
    total = sum(node["fpgaLatency"] for node in content["nodes"] if node["id"] in ours)
    enter = {
        edge["sourceId"]: edge["cost"]
        for edge in content["edges"]
        if edge["sourceId"] not in ours and edge["destId"] in ours
    }
    leave = {
        edge["sourceId"]: edge["cost"]
        for edge in content["edges"]
        if edge["sourceId"] in ours and edge["destId"] not in ours
    }
    return total + sum(enter.values()) + sum(leave.values())


@needs_data
@pytest.mark.parametrize("path", FILES or [None], ids=lambda path: getattr(path, "stem", "none"))
def test_a_stage_costs_what_their_load_says(path):
    convert = load("convert_dnn_partitioning")
    content = json.loads(path.read_text())
    chain = graph_chain(parse_profiled_graph(convert.convert(content, "g")), ["k"])
    # A forward node brings along the backward nodes of its class.
    backward = {}
    for node in content["nodes"]:
        if node.get("isBackwardNode"):
            backward.setdefault(node["colorClass"], set()).add(node["id"])
    color = {node["id"]: node.get("colorClass") for node in content["nodes"]}
    rng = random.Random(0)
    for _ in range(20):
        lo, hi = sorted(rng.sample(range(len(chain) + 1), 2))
        if any(group[0] < border <= group[-1] for group in chain.colocate for border in (lo, hi)):
            continue
        sums = stage_sums(chain, range(lo, hi))
        forward = {int(name) for block in chain.blocks[lo:hi] for name in block.nodes}
        ours = forward.union(*(backward.get(color[node], set()) for node in forward))
        link_ms = (sums.received + sums.returned) / (convert.BANDWIDTH_GB_S * 1e6)
        assert sums.forward_ms["k"] + sums.backward_ms["k"] + link_ms == pytest.approx(
            _load_ms(content, ours), rel=1e-9, abs=1e-9
        )
        size = sum(node["size"] for node in content["nodes"] if node["id"] in ours)
        assert sums.resident == pytest.approx(size, abs=len(ours))
