"""Profiled graph files: what they mean as a chain, and one error that names the place for each mistake."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.profiled_graph import chain_graph, graph_chain, parse_profiled_graph, read_profiled_graph
from hetpipe_compiler.ir.blocks import CrossingValue, SharedBytes


def node(node_id, forward=1.0, backward=2.0, **more):
    return {"id": node_id, "forward_ms": {"*": forward}, "backward_ms": {"*": backward}, **more}


def graph(nodes, edges=(), **more):
    return {"format": "hetpipe-graph", "version": 1, "nodes": nodes, "edges": list(edges), **more}


def edge(a, b, **more):
    return {"from": a, "to": b, **more}


def chain(content, kinds=("k",)):
    return graph_chain(parse_profiled_graph(content, "g.json"), kinds, "g.json")


DIAMOND = graph(
    [
        node("d", output_bytes=1),
        node("a", output_bytes=10, parameter_bytes=5, name="first"),
        node("c", output_bytes=30, saved_bytes=7),
        node("b", output_bytes=20),
    ],
    [edge("a", "b"), edge("a", "c"), edge("b", "d"), edge("c", "d"), edge("a", "d")],
    name="diamond",
    batch_size=4,
    optimizer_bytes_per_parameter_byte=2.0,
)


def test_order_is_topological_and_otherwise_the_files():
    made = chain(DIAMOND)
    assert [block.nodes for block in made.blocks] == [("a",), ("c",), ("b",), ("d",)]
    assert made.blocks[0].name == "first"
    assert (made.name, made.batch_size, made.optimizer_factor) == ("diamond", 4, 2.0)


def test_a_value_is_one_however_many_read_it():
    made = chain(DIAMOND)
    assert made.values == (
        CrossingValue("a", 0, (1, 2, 3), 10, 10),
        CrossingValue("c", 1, (3,), 30, 30),
        CrossingValue("b", 2, (3,), 20, 20),
    )
    assert made.parameters == (SharedBytes("a", 5, (0,)),)
    assert made.saved == tuple(
        SharedBytes(n, s, (at,)) for at, (n, s) in enumerate([("a", 10), ("c", 7), ("b", 20), ("d", 1)])
    )
    assert made.resident is None


def test_edges_of_other_sizes_are_other_values():
    edges = [edge("a", "b", bytes=3), edge("a", "c", bytes=4), edge("a", "d", bytes=3), edge("a", "d", bytes=0)]
    made = chain(graph([node(n, output_bytes=9) for n in "abcd"], edges))
    assert [(v.name, v.consumers, v.forward_bytes) for v in made.values] == [
        ("a", (1, 3), 3),
        ("a#2", (2,), 4),
        ("a#3", (3,), 0),
    ]


def test_named_values_and_gradients():
    edges = [edge("a", "b", bytes=3, value="x"), edge("a", "b", bytes=3, value="y", gradient_bytes=0)]
    made = chain(graph([node("a"), node("b")], edges))
    assert made.values == (CrossingValue("x", 0, (1,), 3, 3), CrossingValue("y", 0, (1,), 3, 0))


def test_times_per_kind_and_the_star():
    nodes = [node("a"), node("b")]
    nodes[0]["forward_ms"] = {"fast": 0.5, "*": 3}
    nodes[1]["estimated"] = ["slow"]
    made = chain(graph(nodes), kinds=("fast", "slow"))
    np.testing.assert_array_equal(made.forward_ms["fast"], [0.5, 1.0])
    np.testing.assert_array_equal(made.forward_ms["slow"], [3.0, 1.0])
    assert made.measured_share("fast") == 1.0
    assert made.measured_share("slow") == pytest.approx(5 / 8)
    assert made.measured_share("slow", (0, 1)) == 1.0


def test_resident_and_colocate():
    nodes = [
        node(n, resident_bytes=at, colocate=c)
        for at, (n, c) in enumerate([("a", "x"), ("b", None), ("c", "x"), ("d", "y")])
    ]
    made = chain(graph(nodes))
    assert made.resident == (0, 1, 2, 3)
    assert made.colocate == ((0, 2),)


def test_frozen_bytes_are_one_storage():
    nodes = [node("a", frozen_bytes={"table": 8}), node("b", frozen_bytes={"table": 8, "own": 1})]
    assert chain(graph(nodes)).frozen == (SharedBytes("table", 8, (0, 1)), SharedBytes("own", 1, (1,)))


def test_integer_ids_and_float_bytes():
    made = chain(graph([node(1, output_bytes=4.0), node(2)], [edge(1, "2")]))
    assert made.values == (CrossingValue("1", 0, (1,), 4, 4),)


BASE = graph([node("a"), node("b"), node("c")], [edge("a", "b"), edge("b", "c")])


def broken(change):
    content = copy.deepcopy(BASE)
    change(content)
    return content


MISTAKES = [
    (lambda g: g["nodes"][1].update(forward_ms={"*": -1}), "HP132", "g.json: nodes[1].forward_ms.*"),
    (lambda g: g["nodes"][1].update(backward_ms={"k": math.nan}), "HP132", "g.json: nodes[1].backward_ms.k"),
    (lambda g: g["nodes"][1].update(output_bytes=math.inf), "HP132", "g.json: nodes[1].output_bytes"),
    (lambda g: g["nodes"][1].update(saved_bytes=-5), "HP132", "g.json: nodes[1].saved_bytes"),
    (lambda g: g["edges"][1].update(bytes=-5), "HP132", "g.json: edges[1].bytes"),
    (lambda g: g.update(batch_size=0), "HP132", "g.json: batch_size"),
    (lambda g: g["nodes"][1].update(output_bytes=True), "HP131", "g.json: nodes[1].output_bytes"),
    (lambda g: g["nodes"][1].update(output_byte=1), "HP131", "g.json: nodes[1].output_byte"),
    (lambda g: g["nodes"][1].pop("forward_ms"), "HP131", "g.json: nodes[1].forward_ms"),
    (lambda g: g["nodes"][1].update(id=None), "HP131", "g.json: nodes[1].id"),
    (lambda g: g.update(nodes=[]), "HP131", "g.json: nodes"),
    (lambda g: g.update(version=2), "HP131", "g.json: version"),
    (lambda g: g.update(format="other"), "HP131", "g.json: format"),
    (lambda g: g["nodes"][2].update(id="a"), "HP133", "g.json: nodes[2].id"),
    (lambda g: g["edges"][0].update({"from": "z"}), "HP133", "g.json: edges[0].from"),
    (lambda g: g["edges"][0].update({"to": "z"}), "HP133", "g.json: edges[0].to"),
    (lambda g: g["edges"].append(edge("c", "b")), "HP134", "g.json: edges[1]"),
    (lambda g: g["edges"].append(edge("c", "c")), "HP134", "g.json: edges[2]"),
    (lambda g: g["nodes"][2].update(backward_ms={"other": 1}), "HP135", "g.json: nodes[2].backward_ms"),
    (lambda g: g["nodes"][2].update(resident_bytes=1), "HP136", "g.json: nodes[0]"),
]


@pytest.mark.parametrize(("change", "code", "where"), MISTAKES, ids=[f"{c}-{w}" for _, c, w in MISTAKES])
def test_one_error_names_the_place(change, code, where):
    with pytest.raises(WorkloadError) as caught:
        chain(broken(change))
    assert (caught.value.code, caught.value.where) == (code, where)


def test_messages():
    with pytest.raises(WorkloadError, match="a cycle: b -> c -> b"):
        chain(broken(lambda g: g["edges"].append(edge("c", "b"))))
    with pytest.raises(WorkloadError, match="node 'c' has no time on a k"):
        chain(broken(lambda g: g["nodes"][2].update(forward_ms={"other": 1})))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "HP130"),
        ("", "HP130"),
        ("[]", "HP131"),
        ('{"a": 1, "a": 2}', "HP131"),
        ("\ud800", "HP130"),
        ("[" * 100_000, "HP130"),
    ],
)
def test_what_is_no_graph_file(tmp_path, text, code):
    path = tmp_path / "g.json"
    path.write_text(text, errors="surrogatepass")
    with pytest.raises(WorkloadError) as caught:
        read_profiled_graph(path, ["k"])
    assert caught.value.code == code


def test_no_such_file(tmp_path):
    with pytest.raises(WorkloadError) as caught:
        read_profiled_graph(tmp_path / "g.json", ["k"])
    assert caught.value.code == "HP130"


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.floats(0, 1), st.integers(0, 2**30))
def test_any_acyclic_graph_is_read_and_any_back_edge_refused(n, density, seed):
    rng = random.Random(seed)
    hidden = list(range(n))
    rng.shuffle(hidden)
    edges = [(hidden[i], hidden[j]) for i in range(n) for j in range(i + 1, n) if rng.random() < density]
    content = graph([node(f"n{i}") for i in range(n)], [edge(f"n{a}", f"n{b}") for a, b in edges])
    made = chain(json.loads(json.dumps(content)))
    position = {block.nodes[0]: at for at, block in enumerate(made.blocks)}
    assert sorted(position) == sorted(f"n{i}" for i in range(n))
    assert all(position[f"n{a}"] < position[f"n{b}"] for a, b in edges)
    assert all(value.producer < min(value.consumers) for value in made.values)
    if edges:
        a, b = rng.choice(edges)
        content["edges"].append(edge(f"n{b}", f"n{a}"))
        with pytest.raises(WorkloadError) as caught:
            chain(content)
        # What it names is a real cycle.
        names = caught.value.message.removeprefix("a cycle: ").split(" -> ")
        real = {(e["from"], e["to"]) for e in content["edges"]}
        assert names[0] == names[-1]
        assert all(pair in real for pair in itertools.pairwise(names))


def test_written_and_read_back_it_is_the_same_chain():
    nodes = [
        node("a", output_bytes=8, frozen_bytes={"table": 8}, colocate="x", estimated=["k"]),
        node(
            "b",
            output_bytes=9,
            saved_bytes=0,
            parameter_bytes=3,
            frozen_bytes={"table": 8},
            workspace_bytes=21,
            replay_bytes=6,
        ),
        node("c", colocate="x"),
    ]
    edges = [
        edge("a", "b"),
        edge("a", "c", value="side", bytes=5, gradient_bytes=0),
        edge("b", "c", bytes=2),
    ]
    factors = {
        "optimizer_bytes_per_parameter_byte": 2.0,
        "step_bytes_per_parameter_byte": 1.0,
        "loop_bytes_per_largest_parameter_byte": 1.5,
    }
    first = chain(graph(nodes, edges, ends_fixed=True, **factors), ("k", "l"))
    assert first.replay == (0, 6, 0)
    assert (first.workspace, first.step_factor, first.loop_factor) == ((0, 21, 0), 1.0, 1.5)
    text = chain_graph(first, {"a": 8, "b": 9}).to_json()
    again = graph_chain(parse_profiled_graph(json.loads(text)), ["k", "l"])
    held = ("parameters", "frozen", "saved", "optimizer_factor", "workspace", "replay", "step_factor", "loop_factor")
    for field in ("name", "batch_size", "blocks", "values", *held):
        assert getattr(again, field) == getattr(first, field), field
    assert (again.colocate, again.ends_fixed, again.resident) == (((0, 2),), True, None)
    for kind in ("k", "l"):
        np.testing.assert_array_equal(again.forward_ms[kind], first.forward_ms[kind])
        np.testing.assert_array_equal(again.measured[kind], first.measured[kind])
