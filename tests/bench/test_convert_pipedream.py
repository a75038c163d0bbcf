"""PipeDream's profiles as graph files: the published best plans must cost what is published."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from converters import DATA, ROOT, load

from hetpipe_compiler.frontend.profiled_graph import graph_chain, load_profiled_graph, parse_profiled_graph

EXPECTED = DATA / "expected.json"
CASES = json.loads(EXPECTED.read_text())["unequal_devices_dag"]["cases"] if EXPECTED.is_file() else []
needs_data = pytest.mark.skipif(not CASES, reason="the public profiles are not here")


def line(name, description, forward, backward, activation, parameter):
    times = f"forward_compute_time={forward:.3f}, backward_compute_time={backward:.3f}"
    return f"{name} -- {description} -- {times}, activation_size={activation}, parameter_size={parameter:.3f}"


TEXT = "\n".join(
    [
        line("node2", "LSTM(8, 8)", 1.5, 2.5, "[6.0; 2.0]", 4),
        line("node1", "Input0", 0, 0, "0.0", 0),
        line("node3", "__getitem__(0)", 0, 0, "6.0", 0),
        line("node4", "__getitem__(1)", 0, 0, "2.0", 0),
        line("node5", "Conv2d(3, 64, kernel_size=(3, 3))", 3, 4, "9.0", 0),
        "\tnode1 -- node2",
        "\tnode2 -- node3",
        "\tnode2 -- node4",
        "\tnode3 -- node5",
    ]
)


def test_lists_inputs_and_dead_ends():
    content = load("convert_pipedream").convert(TEXT, "toy", batch_size=64, speeds={"fast": 1.0, "slow": 0.5})
    chain = graph_chain(parse_profiled_graph(content), ["fast", "slow"])
    assert chain.batch_size == 64
    assert [block.nodes[0] for block in chain.blocks] == ["node2", "node3", "node5"]
    assert chain.blocks[2].name == "Conv2d(3, 64, kernel_size=(3, 3))"
    assert list(chain.forward_ms["slow"]) == [3.0, 0.0, 6.0]
    assert list(chain.backward_ms["fast"]) == [2.5, 0.0, 4.0]
    assert [(v.producer, v.consumers, v.forward_bytes) for v in chain.values] == [(0, (1,), 8), (1, (2,), 6)]
    assert [p.bytes for p in chain.parameters] == [4]


def test_another_line_is_refused():
    with pytest.raises(ValueError, match="line 2"):
        load("convert_pipedream").convert(TEXT.splitlines()[0] + "\nwhat is this", "toy")


@needs_data
@pytest.mark.parametrize("index", range(max(1, len(CASES))))
def test_a_published_plan_costs_what_is_published(index):
    case = CASES[index]
    text = (DATA / case["profile"]).read_text()
    chain = graph_chain(parse_profiled_graph(load("convert_pipedream").convert(text, "p", directions=2)), ["k"])
    stage_of = {name: at for at, stage in enumerate(case["one_optimal_plan"]) for name in stage["nodes"]}
    assert set(stage_of) == {block.nodes[0] for block in chain.blocks}
    home = [stage_of[block.nodes[0]] for block in chain.blocks]
    seconds = []
    for at, stage in enumerate(case["one_optimal_plan"]):
        mine = [b for b, s in enumerate(home) if s == at]
        ms = (chain.forward_ms["k"][mine].sum() + chain.backward_ms["k"][mine].sum()) / stage["speed"]
        received = sum(
            v.forward_bytes for v in chain.values if home[v.producer] != at and at in {home[c] for c in v.consumers}
        )
        returned = sum(
            v.backward_bytes for v in chain.values if home[v.producer] == at and {home[c] for c in v.consumers} - {at}
        )
        seconds.append(ms / 1e3 + (received + returned) / (case["bandwidth_bytes_per_s"] or float("inf")))
    assert max(seconds) == pytest.approx(case["bottleneck_s"], rel=1e-6)


@needs_data
def test_as_a_command(tmp_path):
    out = tmp_path / "vgg16.json"
    source = DATA / "pipedream" / "vgg16.graph.txt"
    command = [sys.executable, "-m", "bench.convert_pipedream", str(source), "-o", str(out), "--batch-size", "64"]
    subprocess.run(command, cwd=ROOT, check=True)
    graph = load_profiled_graph(out)
    assert (graph.name, graph.batch_size, len(graph.nodes)) == ("vgg16", 64, 40)
