"""``graph.json`` of a plan folder, read and written: the model's nodes with their costs, for pictures and exports.

Nodes come in execution order: the batch's inputs and every call; a stage of the plan names the nodes that it runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetpipe_compiler.errors import ArtifactError


class GraphSum(BaseModel):
    """Gradients of a node's value that are added up: ``count`` additions of ``ms`` each, per device kind."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    key: str
    count: int
    ms: dict[str, float]


class GraphNode(BaseModel):
    """One node.

    Attributes:
        name: fx node name.
        op: Such as ``aten.conv2d.default``.
        module: The user's module path, ``""`` for what the top module does itself.
        source: ``model.py:12``, or ``""`` where unknown.
        inputs: Names of the nodes it reads.
        forward_ms, backward_ms: Per device kind, for one minibatch.
        key: What it has in common with all nodes that cost the same, as in profiles; ``""``: in a plan made from a
            profiled graph.
        sums: Additions of gradients, which ``backward_ms`` contains.
        shape: Of its output; None for anything but one tensor. A string is a size that may differ from batch to batch.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    op: str
    module: str = ""
    source: str = ""
    inputs: tuple[str, ...] = ()
    forward_ms: dict[str, float] = Field(default_factory=dict)
    backward_ms: dict[str, float] = Field(default_factory=dict)
    key: str = ""
    sums: tuple[GraphSum, ...] = ()
    flops: float = 0
    output_bytes: int = 0
    shape: tuple[int | str, ...] | None = None
    dtype: str | None = None


class _GraphFile(BaseModel):
    model_config = ConfigDict(extra="ignore")

    nodes: tuple[GraphNode, ...]


def graph_text(nodes: Iterable[dict[str, Any]]) -> str:
    """The file's text, a node a line; keys are `GraphNode`'s."""
    return '{"nodes": [\n' + ",\n".join(map(json.dumps, nodes)) + "\n]}\n"


def load_graph(folder: Path) -> tuple[GraphNode, ...]:
    """The nodes of ``folder/graph.json``, in order; empty if there is no such file.

    Raises:
        ArtifactError: HP440, the file is damaged.
    """
    path = folder / "graph.json"
    if not path.is_file():
        return ()
    try:
        return _GraphFile.model_validate_json(path.read_text(encoding="utf-8")).nodes
    except ValidationError as error:
        first = error.errors()[0]
        message = ": ".join([".".join(map(str, first["loc"])), first["msg"]]).removeprefix(": ")
        raise ArtifactError("HP440", message, where=str(path), hint="compile again") from None
    except UnicodeDecodeError as error:
        raise ArtifactError("HP440", f"cannot be read: {error}", where=str(path), hint="compile again") from None
