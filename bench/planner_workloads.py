"""Seeded block chains and clusters of a realistic shape, for the planner's benchmarks."""

from __future__ import annotations

from itertools import pairwise

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
    """Four nodes of four equal cards each."""
    nodes = []
    for index, (name, gib, speed) in enumerate(_PAPER_KINDS):
        kind = DeviceKind(name, gib * _GIB, speed, None, None, None, 500.0, 0.5, 0.7, 5.0, 600 << 20, "benchmark")
        devices = tuple(Device(f"n{index}:{i}", f"n{index}", kind) for i in range(4))
        nodes.append(Node(f"n{index}", devices, PCIE, None))
    return Cluster("paper", tuple(nodes), INFINIBAND, None)


def large_cluster(devices: int) -> Cluster:
    """Nodes of four equal cards, the four kinds of the paper in turn."""
    paper = paper_cluster()
    nodes = []
    for index in range(devices // 4):
        kind = paper.nodes[index % 4].devices[0].kind
        name = f"n{index}"
        nodes.append(Node(name, tuple(Device(f"{name}:{i}", name, kind) for i in range(4)), PCIE, None))
    return Cluster(f"large{devices}", tuple(nodes), INFINIBAND, None)


def inception_graph(
    modules: int = 10, branches: tuple[int, ...] = (3, 6, 9, 12), seed: int = 0, traffic: float = 1.0
) -> BlockChain:
    """Modules of parallel branches, one after another: 36,402 closed sets with the default figures, 311 blocks.

    ``traffic``: values are so many times their usual size.
    """
    edges: list[tuple[int, int]] = []
    count, before = 1, 0
    for _ in range(modules):
        ends = []
        for length in branches:
            nodes = range(count, count + length)
            edges += [(before, nodes[0]), *pairwise(nodes)]
            ends.append(nodes[-1])
            count += length
        edges += [(end, count) for end in ends]
        before, count = count, count + 1
    return graph_chain(count, edges, seed, traffic)


def operator_graph(layers: int = 100, seed: int = 0) -> BlockChain:
    """Operators of a transformer, 20 a layer: three parallel projections, a skip round each half."""
    edges: list[tuple[int, int]] = []
    at = 0
    for _ in range(layers):
        start = at
        norm, q, k, v = at + 1, (at + 2, at + 3), (at + 4, at + 5, at + 6), (at + 7, at + 8)
        scores, softmax, mix, project, add = (at + 9 + i for i in range(5))
        norm2, up, act, gate, mul, down, add2 = (at + 14 + i for i in range(7))
        edges += [(start, norm), (norm, q[0]), (norm, k[0]), (norm, v[0]), q, k[:2], k[1:], v]
        edges += [(q[1], scores), (k[2], scores), (scores, softmax), (softmax, mix), (v[1], mix), (mix, project)]
        edges += [(project, add), (start, add), (add, norm2), (norm2, up), (up, act), (norm2, gate), (act, mul)]
        edges += [(gate, mul), (mul, down), (down, add2), (add, add2)]
        at += 20
    return graph_chain(at + 1, edges, seed)


def graph_chain(count: int, edges: list[tuple[int, int]], seed: int, traffic: float = 1.0) -> BlockChain:
    """Random costs on a given graph: each block makes one value for all that read it."""
    rng = np.random.default_rng(seed)
    readers: dict[int, list[int]] = {}
    for a, b in edges:
        readers.setdefault(a, []).append(b)
    work = rng.lognormal(0, 0.8, count) * 900.0 / count
    size = (rng.lognormal(0, 0.7, count) * 4e6 * traffic).astype(int)
    parameters = (rng.lognormal(0, 1, count) * 240e6 / count).astype(int)
    return BlockChain(
        name=f"graph{count}",
        batch_size=32,
        blocks=tuple(Block(f"layer{i}", (f"op{i}",)) for i in range(count)),
        forward_ms={n: work * rng.uniform(0.8, 1.2, count) / speed for n, _, speed in _PAPER_KINDS},
        backward_ms={n: 2 * work * rng.uniform(0.8, 1.2, count) / speed for n, _, speed in _PAPER_KINDS},
        measured=False,
        values=tuple(
            CrossingValue(f"v{i}", i, tuple(sorted(to)), int(size[i]), int(size[i]))
            for i, to in sorted(readers.items())
        ),
        parameters=tuple(SharedBytes(f"p{i}", int(n), (i,)) for i, n in enumerate(parameters)),
        frozen=(),
        saved=tuple(SharedBytes(f"s{i}", int(n), (i,)) for i, n in enumerate(size)),
        optimizer_factor=1.0,
    )
