"""Say on each node of an exported ONNX model where it comes from, what it costs, and which pipeline stage runs it.

Where it comes from is read from the exporter's stack traces: each statement of a stage module assigns one fx node.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetpipe_compiler.codegen.graph_file import GraphNode
from hetpipe_compiler.codegen.worker_groups import WorkerGroup

#: Prefix of our keys in ``metadata_props``.
PREFIX = "hetpipe."
_TRACE = "pkg.torch.onnx.stack_trace"
_SCOPES = "pkg.torch.onnx.name_scopes"
_STAGE_SCOPE = re.compile(r"'stage(\d+)'")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node was written: stage and line of its module, and the fx node that the line computes.

    Line and node are None inside an autocast region, of which the exporter keeps only the stage.
    """

    stage: int
    line: int | None = None
    node: str | None = None


class Origins:
    """Looks up stack traces: ``paths[k]`` is stage k's file, ``lines[k]`` what each of its lines computes."""

    def __init__(self, paths: Sequence[Path], lines: Sequence[Mapping[int, str]]) -> None:
        self._stages = {str(path): k for k, path in enumerate(paths)}
        self._lines = lines

    def find(self, trace: str | None) -> Origin | None:
        """The innermost frame that lies in a stage module; None if there is none."""
        for path, number in reversed(_FRAME.findall(trace or "")):
            stage = self._stages.get(path)
            if stage is not None and int(number) in self._lines[stage]:
                return Origin(stage, int(number), self._lines[stage][int(number)])
        return None


def origins_of(model: Any, origins: Origins) -> list[Origin | None]:
    """The origin of each node of an ``onnx_ir`` model's graph, in order."""
    found: list[Origin | None] = []
    for node in model.graph:
        origin = origins.find(node.metadata_props.get(_TRACE))
        scope = _STAGE_SCOPE.search(node.metadata_props.get(_SCOPES, ""))
        found.append(Origin(int(scope[1])) if origin is None and scope else origin)
    return found


def annotate_nodes(model: Any, found: Sequence[Origin | None], graph: Sequence[GraphNode]) -> None:
    """Replace the exporter's metadata (which holds this machine's paths) by ours.

    Every node gets ``hetpipe.node``, ``.op``, ``.module`` and ``.source``; costs go to the last node that an fx node
    became, so that they add up.
    """
    known = {node.name: node for node in graph}
    last = {origin.node: i for i, origin in enumerate(found) if origin and origin.node}
    for i, (node, origin) in enumerate(zip(model.graph, found, strict=True)):
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
        if origin is None or origin.node is None:
            continue
        node.metadata_props[f"{PREFIX}node"] = origin.node
        source = known.get(origin.node)
        if source is None:
            continue
        for key, value in (("op", source.op), ("module", source.module), ("source", source.source)):
            if value:
                node.metadata_props[PREFIX + key] = value
        # Viewers fold boxes by this key.
        node.metadata_props["namespace"] = source.module.replace(".", "/")
        node.name = f"{source.module or 'model'}/{node.name.removeprefix('node_')}"
        if last[origin.node] == i:
            _write_costs(node.metadata_props, source)


def _write_costs(props: dict[str, str], source: GraphNode) -> None:
    for way in ("forward_ms", "backward_ms"):
        for kind, ms in getattr(source, way).items():
            props[f"{PREFIX}{way}.{kind}"] = f"{ms:.6g}"
    props[f"{PREFIX}output_bytes"] = str(source.output_bytes)
    if source.flops:
        props[f"{PREFIX}flops"] = str(int(source.flops))


def pipeline_stages(model: Any, found: Sequence[Origin | None], group: WorkerGroup, *, own: bool) -> list[int]:
    """The stage of each node of the graph under the cuts of ``group``.

    Args:
        own: The model was exported from this group's stage modules: then the file says the stage.

    A node that the cuts do not name (a constant, a cast) goes with what it reads, or with what reads it.
    """
    by_name: dict[str, int] = {}
    for stage in group.first.stages:
        for name in stage.nodes:
            by_name.setdefault(name, stage.index)
    stages: list[int | None] = [
        None if origin is None else origin.stage if own else by_name.get(origin.node or "") for origin in found
    ]
    nodes = list(model.graph)
    index = {id(node): i for i, node in enumerate(nodes)}
    _inherit(stages, range(len(nodes)), lambda i: _makers(nodes[i], index), max)
    _inherit(stages, range(len(nodes) - 1, -1, -1), lambda i: _readers(nodes[i], index), min)
    return [stage or 0 for stage in stages]


def _inherit(
    stages: list[int | None],
    order: Sequence[int],
    neighbours: Callable[[int], list[int]],
    choose: Callable[[list[int]], int],
) -> None:
    for i in order:
        if stages[i] is None:
            near = [stage for j in neighbours(i) if (stage := stages[j]) is not None]
            stages[i] = choose(near) if near else None


def _makers(node: Any, index: Mapping[int, int]) -> list[int]:
    makers = (value.producer() for value in node.inputs if value is not None)
    return [index[id(maker)] for maker in makers if maker is not None and id(maker) in index]


def _readers(node: Any, index: Mapping[int, int]) -> list[int]:
    return [index[id(reader)] for value in node.outputs for reader, _ in value.uses() if id(reader) in index]


def add_configurations(proto: Any, groups: Sequence[tuple[WorkerGroup, Sequence[int]]]) -> None:
    """Write the standard's ``ModelProto.configuration`` and each node's ``device_configurations`` (IR version 11).

    ``groups``: each partition with the stage of every node of ``proto.graph``, in order.
    """
    proto.ir_version = max(proto.ir_version, 11)
    for group, stages in groups:
        name = group.title
        configuration = proto.configuration.add(name=name, num_devices=len(group.first.stages))
        configuration.device.extend(stage.device for stage in group.first.stages)
        for node, stage in zip(proto.graph.node, stages, strict=True):
            node.device_configurations.add(configuration_id=name, pipeline_stage=stage)
