"""Seeded block chains and clusters of a realistic shape, for the planner's benchmarks."""

from __future__ import annotations

import numpy as np

from hetpipe_compiler.ir.blocks import Block, BlockChain, CrossingValue, SharedBytes
from hetpipe_compiler.ir.cluster import Cluster, Device, DeviceKind, Link, Node

PCIE = Link("pcie3-x16", 12.0, 5.0)
INFINIBAND = Link("infiniband-fdr", 6.0, 3.0)
_GIB = 1 << 30
#: name, GiB of memory, relative speed: the four cards of the HetPipe paper.
_PAPER_KINDS = (("titan-v", 12, 14.9), ("titan-rtx", 24, 16.3), ("rtx-2060", 6, 6.45), ("quadro-p4000", 8, 5.3))


def residual_chain(blocks: int, seed: int = 0, batch_size: int = 32) -> BlockChain:
    """A convolutional net with skips: early blocks have large activations, late ones many parameters."""
    rng = np.random.default_rng(seed)
    depth = np.arange(blocks) / blocks
    work = rng.uniform(0.5, 1.5, blocks) * 900.0 / blocks
    activation = (rng.uniform(0.7, 1.3, blocks) * 40e6 * np.exp(-3 * depth)).astype(int)
    parameters = (rng.uniform(0.5, 1.5, blocks) * 2 * 240e6 / blocks * depth).astype(int)
    values = [CrossingValue(f"v{i}", i, (i + 1,), int(activation[i]), int(activation[i])) for i in range(blocks - 1)]
    for i in range(0, blocks - 3, 3):
        values[i] = CrossingValue(f"v{i}", i, (i + 1, i + 3), int(activation[i]), int(activation[i]))
    return BlockChain(
        name=f"residual{blocks}",
        batch_size=batch_size,
        blocks=tuple(Block(f"layer{i}", (f"op{i}",)) for i in range(blocks)),
        forward_ms={name: work / speed for name, _, speed in _PAPER_KINDS},
        backward_ms={name: 2 * work / speed * rng.uniform(0.9, 1.1, blocks) for name, _, speed in _PAPER_KINDS},
        measured=False,
        values=tuple(values),
        parameters=tuple(SharedBytes(f"p{i}", int(size), (i,)) for i, size in enumerate(parameters)),
        frozen=(),
        saved=tuple(SharedBytes(f"s{i}", int(size), (i, i + 1)) for i, size in enumerate(activation[:-1])),
        optimizer_factor=1.0,
    )


def paper_cluster() -> Cluster:
    """Four nodes of four equal cards each (spec section 6)."""
    nodes = []
    for index, (name, gib, speed) in enumerate(_PAPER_KINDS):
        kind = DeviceKind(name, gib * _GIB, speed, None, None, None, 500.0, 0.5, 0.7, 5.0, 600 << 20, "benchmark")
        devices = tuple(Device(f"n{index}:{i}", f"n{index}", kind) for i in range(4))
        nodes.append(Node(f"n{index}", devices, PCIE, None))
    return Cluster("paper", tuple(nodes), INFINIBAND, None)
