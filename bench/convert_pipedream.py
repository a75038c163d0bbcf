"""Write the public profiles of msr-fiddle/pipedream (``graph.txt``) as a profiled graph file.

A line per node, ``nodeID -- description -- forward_compute_time=F, backward_compute_time=B, activation_size=A,
parameter_size=P`` in milliseconds and bytes (A may be a list), then a line per edge, ``\\tnodeA -- nodeB``.

``python -m bench.convert_pipedream vgg16.graph.txt -o vgg16.json --batch-size 64``
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

_NODE = re.compile(
    r"(?P<id>\S+) -- (?P<name>.*) -- forward_compute_time=(?P<forward>[^,]+), backward_compute_time=(?P<backward>[^,]+)"
    r", activation_size=(?P<activation>\[[^\]]*\]|[^,]+), parameter_size=(?P<parameter>\S+)"
)
_EDGE = re.compile(r"\t(\S+) -- (\S+)")


def convert(
    text: str, name: str, *, batch_size: int = 1, directions: int = 1, speeds: dict[str, float] | None = None
) -> dict[str, Any]:
    """The content of a profiled graph file.

    ``Input`` nodes, which cost nothing, and ``__getitem__`` nodes that nobody reads are left out.

    Args:
        directions: 2 where both borders of a stage count both directions, as in ``unequal_devices_dag``.
        speeds: Device kind -> speed relative to the profiled device; None: one time for all kinds.
    """
    nodes: dict[str, dict[str, Any]] = {}
    edges: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if node := _NODE.fullmatch(line.rstrip()):
            nodes[node["id"]] = _node(node, directions, speeds or {"*": 1.0})
        elif edge := _EDGE.fullmatch(line.rstrip()):
            edges.append((edge[1], edge[2]))
        elif line.strip():
            raise ValueError(f"line {number} is no node and no edge: {line!r}")
    read = {source for source, _ in edges}
    dropped = {
        key
        for key, node in nodes.items()
        if node["name"].startswith("Input") or (node["name"].startswith("__getitem__") and key not in read)
    }
    return {
        "format": "hetpipe-graph",
        "version": 1,
        "name": name,
        "batch_size": batch_size,
        "nodes": [node for key, node in nodes.items() if key not in dropped],
        "edges": [{"from": a, "to": b} for a, b in edges if not {a, b} & dropped],
    }


def _node(match: re.Match[str], directions: int, speeds: dict[str, float]) -> dict[str, Any]:
    activation_bytes = round(sum(float(part) for part in match["activation"].strip("[]").split(";")))
    return {
        "id": match["id"],
        "name": match["name"],
        "forward_ms": {kind: float(match["forward"]) / speed for kind, speed in speeds.items()},
        "backward_ms": {kind: float(match["backward"]) / speed for kind, speed in speeds.items()},
        "parameter_bytes": round(float(match["parameter"])),
        "output_bytes": directions * activation_bytes,
        "saved_bytes": activation_bytes,
    }


def main() -> None:
    """Convert one file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("graph", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, default=1)
    arguments = parser.parse_args()
    name = arguments.graph.name.split(".")[0]
    content = convert(arguments.graph.read_text(), name, batch_size=arguments.batch_size)
    arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
