"""Known optima on public graphs, which the planner must meet. Skipped where the graphs are not at hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from converters import DATA, load

from hetpipe_compiler.frontend.profiled_graph import graph_chain, parse_profiled_graph
from hetpipe_compiler.ir.cluster import Cluster, Device, DeviceKind, Link, Node
from hetpipe_compiler.passes.allocate import Group
from hetpipe_compiler.passes.in_flight import InFlightRule
from hetpipe_compiler.passes.partition import partition

EXPECTED = json.loads((DATA / "expected.json").read_text()) if (DATA / "expected.json").is_file() else {}
needs_data = pytest.mark.skipif(not EXPECTED, reason="the public profiles are not here")
COMPUTE_ONLY = [
    (model, int(key[1:]), seconds)
    for model, optima in EXPECTED.get("compute_only_min_bottleneck_s", {}).items()
    for key, seconds in optima.items()
    if key.startswith("k")
]
DAG = EXPECTED.get("unequal_devices_dag", {}).get("cases", [])
CHAIN = EXPECTED.get("unequal_devices_chain", {}).get("cases", [])
LOADS = EXPECTED.get("dnn_partitioning_max_load_ms", [])


def devices_of(counts: dict[str, int], bandwidth_gb_s: float, memory_bytes: dict[str, int] | None = None) -> Cluster:
    """One node for each kind, all links alike and without latency."""
    link = Link("link", bandwidth_gb_s, 0.0)
    nodes = []
    for name, count in counts.items():
        memory = memory_bytes[name] if memory_bytes else 1 << 60
        kind = DeviceKind(name, memory, 1.0, None, None, None, 1.0, 1.0, 1.0, 0.0, 0, "profile")
        nodes.append(Node(name, tuple(Device(f"{name}:{i}", name, kind) for i in range(count)), link))
    return Cluster("flat", tuple(nodes), link)


def best(chain, cluster):
    plan = partition(chain, Group(cluster.devices), cluster, nm=1, in_flight_rule=InFlightRule(1.0))
    assert plan.optimal
    return plan


def pipedream_chain(profile: str, speeds: dict[str, float]):
    text = (DATA / profile).read_text()
    content = load("convert_pipedream").convert(text, Path(profile).name, directions=2, speeds=speeds)
    for node in content["nodes"]:
        node["resident_bytes"] = 0
    return graph_chain(parse_profiled_graph(content), [*speeds])


@needs_data
@pytest.mark.parametrize(("model", "count", "seconds"), COMPUTE_ONLY or [("", 0, 0.0)])
def test_equal_devices_without_communication(model, count, seconds):
    chain = pipedream_chain(f"pipedream/{model}.graph.txt", {"k": 1.0})
    plan = best(chain, devices_of({"k": count}, math.inf))
    assert plan.bottleneck_ms / 1e3 == pytest.approx(seconds, rel=1e-6)


@needs_data
@pytest.mark.parametrize("index", range(max(1, len(DAG))))
def test_unequal_devices_on_a_graph(index):
    case = DAG[index]
    speeds = {f"x{speed}": speed for speed in case["device_speeds"]}
    counts = {name: case["device_speeds"].count(speed) for name, speed in speeds.items()}
    bandwidth = case["bandwidth_bytes_per_s"]
    cluster = devices_of(counts, bandwidth / 1e9 if bandwidth else math.inf)
    plan = best(pipedream_chain(case["profile"], speeds), cluster)
    assert plan.bottleneck_ms / 1e3 == pytest.approx(case["bottleneck_s"], rel=1e-6)


@needs_data
@pytest.mark.parametrize("index", range(max(1, len(LOADS))))
def test_colocated_forward_and_backward_nodes(index):
    case = LOADS[index]
    content = json.loads((DATA / case["input"]).read_text())
    convert = load("convert_dnn_partitioning")
    chain = graph_chain(parse_profiled_graph(convert.convert(content, "g")), ["k"])
    cluster = devices_of({"k": content["maxFPGAs"]}, convert.BANDWIDTH_GB_S, {"k": content["maxSizePerFPGA"]})
    plan = best(chain, cluster)
    assert plan.bottleneck_ms == pytest.approx(case["max_load"], rel=1e-6)
    assert len(plan.stages) == case["accelerators_used"]


def test_the_cases_are_all_there():
    """A renamed key must not turn the tests above into nothing."""
    assert not EXPECTED or (len(COMPUTE_ONLY), len(DAG), len(CHAIN), len(LOADS)) == (9, 12, 5, 4)
