"""A profiled graph of 100,001 nodes: read, coarsened to 2,048 blocks, planned on 6 devices, written."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_workloads import operator_graph, paper_cluster

from hetpipe_compiler.compile_graph import compile_graph
from hetpipe_compiler.frontend.profiled_graph import chain_graph
from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.options import CompileOptions


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """5,000 layers of 20 operators, each a hundredth of `operator_graph`'s usual values in size."""
    chain = operator_graph(5000)
    chain = replace(
        chain,
        values=tuple(
            replace(v, forward_bytes=v.forward_bytes // 5, backward_bytes=v.backward_bytes // 5) for v in chain.values
        ),
        saved=tuple(replace(item, bytes=item.bytes // 100) for item in chain.saved),
    )
    path = tmp_path_factory.mktemp("graph") / "graph.json"
    path.write_text(chain_graph(chain, {}).to_json())
    return path


def test_100001_nodes(benchmark, graph, tmp_path):
    """20 seconds."""
    paper = paper_cluster()
    nodes = [replace(node, devices=node.devices[:2]) for node in paper.nodes[:3]]
    cluster = Cluster("six", tuple(nodes), paper.network, None)
    groups = tmp_path / "groups.yaml"
    groups.write_text(f"virtual_workers: [[{', '.join(f'{d.id!r}' for d in cluster.devices)}]]\n")
    options = CompileOptions(policy=str(groups))
    result = benchmark.pedantic(compile_graph, (graph, cluster, tmp_path / "plan", options), rounds=1)
    benchmark.extra_info.update({name: round(seconds, 2) for name, seconds in result.seconds.items()})
    assert len(result.plan.virtual_workers[0].stages) == 6
