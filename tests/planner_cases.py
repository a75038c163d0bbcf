"""Small clusters and block chains for the planner's tests, and hypothesis strategies for them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from hetpipe_compiler.ir.blocks import Block, BlockChain, CrossingValue, SharedBytes
from hetpipe_compiler.ir.cluster import Cluster, Device, DeviceKind, Link, Node

MIB = 1 << 20


def kind(name: str, memory_bytes: int = 1 << 40, reserve_bytes: int = 0) -> DeviceKind:
    return DeviceKind(name, memory_bytes, 10.0, None, None, None, 500.0, 0.5, 0.7, 5.0, reserve_bytes, "test")


def cluster_of(nodes: list[list[DeviceKind]], link: Link | list[Link], network: Link) -> Cluster:
    """A cluster with nodes n0, n1, ... of these devices."""
    links = link if isinstance(link, list) else [link] * len(nodes)
    built = []
    for index, (kinds, inside) in enumerate(zip(nodes, links, strict=True)):
        devices = tuple(Device(f"n{index}:{i}", f"n{index}", kind) for i, kind in enumerate(kinds))
        built.append(Node(f"n{index}", devices, inside, None))
    return Cluster("test", tuple(built), network, None)


def chain_of(
    forward_ms: dict[str, list[float]],
    backward_ms: dict[str, list[float]] | None = None,
    *,
    values: list[CrossingValue] | None = None,
    activation_bytes: int = 0,
    parameters: list[int] | None = None,
    saved: list[int] | None = None,
    workspace: list[int] | None = None,
    replay: list[int] | None = None,
    optimizer_factor: float = 0.0,
    batch_size: int = 1,
) -> BlockChain:
    """A chain of one-node blocks; without ``values`` each block sends ``activation_bytes`` to the next, and back."""
    n = len(next(iter(forward_ms.values())))
    backward_ms = backward_ms or {name: [0.0] * n for name in forward_ms}
    if values is None:
        values = [CrossingValue(f"v{i}", i, (i + 1,), activation_bytes, activation_bytes) for i in range(n - 1)]
    return BlockChain(
        name="toy",
        batch_size=batch_size,
        blocks=tuple(Block(f"layer{i}", (f"op{i}a", f"op{i}b")) for i in range(n)),
        forward_ms={name: np.array(times, dtype=float) for name, times in forward_ms.items()},
        backward_ms={name: np.array(times, dtype=float) for name, times in backward_ms.items()},
        measured=False,
        values=tuple(values),
        parameters=tuple(SharedBytes(f"p{i}", size, (i,)) for i, size in enumerate(parameters or [])),
        frozen=(),
        saved=tuple(SharedBytes(f"s{i}", size, (i,)) for i, size in enumerate(saved or [])),
        optimizer_factor=optimizer_factor,
        workspace=tuple(workspace or ()),
        replay=tuple(replay or ()),
    )


FAST = Link("fast", 10.0, 1.0)
SLOW = Link("slow", 1.0, 20.0)
KINDS = ("a", "b", "cpu")


@st.composite
def clusters(draw: st.DrawFn, most: int = 4) -> Cluster:
    """Up to ``most`` devices of three kinds on up to three nodes; memories from scarce to plenty."""
    kinds = [
        kind(name, draw(st.integers(50, 1500) | st.integers(1500, 6000)), draw(st.integers(0, 20))) for name in KINDS
    ]
    nodes = draw(st.lists(st.lists(st.sampled_from(kinds), min_size=1, max_size=3), min_size=1, max_size=3))
    kept: list[list[DeviceKind]] = []
    for node in nodes:
        room = most - sum(map(len, kept))
        if room > 0:
            kept.append(node[:room])
    bandwidths = st.sampled_from([1e-6, 2e-6, 4e-6, 64e-6, float("inf")])
    links = [Link(f"l{i}", draw(bandwidths), draw(st.sampled_from([0.0, 500.0]))) for i in range(len(kept))]
    return cluster_of(kept, links, Link("net", draw(bandwidths), draw(st.sampled_from([0.0, 1000.0]))))


@st.composite
def chains(draw: st.DrawFn, most: int = 7, least: int = 1, linear: bool = False) -> BlockChain:
    """Random DAGs with values read twice, gradients or none, shared storages: small numbers, so that ties happen.

    Some with colocated blocks, some with fixed ends; ``linear``: with one order of the blocks only.
    """
    n = draw(st.integers(least, most))
    times = st.lists(st.integers(0, 12).map(float), min_size=n, max_size=n)
    blocks = st.integers(0, n - 1)
    values = []
    for index in range(draw(st.integers(0, n + 1)) if n > 1 else 0):
        producer = draw(st.integers(0, n - 2))
        consumers = draw(st.sets(st.integers(producer + 1, n - 1), min_size=1, max_size=3))
        forward, backward = draw(st.integers(0, 30)), draw(st.integers(0, 30))
        values.append(CrossingValue(f"v{index}", producer, tuple(sorted(consumers)), forward, backward))
    if linear:
        values += [CrossingValue(f"path{i}", i, (i + 1,), 0, 0) for i in range(n - 1)]
    pairs = st.lists(st.sets(blocks, min_size=2, max_size=3), max_size=1) if n > 2 else st.just([])
    colocate = draw(pairs) if draw(st.integers(0, 3)) == 3 else []

    def held(name: str) -> tuple[SharedBytes, ...]:
        sizes = draw(st.lists(st.tuples(st.integers(0, 40), st.sets(blocks, min_size=1, max_size=3)), max_size=6))
        return tuple(SharedBytes(f"{name}{i}", size, tuple(sorted(at))) for i, (size, at) in enumerate(sizes))

    resident = (
        tuple(draw(st.lists(st.integers(0, 300), min_size=n, max_size=n))) if draw(st.integers(0, 4)) == 4 else None
    )
    return BlockChain(
        name="random",
        batch_size=draw(st.integers(1, 64)),
        blocks=tuple(Block(f"layer{i}", (f"op{i}",)) for i in range(n)),
        forward_ms={name: np.array(draw(times)) for name in KINDS},
        backward_ms={name: np.array(draw(times)) for name in KINDS},
        measured=False,
        values=tuple(values),
        parameters=held("p"),
        frozen=held("f"),
        saved=held("s"),
        optimizer_factor=draw(st.sampled_from([0.0, 1.0, 2.0, 0.3])),
        workspace=draw(st.just(()) | st.lists(st.integers(0, 60), min_size=n, max_size=n).map(tuple)),
        replay=draw(st.just(()) | st.lists(st.integers(0, 20), min_size=n, max_size=n).map(tuple)),
        step_factor=draw(st.sampled_from([0.0, 1.0, 1.7])),
        loop_factor=draw(st.sampled_from([0.0, 2.0])),
        resident=resident,
        colocate=tuple(tuple(sorted(group)) for group in colocate),
        ends_fixed=draw(st.integers(0, 3)) == 3,
    )
