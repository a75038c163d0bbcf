"""Write the public profiles of eth-easl/sailor (layer times measured per GPU) as a profiled graph file.

``sailor/MODEL/GPU/profile.json`` holds ``[microbatch][tensor parallel degree][layer] = [forward s, backward s, update
s]``, ``sailor/llm_info.json`` holds ``[model][tensor parallel degree][layer]`` with ``params_floats`` and
``act_output_floats`` of one sample. Their formula counts a transfer in both directions at both ends, so a value has
twice the activation's bytes.

``python -m bench.convert_sailor sailor/ OPT-350 --kinds A100-40,V100-16 -o opt350.json``
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from pathlib import Path
from typing import Any

from hetpipe_compiler.frontend.profiled_graph import graph_chain, parse_profiled_graph
from hetpipe_compiler.ir.blocks import BlockChain
from hetpipe_compiler.ir.cluster import Cluster, Device, DeviceKind, Link, Node

#: Bytes of training state per parameter: FP32 weights, gradients and Adam's two moments.
_RESIDENT_BYTES = 16


def convert(folder: Path, model: str, kinds: list[str], microbatch: int = 1, degree: int = 1) -> dict[str, Any]:
    """The content of a profiled graph file: one model on the GPUs ``kinds``. ``folder`` holds ``llm_info.json``."""
    layers = json.loads((folder / "llm_info.json").read_text())[model][str(degree)]
    names = sorted(layers, key=int)
    seconds = {
        kind: json.loads((folder / model / kind / "profile.json").read_text())[str(microbatch)][str(degree)]
        for kind in kinds
    }
    nodes = [
        {
            "id": f"layer{name}",
            "forward_ms": {kind: rows[name][0] * 1e3 for kind, rows in seconds.items()},
            "backward_ms": {kind: rows[name][1] * 1e3 for kind, rows in seconds.items()},
            "output_bytes": 2 * 4 * microbatch * layers[name]["act_output_floats"],
            "resident_bytes": _RESIDENT_BYTES * layers[name]["params_floats"],
        }
        for name in names
    ]
    return {
        "format": "hetpipe-graph",
        "version": 1,
        "name": model,
        "batch_size": microbatch,
        "nodes": nodes,
        "edges": [{"from": f"layer{a}", "to": f"layer{b}"} for a, b in itertools.pairwise(names)],
    }


def sailor_chain(folder: Path, model: str, kinds: list[str], microbatch: int = 1, degree: int = 1) -> BlockChain:
    """The same as a chain."""
    return graph_chain(parse_profiled_graph(convert(folder, model, kinds, microbatch, degree)), kinds)


def flat_cluster(devices: dict[str, int], memory_bytes: dict[str, int] | None, bytes_per_s: float | None) -> Cluster:
    """A node for each kind, all links alike; None: unlimited memory, infinite bandwidth."""
    link = Link("link", bytes_per_s / 1e9 if bytes_per_s else math.inf, 0.0)
    nodes = []
    for name, count in devices.items():
        capacity = memory_bytes[name] if memory_bytes else 1 << 60
        kind = DeviceKind(name, capacity, 1.0, None, None, None, 1.0, 1.0, 1.0, 0.0, 0, "profile")
        nodes.append(Node(name, tuple(Device(f"{name}:{i}", name, kind) for i in range(count)), link, None))
    return Cluster("flat", tuple(nodes), link, None)


def main() -> None:
    """Convert one model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("model")
    parser.add_argument("--kinds", required=True, help="comma-separated")
    parser.add_argument("--microbatch", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("-o", "--out", type=Path, required=True)
    given = parser.parse_args()
    content = convert(given.folder, given.model, given.kinds.split(","), given.microbatch, given.tensor_parallel)
    given.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
