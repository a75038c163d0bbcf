"""Pictures: what is grouped, what is drawn, and that drawing fails plainly."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest
from handmade_plans import equal_distribution, node_partition

from hetpipe_compiler.codegen.graph_file import GraphNode, load_graph
from hetpipe_compiler.codegen.graphviz import draw, plan_dot
from hetpipe_compiler.codegen.module_groups import BOXES, BOXES_OF_STAGE, boxes_of_worker
from hetpipe_compiler.errors import ArtifactError
from hetpipe_compiler.ir.plan import Plan, Port


def model_graph(blocks: int) -> tuple[GraphNode, ...]:
    """A residual chain: ``layer.i.conv`` then an addition without a module, 2 nodes a block."""
    nodes = [GraphNode(name="x", op="input", output_bytes=500), GraphNode(name="y", op="input", output_bytes=256)]
    before = "x"
    for i in range(blocks):
        conv, add = f"conv{i}", f"add{i}"
        times = {"titan-v": 1.0}
        nodes.append(
            GraphNode(
                name=conv,
                op="aten.conv2d.default",
                module=f"layer.{i}.conv",
                inputs=(before,),
                forward_ms=times,
                output_bytes=1_000,
            )
        )
        nodes.append(GraphNode(name=add, op="aten.add.Tensor", inputs=(conv, before), output_bytes=2_000))
        before = add
    return tuple(nodes)


def cut_evenly(plan: Plan, graph: tuple[GraphNode, ...]) -> Plan:
    names = [node.name for node in graph if node.op != "input"]
    workers = []
    for worker in plan.virtual_workers:
        k = len(worker.stages)
        cuts = [len(names) * i // k for i in range(k + 1)]
        stages = [
            s.model_copy(update={"nodes": tuple(names[cuts[i] : cuts[i + 1]])}) for i, s in enumerate(worker.stages)
        ]
        workers.append(worker.model_copy(update={"stages": tuple(stages)}))
    return plan.model_copy(update={"virtual_workers": tuple(workers)})


def test_groups_keep_every_node_once_in_order_and_stay_few() -> None:
    graph = model_graph(300)
    worker = cut_evenly(equal_distribution(), graph).virtual_workers[0]
    boxes = boxes_of_worker(worker, graph)
    assert [node.name for box in boxes for node in box.nodes] == [node.name for node in graph]
    assert boxes[0].label == "batch"
    assert len(boxes[1:]) <= BOXES
    assert all(sum(box.stage == k for box in boxes[1:]) <= BOXES_OF_STAGE for k in range(4))
    assert boxes[1].label.startswith("layer.")
    assert "…" in boxes[1].label


def test_small_models_show_their_modules_and_ops_on_request() -> None:
    graph = model_graph(6)
    worker = cut_evenly(node_partition(), graph).virtual_workers[0]
    assert [box.label for box in boxes_of_worker(worker, graph)[1:]] == [f"layer.{i}.conv" for i in range(6)]
    assert len(boxes_of_worker(worker, graph, ops=True)[1:]) == 12


def test_stages_are_frames_and_cuts_carry_bytes_and_link() -> None:
    graph = model_graph(6)
    text = plan_dot(cut_evenly(node_partition(), graph), graph, vw=0)
    assert text.count("subgraph cluster_vw0_s") == 2
    assert "cluster_vw1" not in text
    cut = [line for line in text.splitlines() if "pcie3-x16" in line]
    # conv3 and add3 both read add2, which crosses once.
    assert len(cut) == 1
    assert "2.00 kB" in cut[0]
    assert text.count("bottleneck") == 1


def test_a_value_that_many_boxes_read_crosses_to_their_stage_once() -> None:
    mask = GraphNode(name="mask", op="aten.triu.default", module="mask", inputs=("x",), output_bytes=77_000)
    graph = [*model_graph(6), GraphNode(name="size", op="aten.sym_size.int", module="mask", inputs=("x",))]
    graph = [mask, *(n.model_copy(update={"inputs": (*n.inputs, "mask", "size")}) if n.module else n for n in graph)]
    plan = cut_evenly(node_partition(), tuple(graph))
    cut = [line for line in plan_dot(plan, graph, vw=1).splitlines() if "77.0 kB" in line]
    stages = plan.virtual_workers[1].stages
    readers = sum(any(node.name in stage.nodes and "mask" in node.inputs for node in graph) for stage in stages[1:])
    assert len([line for line in cut if "penwidth" in line]) == readers == 3


def test_shared_parameters_are_drawn_between_frames() -> None:
    port = Port(
        name="shared_wte",
        kind="parameter",
        source=0,
        shape=(9,),
        dtype="float32",
        requires_grad=True,
        bytes=154_000_000,
    )
    graph = model_graph(6)
    plan = cut_evenly(node_partition(), graph)
    first, second = plan.virtual_workers[0].stages
    sender = first.model_copy(update={"outputs": (port,), "sends": {1: ("shared_wte",)}})
    worker = plan.virtual_workers[0].model_copy(update={"stages": (sender, second)})
    text = plan_dot(plan.model_copy(update={"virtual_workers": (worker,)}), graph)
    (edge,) = (line for line in text.splitlines() if "shared_wte" in line)
    assert "154 MB" in edge
    assert "lhead=cluster_vw0_s1" in edge


def test_alike_partitions_are_drawn_once() -> None:
    graph = model_graph(6)
    text = plan_dot(cut_evenly(equal_distribution(), graph), graph)
    assert len(set(re.findall(r"cluster_vw\d+_s\d", text))) == 4
    assert "n0:0-3 (titan-v)" in text


def test_without_a_graph_stages_are_boxes_and_skips_go_straight() -> None:
    text = plan_dot(node_partition(), (), vw=1)
    assert re.search(r"vw1_stage0 -> vw1_stage3 .*205 kB\\n skip", text)
    assert re.search(r"vw1_stage2 -> vw1_stage3 .*17.1 MB\\n pcie3-x16", text)


def test_no_such_virtual_worker() -> None:
    with pytest.raises(ArtifactError) as caught:
        plan_dot(node_partition(), (), vw=7)
    assert caught.value.code == "HP441"


def fake_dot(folder: Path, script: str) -> None:
    program = folder / "dot"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def test_drawing_without_graphviz_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ArtifactError, match="not on PATH") as caught:
        draw(tmp_path / "p.dot", tmp_path / "p.svg", "svg")
    assert caught.value.code == "HP442"


def test_drawing_is_given_up_after_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_dot(tmp_path, "exec /bin/sleep 20")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ArtifactError, match=r"took more than 0.300 s; .*p.dot is written") as caught:
        draw(tmp_path / "p.dot", tmp_path / "p.svg", "svg", time_limit_s=0.3)
    assert caught.value.code == "HP443"


def test_dot_is_asked_for_the_right_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_dot(tmp_path, 'echo "$@"')
    monkeypatch.setenv("PATH", str(tmp_path))
    draw(tmp_path / "p.dot", tmp_path / "picture", "png")
    assert (tmp_path / "picture").read_text().split() == [
        "-Tpng",
        str(tmp_path / "p.dot"),
    ]


def test_graphviz_own_complaint_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_dot(tmp_path, 'echo "Format: \\"xyz\\" not recognized" >&2; exit 1')
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ArtifactError, match="not recognized") as caught:
        draw(tmp_path / "p.dot", tmp_path / "p.xyz", "xyz")
    assert caught.value.code == "HP443"


def test_a_damaged_graph_file_is_refused(tmp_path: Path) -> None:
    assert load_graph(tmp_path) == ()
    (tmp_path / "graph.json").write_text('{"nodes": [{"name": "x"}]}')
    with pytest.raises(ArtifactError, match=r"nodes\.0\.op") as caught:
        load_graph(tmp_path)
    assert caught.value.code == "HP440"
