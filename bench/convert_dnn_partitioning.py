"""Write the public graphs of msr-fiddle/dnn-partitioning as a profiled graph file.

Nodes have ``fpgaLatency`` in milliseconds ("FPGA" is any accelerator), ``size`` in bytes and a ``colorClass``; the
``cost`` of an edge is the milliseconds of moving its source's output. A training graph has backward nodes too: each is
folded into the forward node of its class, and every transfer then counts in both directions, activation and gradient.

Edges are written in bytes, for links of `BANDWIDTH_GB_S` without latency.

``python -m bench.convert_dnn_partitioning LayerGraphs_bert24_training.json -o bert24.json``
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

#: A millisecond of transfer is 10^12 bytes: whole bytes then hold their costs to twelve digits.
BANDWIDTH_GB_S = 1e6
_BYTES_PER_MS = round(BANDWIDTH_GB_S * 1e6)


def convert(content: dict[str, Any], name: str) -> dict[str, Any]:
    """The content of a profiled graph file from that of theirs."""
    forward = [node for node in content["nodes"] if not node.get("isBackwardNode")]
    backward: dict[Any, float] = {}
    resident: dict[Any, float] = {}
    for node in content["nodes"]:
        if node.get("isBackwardNode"):
            color = node["colorClass"]
            backward[color] = backward.get(color, 0.0) + node["fpgaLatency"]
            resident[color] = resident.get(color, 0.0) + node["size"]
    # The first forward node of a class carries the backward nodes of the class: they share a stage anyway.
    first = {node.get("colorClass"): node["id"] for node in reversed(forward)}
    known = {node["id"] for node in forward}
    directions = 2 if backward else 1
    nodes = []
    for node in forward:
        color = node.get("colorClass")
        mine = color is not None and first[color] == node["id"]
        nodes.append(
            {
                "id": str(node["id"]),
                "name": node["name"],
                "forward_ms": {"*": node["fpgaLatency"]},
                "backward_ms": {"*": backward.get(color, 0.0) if mine else 0.0},
                "resident_bytes": round(node["size"] + (resident.get(color, 0.0) if mine else 0.0)),
                "colocate": None if color is None else str(color),
            }
        )
    return {
        "format": "hetpipe-graph",
        "version": 1,
        "name": name,
        "batch_size": 1,
        "nodes": nodes,
        "edges": [
            {
                "from": str(edge["sourceId"]),
                "to": str(edge["destId"]),
                "bytes": directions * round(edge["cost"] * _BYTES_PER_MS),
            }
            for edge in content["edges"]
            if edge["sourceId"] in known and edge["destId"] in known
        ],
    }


def main() -> None:
    """Convert one file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("graph", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    arguments = parser.parse_args()
    content = convert(json.loads(arguments.graph.read_text()), arguments.graph.stem)
    arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
