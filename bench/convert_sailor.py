"""Read the public profiles of eth-easl/sailor (layer times measured per GPU) as a block chain and a cluster.

``sailor/MODEL/GPU/profile.json`` holds ``[microbatch][tensor parallel degree][layer] = [forward s, backward s, update
s]``, ``sailor/llm_info.json`` holds ``[model][tensor parallel degree][layer]`` with ``params_floats`` and
``act_output_floats`` of one sample. Their formula counts a transfer in both directions at both ends, so a value has
twice the activation's bytes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from hetpipe_compiler.ir.blocks import Block, BlockChain, CrossingValue
from hetpipe_compiler.ir.cluster import Cluster, Device, DeviceKind, Link, Node

#: Bytes of training state per parameter: FP32 weights, gradients and Adam's two moments.
_RESIDENT_BYTES = 16


def sailor_chain(folder: Path, model: str, kinds: list[str], microbatch: int = 1, degree: int = 1) -> BlockChain:
    """The chain of one model, with the times of the GPUs ``kinds``. ``folder`` holds ``llm_info.json``."""
    layers = json.loads((folder / "llm_info.json").read_text())[model][str(degree)]
    names = sorted(layers, key=int)
    seconds = {
        kind: json.loads((folder / model / kind / "profile.json").read_text())[str(microbatch)][str(degree)]
        for kind in kinds
    }
    values = []
    for index, name in enumerate(names[:-1]):
        n_bytes = 2 * 4 * microbatch * layers[name]["act_output_floats"]
        values.append(CrossingValue(f"layer{name}", index, (index + 1,), n_bytes, n_bytes))
    return BlockChain(
        name=model,
        batch_size=microbatch,
        blocks=tuple(Block(f"layer{name}", (f"layer{name}",)) for name in names),
        forward_ms={kind: np.array([rows[name][0] * 1e3 for name in names]) for kind, rows in seconds.items()},
        backward_ms={kind: np.array([rows[name][1] * 1e3 for name in names]) for kind, rows in seconds.items()},
        measured=True,
        values=tuple(values),
        parameters=(),
        frozen=(),
        saved=(),
        optimizer_factor=0.0,
        resident=tuple(_RESIDENT_BYTES * layers[name]["params_floats"] for name in names),
    )


def flat_cluster(devices: dict[str, int], memory_bytes: dict[str, int] | None, bytes_per_s: float | None) -> Cluster:
    """A node for each kind, all links alike; None: unlimited memory, infinite bandwidth."""
    link = Link("link", bytes_per_s / 1e9 if bytes_per_s else math.inf, 0.0)
    nodes = []
    for name, count in devices.items():
        capacity = memory_bytes[name] if memory_bytes else 1 << 60
        kind = DeviceKind(name, capacity, 1.0, None, None, None, 1.0, 1.0, 1.0, 0.0, 0, "profile")
        nodes.append(Node(name, tuple(Device(f"{name}:{i}", name, kind) for i in range(count)), link, None))
    return Cluster("flat", tuple(nodes), link, None)
