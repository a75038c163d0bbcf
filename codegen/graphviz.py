"""Draw partitions: a frame per stage with module groups inside, cuts coloured and labelled with their bytes and link.

The ``.dot`` text needs no Graphviz; drawing needs its ``dot`` program on PATH and stops after a time limit.
"""

from __future__ import annotations

import shutil
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetpipe_compiler.codegen.graph_file import GraphNode
from hetpipe_compiler.codegen.module_groups import INPUT, Box, boxes_of_worker
from hetpipe_compiler.codegen.quantities import bytes_of, bytes_text, device_ranges, digits
from hetpipe_compiler.codegen.worker_groups import WorkerGroup, same_cuts
from hetpipe_compiler.errors import ArtifactError
from hetpipe_compiler.files import new_file
from hetpipe_compiler.ir.plan import Plan, Stage

#: Seconds after which drawing is given up: layout of a thousand boxes takes minutes.
TIME_LIMIT_S = 60.0
#: Boxes from which beauty gives way to speed.
_MANY = 200
#: Fill colours of stages, light enough for black text.
_FILLS = ("#e3f0fb", "#fdf0d8", "#e5f5e3", "#f6e4f1", "#efeae2", "#e0f3f3", "#fbe4e0", "#ecebf8")
_CUT = "#c0392b"
_SKIP = "#8e44ad"


def plan_dot(plan: Plan, graph: Sequence[GraphNode], *, vw: int | None = None, ops: bool = False) -> str:
    """The picture as dot text.

    Args:
        graph: The model's nodes (`load_graph`); without them each stage is one box.
        vw: The virtual worker to draw; None draws each distinct partition once.
        ops: One box per call instead of one per module group.

    Raises:
        ArtifactError: HP441, the plan has no such virtual worker.
    """
    import graphviz

    groups = same_cuts(plan, vw)
    title = (
        f"{plan.name}: predicted {digits(plan.samples_per_s)} samples/s\n"
        f"batch {plan.batch_size}, policy {plan.policy}, Nm {plan.nm}, D {plan.staleness}"
    )
    dot = graphviz.Digraph("plan")
    dot.attr(
        rankdir="TB", compound="true", label=graphviz.escape(title), labelloc="t", fontname="Helvetica", fontsize="16"
    )
    dot.attr(nodesep="0.2", ranksep="0.3", newrank="false")
    if ops and len(graph) > _MANY:
        # Straight lines and a bounded search, else a layout takes minutes.
        dot.attr(splines="line", nslimit="1", nslimit1="1", mclimit="0.2")
    dot.attr(
        "node",
        shape="box",
        style="filled,rounded",
        fillcolor="white",
        fontname="Helvetica",
        fontsize="11",
        height="0.3",
    )
    dot.attr("edge", fontname="Helvetica", fontsize="10", color="#555555", arrowsize="0.7")
    for group in groups:
        # An outer frame only where there is more than one partition to tell apart.
        if len(groups) == 1:
            _draw_worker(dot, group, graph, ops)
        else:
            with dot.subgraph(name=f"cluster_vw{group.first.index}") as frame:
                text = (
                    f"{group.title}: {digits(group.first.samples_per_s)} samples/s{' each' * (len(group.members) > 1)}"
                )
                frame.attr(
                    label=text, color="#999999", fontname="Helvetica", fontsize="14", style="rounded", margin="12"
                )
                _draw_worker(frame, group, graph, ops)
    return str(dot.source)


def draw(dot_path: Path, picture: Path, kind: str, *, time_limit_s: float = TIME_LIMIT_S) -> None:
    """Draw ``dot_path`` with Graphviz into ``picture``; ``kind``: ``svg`` or ``png``. The .dot stays in any case.

    Raises:
        ArtifactError: HP411, the picture cannot be written; HP442, the ``dot`` program is not on PATH; HP443, it failed
            or took too long.
    """
    program = shutil.which("dot")
    if program is None:
        raise ArtifactError(
            "HP442",
            f"cannot draw {picture.name}: Graphviz's 'dot' is not on PATH; {dot_path} is written",
            hint="install Graphviz (apt-get install graphviz), or paste the .dot file into a viewer",
        )
    command = [program, f"-T{kind}", str(dot_path)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=time_limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise ArtifactError(
            "HP443",
            f"drawing {picture.name} took more than {digits(time_limit_s)} s; {dot_path} is written",
            hint="draw fewer boxes: leave out --ops, or choose one partition with --vw",
        ) from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
        raise ArtifactError(
            "HP443", f"dot: {lines[0]}", where=str(dot_path), hint="dot -T? lists the formats that this Graphviz draws"
        )
    with new_file(picture) as new:
        new.write_bytes(done.stdout)


def _draw_worker(dot: Any, group: WorkerGroup, graph: Sequence[GraphNode], ops: bool) -> None:
    boxes = boxes_of_worker(group.first, graph, ops=ops)
    prefix = f"vw{group.first.index}"
    ids = {id(box): f"{prefix}_b{i}" for i, box in enumerate(boxes)}
    first_boxes = []
    for stage in group.first.stages:
        with dot.subgraph(name=f"cluster_{prefix}_s{stage.index}") as cluster:
            mine = [box for box in boxes if box.stage == stage.index]
            first = ids[id(mine[0])] if mine else f"{prefix}_stage{stage.index}"
            first_boxes.append(first)
            _style_stage(cluster, group, stage, first)
            column = f"{prefix}_s{stage.index}"
            for box in mine:
                cluster.node(ids[id(box)], label=_box_label(box, stage, ops), group=column)
            if not mine:
                cluster.node(first, label=_nodes_label(stage), group=column)
    if boxes:
        _draw_edges(dot, group, boxes, ids)
        _draw_shared_parameters(dot, group, first_boxes, prefix)
    else:
        _draw_cuts_only(dot, group, prefix)


def _style_stage(cluster: Any, group: WorkerGroup, stage: Stage, first_box: str) -> None:
    """Frame and heading. The heading is a node beside the first box: edges would run across a cluster's own label."""
    worst = stage.index == group.first.bottleneck_stage
    memory = bytes_of(stage.memory_bytes["total"], stage.memory_bytes["capacity"])
    lines = [
        f"stage {stage.index}{' ◀ bottleneck' if worst else ''}",
        f"{device_ranges(group.devices(stage.index))} ({stage.kind})",
        f"forward {digits(stage.forward_ms)} ms",
        f"backward {digits(stage.backward_ms)} ms",
        f"with transfers {digits(stage.stage_ms)} ms",
        f"memory {memory}",
        f"{stage.in_flight} in flight{', forward runs again' if stage.recompute else ''}",
    ]
    cluster.attr(
        label="",
        style="filled,rounded",
        fillcolor=_FILLS[stage.index % len(_FILLS)],
        color=_CUT if worst else "#888888",
        penwidth="2.5" if worst else "1",
        margin="10",
    )
    # \l ends a left-justified line.
    text = "".join(f"{_escaped(line)}\\l" for line in lines)
    with cluster.subgraph() as same_rank:
        same_rank.attr(rank="same")
        same_rank.node(f"{first_box}_heading", label=text, shape="plain", style="", fontcolor="#333333")
        same_rank.node(first_box)


def _box_label(box: Box, stage: Stage, ops: bool) -> str:
    forward = sum(node.forward_ms.get(stage.kind, 0.0) for node in box.nodes)
    backward = sum(node.backward_ms.get(stage.kind, 0.0) for node in box.nodes)
    batch = box.nodes[0].op == INPUT
    facts = [] if ops or batch or len(box.nodes) == 1 else [f"{len(box.nodes)} ops"]
    if forward + backward:
        facts.append(f"{digits(forward + backward)} ms")
    return _escaped("\n".join([box.label, ", ".join(facts)]) if facts else box.label)


def _nodes_label(stage: Stage) -> str:
    first, last = stage.nodes[0], stage.nodes[-1]
    return _escaped(f"{len(stage.nodes)} nodes\n{first} … {last}" if len(stage.nodes) > 1 else first)


def _draw_edges(dot: Any, group: WorkerGroup, boxes: Sequence[Box], ids: dict[int, str]) -> None:
    """An edge per pair of boxes. A value crosses to a stage once: it is drawn to the first box there that reads it."""
    owner = {node.name: i for i, box in enumerate(boxes) for node in box.nodes}
    sizes = {node.name: node.output_bytes for box in boxes for node in box.nodes}
    values: dict[tuple[int, int], set[str]] = defaultdict(set)
    crossed: set[tuple[str, int]] = set()
    for i, box in enumerate(boxes):
        for name in (name for node in box.nodes for name in node.inputs):
            if name not in owner or owner[name] == i:
                continue
            if boxes[owner[name]].stage != box.stage:
                # Numbers such as sizes ride in message headers: no edge for them.
                if (name, box.stage) in crossed or not sizes[name]:
                    continue
                crossed.add((name, box.stage))
            values[owner[name], i].add(name)
    joined = {i for pair in values for i in pair}
    for i, box in enumerate(boxes):
        # What is joined to nothing (a counter's update) would float to the top of the picture.
        if i and i not in joined and boxes[i - 1].stage == box.stage:
            dot.edge(ids[id(boxes[i - 1])], ids[id(box)], style="invis")
    for (a, b), names in sorted(values.items()):
        ends, stages = (ids[id(boxes[a])], ids[id(boxes[b])]), (boxes[a].stage, boxes[b].stage)
        _draw_edge(dot, group, ends, stages, sum(sizes[name] for name in names))


def _draw_shared_parameters(dot: Any, group: WorkerGroup, first_boxes: Sequence[str], prefix: str) -> None:
    """What an owner sends of its parameters: from its frame to the other stage's frame, for no node makes it."""
    for stage in group.first.stages:
        sizes = {port.name: port.bytes for port in stage.outputs if port.kind == "parameter"}
        for to, names in sorted(stage.sends.items()):
            for name in (name for name in names if name in sizes):
                dot.edge(
                    f"{first_boxes[stage.index]}_heading",
                    first_boxes[to],
                    label=_escaped(f" {name}\n {bytes_text(sizes[name])}"),
                    lhead=f"cluster_{prefix}_s{to}",
                    color=_SKIP,
                    fontcolor=_SKIP,
                    style="dashed",
                    penwidth="2",
                )


def _draw_cuts_only(dot: Any, group: WorkerGroup, prefix: str) -> None:
    for stage in group.first.stages:
        for to, count in sorted(stage.sends_bytes.items()):
            _draw_edge(dot, group, (f"{prefix}_stage{stage.index}", f"{prefix}_stage{to}"), (stage.index, to), count)


def _draw_edge(dot: Any, group: WorkerGroup, ends: tuple[str, str], stages: tuple[int, int], count: int) -> None:
    sent, received = stages
    text = bytes_text(count) if count else ""
    if sent == received:
        dot.edge(*ends, label=_escaped(f" {text}"))
        return
    adjacent = received == sent + 1
    link = group.first.stages[sent].sends_links.get(received) if adjacent else "skip"
    colour = _CUT if adjacent else _SKIP
    label = "\n".join(f" {part}" for part in (text, link) if part)
    dot.edge(*ends, label=_escaped(label), color=colour, fontcolor=colour, penwidth="2")


def _escaped(text: str) -> str:
    """Backslashes literal, line ends as dot's ``\\n``."""
    return text.replace("\\", "\\\\").replace("\n", "\\n")
