"""Group a stage's nodes by the user's modules, so that a picture has tens of boxes and not thousands.

Rule, for each stage:

1. Nodes are keyed by the first ``depth`` parts of their module path; runs of the same key become one box. Nodes
   without a module join the box before them (after them at the start): they glue modules together.
2. ``depth`` is the smallest that gives at least `FEW` boxes; if none does, the deepest.
3. More boxes than there is room for are packed: equally many neighbours into each, labelled with the first and last.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hetpipe_compiler.codegen.graph_file import GraphNode
from hetpipe_compiler.ir.plan import VirtualWorker

#: A stage shows at least so many boxes where its modules allow.
FEW = 6
#: Boxes of a whole picture, and of one stage, about; more do not fit a screen legibly.
BOXES, BOXES_OF_STAGE = 32, 8


#: `GraphNode.op` of what comes from the batch.
INPUT = "input"


@dataclass(frozen=True, slots=True)
class Box:
    """Nodes drawn as one. ``label``: their module path, or the op where a box is one node."""

    stage: int
    label: str
    nodes: tuple[GraphNode, ...]


def boxes_of_worker(worker: VirtualWorker, graph: Sequence[GraphNode], *, ops: bool = False) -> tuple[Box, ...]:
    """Boxes of all stages in execution order; ``ops``: one box per call.

    The batch is a box of stage 0, which hands it out. Nodes that the graph does not know are left out.
    """
    by_name = {node.name: node for node in graph}
    stages = [[by_name[name] for name in stage.nodes if name in by_name] for stage in worker.stages]
    placed = {node.name for nodes in stages for node in nodes}
    batch = tuple(node for node in graph if node.op == INPUT and node.name not in placed)
    boxes = [Box(0, "batch", batch)] if batch else []
    room = max(3, min(BOXES_OF_STAGE, BOXES // max(1, len(stages))))
    for k, nodes in enumerate(stages):
        boxes += [Box(k, _op_label(n), (n,)) for n in nodes] if ops else _packed(_grouped(k, nodes), room)
    return tuple(boxes)


def _op_label(node: GraphNode) -> str:
    return f"{node.name}\n{node.module}" if node.module else node.name


def _grouped(stage: int, nodes: Sequence[GraphNode]) -> list[Box]:
    boxes: list[Box] = []
    for depth in range(1, 1 + max((node.module.count(".") + 1 for node in nodes), default=0)):
        boxes = _runs(stage, nodes, depth)
        if len(boxes) >= FEW:
            break
    return boxes


def _runs(stage: int, nodes: Sequence[GraphNode], depth: int) -> list[Box]:
    runs: list[tuple[str, list[GraphNode]]] = []
    for node in nodes:
        key = ".".join(node.module.split(".")[:depth])
        if runs and (not key or not runs[-1][0] or runs[-1][0] == key):
            runs[-1] = (runs[-1][0] or key, [*runs[-1][1], node])
        else:
            runs.append((key, [node]))
    return [Box(stage, _label(key, members), tuple(members)) for key, members in runs]


def _label(module: str, nodes: Sequence[GraphNode]) -> str:
    # The full path where all its nodes share one that is longer than the key.
    paths = {node.module for node in nodes if node.module}
    if len(paths) == 1:
        module = paths.pop()
    return module or (_op_label(nodes[0]) if len(nodes) == 1 else f"{len(nodes)} ops")


def _packed(boxes: list[Box], room: int) -> list[Box]:
    if len(boxes) <= room:
        return boxes
    starts = [len(boxes) * i // room for i in range(room + 1)]
    return [_merged(boxes[a:b]) for a, b in itertools.pairwise(starts)]


def _merged(boxes: Sequence[Box]) -> Box:
    if len(boxes) == 1:
        return boxes[0]
    nodes = tuple(node for box in boxes for node in box.nodes)
    return Box(boxes[0].stage, f"{boxes[0].label} … {boxes[-1].label}", nodes)
