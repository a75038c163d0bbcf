"""What each stage of a partition holds, receives, returns and sends: the analysis behind the stage modules.

A stage is an interval of the block chain. Values go straight from the stage that makes them to each stage that reads
them; what does not depend on the batch is cloned; the batch itself is made by stage 0; a trainable parameter that
several stages read belongs to the first of them and its value travels like an activation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from hetpipe_compiler.ir.blocks import BlockChain
from hetpipe_compiler.ir.captured import Captured
from hetpipe_compiler.ir.costs import NodeCost
from hetpipe_compiler.ir.plan import Port, Tensor


@dataclass(frozen=True)
class StageCut:
    """One stage, before it becomes Python.

    Attributes:
        nodes: fx nodes it runs in program order, cloned constants included (``get_attr`` nodes are not listed).
        own_nodes: Names of those that belong to its blocks.
        inputs, outputs, sends: As in `hetpipe_compiler.ir.plan.Stage`.
        parameters, buffers, constants: Tensors that live here.
        received: Parameter name -> input port that carries its value.
        returned: Output port name -> parameter whose value it is.
    """

    index: int
    nodes: tuple[fx.Node, ...]
    own_nodes: tuple[str, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    sends: dict[int, tuple[str, ...]]
    parameters: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]
    received: dict[str, str]
    returned: dict[str, str]


def cut_stages(
    captured: Captured, costs: Mapping[str, NodeCost], chain: BlockChain, bounds: Sequence[tuple[int, int]]
) -> tuple[StageCut, ...]:
    """Cut the graph at ``bounds``: half-open block intervals, one a stage, covering the chain."""
    return _Cutter(captured, costs, chain, bounds).stages()


class _Cutter:
    def __init__(
        self,
        captured: Captured,
        costs: Mapping[str, NodeCost],
        chain: BlockChain,
        bounds: Sequence[tuple[int, int]],
    ) -> None:
        self._captured = captured
        self._costs = costs
        self._count = len(bounds)
        self._graph = captured.graph_module.graph
        self._home: dict[str, int] = {
            name: stage
            for stage, (lo, hi) in enumerate(bounds)
            for b in range(lo, hi)
            for name in chain.blocks[b].nodes
        }
        self._tensors = captured.tensors
        self._loss = captured.loss_node()
        leaves = dict(zip((n for n in self._graph.nodes if n.op == "placeholder"), captured.batch_leaves, strict=True))
        self._leaf = {n.name: leaf for n, leaf in leaves.items()}
        self._symbol = _batch_symbol(next(iter(leaves)))
        self._running = [self._with_constants(s) for s in range(self._count)]
        self._readers = self._stages_reading()
        self._owner = self._parameter_owners()
        self._titles = _titles(self._owner, {node.name for node in self._graph.nodes})

    def stages(self) -> tuple[StageCut, ...]:
        return tuple(self._stage(s) for s in range(self._count))

    def _home_of(self, node: fx.Node) -> int | None:
        """The stage that makes a node's value; None for constants, which each stage makes itself."""
        return 0 if node.op == "placeholder" else self._home.get(node.name)

    def _with_constants(self, stage: int) -> list[fx.Node]:
        """The stage's nodes and the constants that they need, in program order."""
        wanted: set[fx.Node] = set()
        stack = [n for n in self._graph.nodes if self._home.get(n.name) == stage]
        if stage == self._count - 1 and self._home_of(self._loss) is None:
            stack.append(self._loss)
        while stack:
            node = stack.pop()
            if node in wanted:
                continue
            wanted.add(node)
            stack += [i for i in node.all_input_nodes if self._home_of(i) is None]
        return [n for n in self._graph.nodes if n in wanted]

    def _stages_reading(self) -> dict[fx.Node, set[int]]:
        """For each value that a stage makes: the other stages that read it."""
        readers: dict[fx.Node, set[int]] = {}
        for stage, nodes in enumerate(self._running):
            for node in nodes:
                for source in node.all_input_nodes:
                    home = self._home_of(source)
                    if home is not None and home != stage:
                        assert home < stage, f"{source.name} of stage {home} is read by stage {stage}"
                        readers.setdefault(source, set()).add(stage)
        return readers

    def _parameter_owners(self) -> dict[str, list[int]]:
        """For each trainable parameter: the stages that read it; the first owns it."""
        users: dict[str, set[int]] = {}
        for stage, nodes in enumerate(self._running):
            for node in nodes:
                if node.op == "get_attr" and self._trainable(str(node.target)):
                    users.setdefault(str(node.target), set()).add(stage)
        return {name: sorted(stages) for name, stages in users.items()}

    def _trainable(self, name: str) -> bool:
        return name in self._tensors and self._tensors[name].trainable

    def _stage(self, stage: int) -> StageCut:
        read = [n for n in self._graph.nodes if stage in self._readers.get(n, ())]
        if stage == 0:
            read = [n for n in self._graph.nodes if n.op == "placeholder" and n.users]
        inputs = [self._value_port(n) for n in read]
        shared = {name: stages for name, stages in self._owner.items() if len(stages) > 1}
        carried = {name: self._parameter_port(name) for name, stages in shared.items() if stage in stages[1:]}
        made = [n for n in self._graph.nodes if n in self._readers and self._home_of(n) == stage]
        outputs = [self._value_port(n) for n in made]
        given = {name: self._parameter_port(name) for name, stages in shared.items() if stages[0] == stage}
        last = stage == self._count - 1
        sends: dict[int, tuple[str, ...]] = {}
        for peer in range(stage + 1, self._count):
            names = [n.name for n in made if peer in self._readers[n]]
            names += [port.name for name, port in given.items() if peer in shared[name][1:]]
            if names:
                sends[peer] = tuple(names)
        here = self._attributes(stage)
        return StageCut(
            index=stage,
            nodes=tuple(n for n in self._running[stage] if n.op != "get_attr"),
            own_nodes=tuple(n.name for n in self._running[stage] if self._home.get(n.name) == stage),
            inputs=(*inputs, *carried.values()),
            outputs=(*outputs, *given.values(), *([self._value_port(self._loss)] if last else [])),
            sends=sends,
            parameters=tuple(t for t in self._captured.parameters if t.name in here),
            buffers=tuple(t for t in self._captured.buffers if t.name in here),
            constants=tuple(t for t in self._captured.constants if t.name in here),
            received={name: port.name for name, port in carried.items()},
            returned={port.name: name for name, port in given.items()},
        )

    def _attributes(self, stage: int) -> set[str]:
        """Tensors that live in the stage: what it reads, but for shared parameters that another stage owns."""
        read = {str(n.target) for n in self._running[stage] if n.op == "get_attr"}
        return {name for name in read if self._owner.get(name, [stage])[0] == stage}

    def _value_port(self, node: fx.Node) -> Port:
        cost = self._costs[node.name]
        scalar = cost.shape is None
        return Port(
            name=node.name,
            kind="scalar" if scalar else "tensor",
            source=self._home_of(node) or 0,
            shape=() if cost.shape is None else self._shape(node, cost.shape),
            dtype=cost.dtype or "int",
            requires_grad=cost.requires_grad and not scalar,
            bytes=cost.output_bytes,
            batch_leaf=self._leaf.get(node.name),
        )

    def _shape(self, node: fx.Node, concrete: tuple[int, ...]) -> tuple[int | str, ...]:
        """Sizes, with those that follow the batch size as text."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dim() != len(concrete):
            return concrete
        return tuple(
            re.sub(rf"\b{self._symbol}\b", "batch", str(size)) if _is_symbol(size) and self._symbol else at
            for size, at in zip(value.shape, concrete, strict=True)
        )

    def _parameter_port(self, name: str) -> Port:
        tensor = self._tensors[name]
        return Port(
            name=self._titles[name],
            kind="parameter",
            source=self._owner[name][0],
            shape=tensor.shape,
            dtype=tensor.dtype,
            requires_grad=True,
            bytes=tensor.bytes,
        )


def _titles(parameters: Iterable[str], taken: set[str]) -> dict[str, str]:
    """What ports that carry parameters are called, each unlike all others and unlike ``taken``."""
    titles: dict[str, str] = {}
    for name in parameters:
        title = "shared_" + re.sub(r"\W", "_", name)
        while title in taken:
            title += "_"
        titles[name] = title
        taken = taken | {title}
    return titles


def _is_symbol(size: object) -> bool:
    return isinstance(size, torch.SymInt)


def _batch_symbol(placeholder: fx.Node) -> str:
    """Export's symbol for the batch size, '' where it is a constant."""
    value = placeholder.meta.get("val")
    if isinstance(value, torch.Tensor) and value.dim() and _is_symbol(value.shape[0]):
        return str(value.shape[0])
    return ""
