"""Make the atomic components a chain of blocks, the unit that the partitioner cuts.

1. A component is a block, in execution order.
2. Where there are more than ``max_blocks`` they are merged along the graph: see `multilevel`. What that costs at most,
   against the best partition of the components, is measured for every plan (`proven_bound`).
3. With no more components than that nothing is merged here: a cut may fall between any two of them. Where the orders
   that they may have are too many, the search itself merges (`orders`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from torch import fx

from hetpipe_compiler.ir.blocks import NO_REPLAY, Block, BlockChain, CrossingValue, SharedBytes
from hetpipe_compiler.ir.captured import Captured
from hetpipe_compiler.ir.cluster import DeviceKind
from hetpipe_compiler.ir.costs import NodeCost
from hetpipe_compiler.ir.opaque import opaque_call
from hetpipe_compiler.ir.source import module_path
from hetpipe_compiler.passes.base import Compilation, Pass
from hetpipe_compiler.passes.fuse_atomic import Components
from hetpipe_compiler.passes.multilevel import MOST_BLOCKS, shorten_chain


@dataclass(frozen=True)
class Coarsen(Pass):
    """See the module's rules.

    Attributes:
        model_name: Name for the chain.
        optimizer_factor, step_factor, loop_factor: The optimizer's memory, as in `BlockChain`.
        max_blocks: Blocks at most.
    """

    name: ClassVar[str] = "coarsen"
    requires: ClassVar[tuple[str, ...]] = ("captured", "costs", "components")
    ensures: ClassVar[tuple[str, ...]] = ("chain",)

    model_name: str
    optimizer_factor: float
    step_factor: float = 0.0
    loop_factor: float = 0.0
    max_blocks: int = MOST_BLOCKS

    def run(self, compilation: Compilation) -> None:
        captured, costs, components = compilation.captured, compilation.costs, compilation.components
        assert captured is not None
        assert costs is not None
        assert components is not None
        kinds = compilation.cluster.kinds()
        whole = build_chain(
            captured, costs, components.nodes, kinds, name=self.model_name, optimizer_factor=self.optimizer_factor
        )
        whole = replace(whole, step_factor=self.step_factor, loop_factor=self.loop_factor)
        compilation.chain = shorten_chain(whole, self.max_blocks, max(kind.memory_bytes for kind in kinds))
        compilation.whole = whole if len(compilation.chain) < len(whole) else None


def node_chain(
    captured: Captured,
    costs: Mapping[str, NodeCost],
    components: Components,
    kinds: Sequence[DeviceKind],
    *,
    name: str,
    optimizer_factor: float,
) -> BlockChain:
    """The same before anything is merged: a block a node, atomic components as colocated groups."""
    nodes = [name for names in components.nodes for name in names]
    chain = build_chain(captured, costs, [(n,) for n in nodes], kinds, name=name, optimizer_factor=optimizer_factor)
    ends = np.cumsum([len(names) for names in components.nodes])
    groups = (tuple(range(end - len(names), end)) for names, end in zip(components.nodes, ends, strict=True))
    return replace(chain, colocate=tuple(group for group in groups if len(group) > 1))


def build_chain(
    captured: Captured,
    costs: Mapping[str, NodeCost],
    groups: Sequence[tuple[str, ...]],
    kinds: Sequence[DeviceKind],
    *,
    name: str,
    optimizer_factor: float,
) -> BlockChain:
    """The planner's view of the blocks: costs per kind, crossing values, and what stays in memory."""
    graph = captured.graph_module.graph
    by_name: dict[str, fx.Node] = {n.name: n for n in graph.nodes}
    block_of = {n: at for at, names in enumerate(groups) for n in names}
    readers = _Readers(captured, block_of)
    values = []
    for node in graph.nodes:
        producer = 0 if node.op == "placeholder" else block_of.get(node.name)
        if producer is None:
            continue
        later = tuple(b for b in readers.blocks(node) if b > producer)
        if later:
            cost = costs[node.name]
            back = cost.output_bytes if cost.requires_grad and cost.shape is not None else 0
            values.append(CrossingValue(node.name, producer, later, cost.output_bytes, back))
    parameters, frozen = [], []
    used = readers.attributes()
    for tensor in (*captured.parameters, *captured.buffers, *captured.constants):
        blocks = used.get(tensor.name, ())
        if not blocks:
            continue
        if tensor.trainable:
            parameters.append(SharedBytes(tensor.name, tensor.bytes, blocks[:1]))
            if len(blocks) > 1:
                values.append(CrossingValue(tensor.name, blocks[0], blocks[1:], tensor.bytes, tensor.bytes))
        else:
            frozen.append(SharedBytes(tensor.name, tensor.bytes, blocks))
    saved: Counter[tuple[str, int]] = Counter()
    for node_name, cost in costs.items():
        for storage in cost.saved:
            at = block_of.get(storage.producer, 0 if _is_input(by_name, storage.producer) else block_of.get(node_name))
            if at is not None:
                saved[storage.producer, at] += storage.bytes
    return BlockChain(
        name=name,
        batch_size=captured.batch_size,
        blocks=tuple(Block(_title(by_name, names), names) for names in groups),
        forward_ms={k.name: np.array([sum(costs[n].forward_ms(k) for n in g) for g in groups]) for k in kinds},
        backward_ms={k.name: np.array([sum(costs[n].backward_ms(k) for n in g) for g in groups]) for k in kinds},
        measured={k.name: np.array([all(costs[n].is_measured(k) for n in g) for g in groups]) for k in kinds},
        values=tuple(values),
        parameters=tuple(parameters),
        frozen=tuple(frozen),
        saved=tuple(SharedBytes(n, size, (at,)) for (n, at), size in saved.items()),
        optimizer_factor=optimizer_factor,
        workspace=tuple(max((costs[n].workspace for n in g), default=0) for g in groups),
        replay=_replay(captured, costs, used, groups),
        ends_fixed=True,
    )


def _replay(
    captured: Captured,
    costs: Mapping[str, NodeCost],
    used: Mapping[str, tuple[int, ...]],
    groups: Sequence[tuple[str, ...]],
) -> tuple[int, ...]:
    """What a forward needs to run again: what it changes, which is in one block each, and the batch.

    A module kept whole may keep more than tensors, and draw random numbers that are not torch's: it cannot run again.
    """
    replay = [0] * len(groups)
    graph = captured.graph_module.graph
    batch = (n for n in graph.nodes if n.op == "placeholder" and n.users)
    replay[0] = sum(costs[node.name].output_bytes for node in batch if node.name in costs)
    whole = {node.name for node in graph.nodes if opaque_call(node) is not None}
    for at, names in enumerate(groups):
        replay[at] += 0 if whole.isdisjoint(names) else NO_REPLAY
    for buffer in captured.buffers:
        if buffer.mutated and used.get(buffer.name):
            replay[used[buffer.name][0]] += buffer.bytes
    return tuple(replay)


def _is_input(by_name: Mapping[str, fx.Node], name: str) -> bool:
    return by_name[name].op == "placeholder"


class _Readers:
    """Which blocks read a node or an attribute, directly or through constants that they clone."""

    def __init__(self, captured: Captured, block_of: Mapping[str, int]) -> None:
        self._graph = captured.graph_module.graph
        self._of: dict[fx.Node, tuple[int, ...]] = {}
        for node in reversed(self._graph.nodes):
            found: set[int] = set()
            for user in node.users:
                if user.name in block_of:
                    found.add(block_of[user.name])
                elif user.op != "output":
                    found.update(self._of.get(user, ()))
            self._of[node] = tuple(sorted(found))

    def blocks(self, node: fx.Node) -> tuple[int, ...]:
        return self._of[node]

    def attributes(self) -> dict[str, tuple[int, ...]]:
        used: dict[str, set[int]] = {}
        for node in self._graph.nodes:
            if node.op == "get_attr":
                used.setdefault(str(node.target), set()).update(self._of[node])
        return {name: tuple(sorted(blocks)) for name, blocks in used.items()}


def _title(by_name: Mapping[str, fx.Node], names: Sequence[str]) -> str:
    """The module path that most nodes of a block share."""
    paths = Counter(module_path(by_name[n]) for n in names if n in by_name)
    return paths.most_common(1)[0][0] if paths else ""
