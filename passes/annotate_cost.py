"""Count what each node costs, by running it once on meta tensors under a dispatch mode.

1. Forward: every ATen operator below autograd counts its FLOPs (torch's own formulas) and the bytes of its operands;
   views and shape operators count nothing.
2. Backward: the node's own gradient is run the same way, so no formula for a backward pass is written here. Calls that
   are alike (`node_key`) have one backward: it is run for the first of them.
3. Saved bytes: ``saved_tensors_hooks`` sees each storage that autograd keeps. A storage counts once in the whole graph,
   with the node that made it; parameters and buffers do not count.
4. Workspace: the larger of what the node's forward and its backward need beside that. Forward: the most bytes alive at
   once, without those that some node saves, and the inputs that no node saves. Backward: the gradients of its results,
   and the most that is alive of what the backward makes (gradients of inputs among them), without the gradients that
   parameters keep. Gradients that wait for an earlier node take the place of what has been freed since the forward.

A module that is kept whole (``--opaque``) runs for real instead, on the CPU and the values of the example batch.

The kernels are those that a CPU would choose, for every device kind; a GPU's may keep other things, and plans say so
(`hetpipe_compiler.ir.plan.Plan.counted_with`). Fake CUDA tensors would not do better: without a GPU, torch runs no
backward of them, and chooses the attention that keeps all scores. Meta tensors choose the same kernels as a CPU but for
attention and low precision: there, fake tensors on the CPU are counted with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    unset_fake_temporarily,
)
from torch.utils import _pytree as pytree

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.regions import Context, autocast_on_cpu, contexts_of, enter, uses_autocast
from hetpipe_compiler.ir.captured import Captured
from hetpipe_compiler.ir.costs import GradientSum, NodeCost, SavedStorage, Work
from hetpipe_compiler.ir.opaque import OpaqueCall, opaque_call
from hetpipe_compiler.ir.source import source_place
from hetpipe_compiler.ir.storage import storage_of
from hetpipe_compiler.passes.base import Compilation, Pass
from hetpipe_compiler.passes.live_bytes import NodeLives, storages, tensors_in
from hetpipe_compiler.passes.node_key import node_key
from hetpipe_compiler.passes.normalize import Storages, mutated_arguments
from hetpipe_compiler.passes.operator_bytes import bytes_read
from hetpipe_compiler.passes.operator_work import WorkMode, work_of
from hetpipe_compiler.passes.storage_saver import StorageSaver


@dataclass(frozen=True)
class AnnotateCost(Pass):
    """See the module's rules."""

    name: ClassVar[str] = "annotate_cost"
    requires: ClassVar[tuple[str, ...]] = ("captured",)
    ensures: ClassVar[tuple[str, ...]] = ("costs",)

    def run(self, compilation: Compilation) -> None:
        assert compilation.captured is not None
        compilation.costs = count_costs(compilation.captured)

    def dump(self, compilation: Compilation) -> str:
        assert compilation.costs is not None
        rows = [f"{'node':40} {'GFLOP':>10} {'out MiB':>10} {'saved MiB':>10} {'work MiB':>10}"]
        for name, cost in compilation.costs.items():
            saved_mib = sum(s.bytes for s in cost.saved) / 2**20
            mib = f"{cost.output_bytes / 2**20:10.3f} {saved_mib:10.3f} {cost.workspace / 2**20:10.3f}"
            rows.append(f"{name:40} {cost.flops / 1e9:10.4f} {mib}")
        return "\n".join(rows)


@dataclass(frozen=True)
class NodeCall:
    """A call that stands for all with its key; ``leaves`` of the arguments' tree ``spec``, tensors without values."""

    target: Any
    contexts: tuple[Context, ...]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec


def count_costs(captured: Captured) -> dict[str, NodeCost]:
    """Cost of every node of the graph, by name.

    Raises:
        WorkloadError: HP114, a node's sizes depend on values.
    """
    return _counted(captured).costs


def count_calls(captured: Captured) -> tuple[dict[str, NodeCost], dict[str, NodeCall]]:
    """The same, and one call for each `NodeCost.key`, in the order of the graph."""
    counter = _counted(captured)
    return counter.costs, counter.calls


def _counted(captured: Captured) -> _CostInterpreter:
    with torch.random.fork_rng(devices=[]):
        if not _needs_cpu(captured):
            return _count(captured, captured.example, captured.meta, "meta")
        with FakeTensorMode(allow_non_fake_inputs=True):
            example = tuple(torch.empty_like(t, device="cpu") for t in captured.example)
            tensors = {
                name: torch.empty_like(t, device="cpu").requires_grad_(t.requires_grad)
                for name, t in captured.meta.items()
            }
            return _count(captured, example, tensors, "cpu")


def _needs_cpu(captured: Captured) -> bool:
    """Whether meta tensors would show something else than tensors on a CPU.

    Autocast knows nothing of them, attention takes its slow kernel for them, which keeps all scores, and what a
    normalisation keeps in low precision has another dtype.
    """
    graph = captured.graph_module.graph
    attends = any(str(node.target).startswith("aten.scaled_dot_product_attention") for node in graph.nodes)
    low = any(t.is_floating_point() and t.element_size() < 4 for t in captured.meta.values())
    return attends or low or uses_autocast(graph)


def _count(
    captured: Captured, example: Sequence[torch.Tensor], tensors: Mapping[str, torch.Tensor], device: str
) -> _CostInterpreter:
    counter = _CostInterpreter(captured, tensors, torch.device(device))
    counter.run(*example)
    counter.add_gradient_sums()
    counter.add_workspaces()
    return counter


class _CostInterpreter(fx.Interpreter):
    """Runs each node on its own, forward and then its own backward; values travel on as leaves."""

    def __init__(self, captured: Captured, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        super().__init__(captured.graph_module, garbage_collect_values=False)
        self._root = captured.root
        self._tensors = tensors
        self._device = device
        self.costs: dict[str, NodeCost] = {}
        self.calls: dict[str, NodeCall] = {}
        self._graph = captured.graph_module.graph
        self._values: dict[fx.Node, torch.Tensor] = {}
        self._storages = Storages(self._graph)
        self._lives: dict[str, NodeLives] = {}
        self._backwards: dict[tuple[object, ...], _Backward] = {}
        self._saver = StorageSaver(
            excluded={storage_of(t) for t in tensors.values()},
            trainable={storage_of(t) for t in tensors.values() if t.requires_grad},
        )
        self._contexts: tuple[Context, ...] = ()
        # Every tensor ever made stays alive here, so that no storage's identity is used again.
        self._alive: list[Any] = []

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "get_attr":
            return self._tensors[str(n.target)]
        if n.op == "output":
            return super().run_node(n)
        if n.op == "placeholder":
            value = super().run_node(n)
            self._note(n, value, (), (), False, ())
            return value
        try:
            return self._measure(n)
        except (RuntimeError, NotImplementedError, DynamicOutputShapeException, DataDependentOutputException) as error:
            if isinstance(error, RuntimeError) and "meta tensor" not in str(error) and "_meta " not in str(error):
                raise
            raise WorkloadError(
                "HP114",
                f"what {n.target} makes has a size or a value that depends on the batch's values",
                where=source_place(n, self._root) or None,
                hint="use a mask, torch.where or a fixed size: a plan must know sizes;"
                " or let it lie in a submodule that --opaque keeps whole",
            ) from error

    def _measure(self, node: fx.Node) -> Any:
        if (opaque := opaque_call(node)) is not None:
            return self._measure_opaque(node, opaque)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        call: Callable[..., Any] = node.target if callable(node.target) else getattr(self.module, str(node.target))
        leaves, spec = pytree.tree_flatten((args, kwargs))
        inputs = [self._device if isinstance(leaf, torch.device) else _as_leaf(leaf) for leaf in leaves]
        mode = WorkMode()
        call_args, call_kwargs = pytree.tree_unflatten(inputs, spec)
        key = node_key(node.target, call_args, call_kwargs, contexts_of(node))
        self.calls.setdefault(key, NodeCall(node.target, contexts_of(node), tuple(inputs), spec))
        if contexts_of(node) != self._contexts:
            self._contexts = contexts_of(node)
            self._saver.region += 1
        self._saver.current = []
        self._saver.casts = mode.casts if any(c[0] == "autocast" for c in self._contexts) else {}
        written = _writes(node)
        hooks = torch.autograd.graph.saved_tensors_hooks(self._saver.pack, lambda t: t)
        with torch.enable_grad(), enter(contexts_of(node)), hooks, mode:
            # A leaf that wants a gradient must not be written into: an in-place operator works on a stand-in.
            given = [_stand_in(i, written) for i in inputs]
            call_args, call_kwargs = pytree.tree_unflatten(given, spec)
            out = call(*call_args, **call_kwargs)
        forward = tuple(mode.work)
        lives = NodeLives(mode.live.peak, mode.live.made, storages(given))
        # A view made under no_grad says that it requires a gradient, but none ever flows.
        grad = _grad_enabled(node)
        differentiable = grad and any(t.requires_grad for t in tensors_in(out))
        backward = self._backward_of(key, out, inputs) if differentiable else _Backward()
        lives.backward = self._backward_bytes(node, backward)
        self._lives[node.name] = lives
        # What no_grad writes into keeps the gradient that it had.
        kept = not grad and any(self._wants_gradient(n) for n in mutated_arguments(node))
        value = pytree.tree_map(
            lambda t: _passed_on(t, differentiable, kept) if isinstance(t, torch.Tensor) else t, out
        )
        self._alive.append((out, value))
        for leaf in tensors_in(value):
            self._saver.owners.setdefault(storage_of(leaf), node.name)
        self._note(node, value, forward, backward.work, differentiable or kept, self._saved_by(node), key)
        gained = {id(leaf) for leaf, after in zip(leaves, given, strict=True) if _gained_gradient(leaf, after)}
        for target in mutated_arguments(node) if differentiable else ():
            if id(self.env[target]) in gained:
                self._let_gradients_through(target)
        return value

    def _let_gradients_through(self, written: fx.Node) -> None:
        """What is written into a value with a gradient gives one to it and to all views of it, as autograd does."""
        for node in self._views_with(written):
            value = self.env.get(node)
            if isinstance(value, torch.Tensor) and value.is_floating_point() and not value.requires_grad:
                self.env[node] = self._values[node] = value.detach().requires_grad_(True)
                self._alive.append(self.env[node])
                if node.name in self.costs:
                    self.costs[node.name] = replace(self.costs[node.name], requires_grad=True)

    def _views_with(self, written: fx.Node) -> list[fx.Node]:
        """Nodes on the memory of ``written`` that autograd knows as views of one value; ``detach`` parts them."""
        bases: dict[fx.Node, fx.Node] = {}
        for node in self._storages.sharers(written):
            sources = (bases[s] for s in node.all_input_nodes if s in bases)
            bases[node] = node if node.target is torch.ops.aten.detach.default else next(sources, node)
        return [node for node, base in bases.items() if base is bases[written]]

    def _wants_gradient(self, node: fx.Node) -> bool:
        return node in self._values and self._values[node].requires_grad

    def _measure_opaque(self, node: fx.Node, call: OpaqueCall) -> Any:
        """Run the user's own module on the example's values: only they say what it does."""
        args, _ = self.fetch_args_kwargs_from_env(node)
        pairs = list(zip(call.example, args[1], strict=True))
        with unset_fake_temporarily():
            given = [t.detach().requires_grad_(m.requires_grad) for t, m in pairs]
        self._saver.stands_for = {storage_of(t): storage_of(m) for t, m in pairs}
        self._saver.excluded |= {storage_of(t) for t in call.own}
        self._saver.current, self._saver.casts = [], {}
        mode = WorkMode()
        hooks = torch.autograd.graph.saved_tensors_hooks(self._saver.pack, lambda t: t)
        with unset_fake_temporarily(), autocast_on_cpu():
            with torch.enable_grad(), enter(contexts_of(node)), hooks, mode:
                out = call.call(given)
            lives = NodeLives(mode.live.peak, mode.live.made, storages(args[1]))
            backward = _run_backward(out, [*given, *call.own])
        lives.backward = self._backward_bytes(node, backward)
        # Whether a result has a gradient may depend on values: it has one if it can.
        differentiable = _grad_enabled(node) and any(t.requires_grad for t in tensors_in(args))
        value = []
        for real in tensors_in(out):
            leaf = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=self._device)
            value.append(leaf.requires_grad_(differentiable and leaf.is_floating_point()))
            storage = storage_of(leaf)
            self._saver.owners.setdefault(storage, node.name)
            lives.made[storage] = lives.made.pop(storage_of(real), 0)
        self._lives[node.name] = lives
        self._alive.append((out, value))
        saved, key = self._saved_by(node), f"opaque {call.module}"
        self._note(node, value, tuple(mode.work), backward.work, differentiable, saved, key)
        return value

    def _saved_by(self, node: fx.Node) -> tuple[SavedStorage, ...]:
        """What autograd keeps since ``node``, which has just run, each with the node that made it."""
        owners = self._saver.owners
        return tuple(SavedStorage(owners.get(storage, node.name), size) for storage, size in self._saver.current)

    def _backward_of(self, key: str, out: Any, inputs: list[Any]) -> _Backward:
        """The backward of a call; run once for all that are alike, also in storages that a key leaves out."""
        alike = (key, *map(bytes_read, tensors_in(inputs)))
        if alike not in self._backwards:
            self._backwards[alike] = _run_backward(out, inputs)
        return self._backwards[alike]

    def add_gradient_sums(self) -> None:
        """Fill in `NodeCost.sums`, when all nodes are known."""
        for node in self._graph.nodes:
            readers = [n.name for n in node.users if n.name in self.costs and self.costs[n.name].requires_grad]
            tensor = self._tensors.get(str(node.target)) if node.op == "get_attr" else self._values.get(node)
            if len(readers) < 2 or tensor is None or not tensor.requires_grad:
                continue
            # Two tensors: the work of adding counts each operand once.
            pair = (torch.empty_like(tensor, requires_grad=False), torch.empty_like(tensor, requires_grad=False))
            add = torch.ops.aten.add.Tensor
            key = node_key(add, pair, {}, ())
            leaves, spec = pytree.tree_flatten((pair, {}))
            self.calls.setdefault(key, NodeCall(add, (), tuple(leaves), spec))
            work = work_of(add, pair, {}, torch.empty_like(pair[0]))
            owner = readers[0] if node.op == "get_attr" else node.name
            cost = self.costs[owner]
            self.costs[owner] = replace(cost, sums=(*cost.sums, GradientSum(key, work, len(readers) - 1)))

    def add_workspaces(self) -> None:
        """Fill in `NodeCost.workspace`, when all nodes are known."""
        for name, lives in self._lives.items():
            self.costs[name] = replace(
                self.costs[name], workspace=lives.workspace(self._saver.seen, self._saver.excluded)
            )

    def _backward_bytes(self, node: fx.Node, backward: _Backward) -> int:
        """Bytes at the backward's peak, without the gradients that parameters keep."""
        return max(backward.gradient_bytes, backward.peak_bytes - self._kept_gradients(node))

    def _kept_gradients(self, node: fx.Node) -> int:
        """Bytes of the gradients that parameters keep when the backward of ``node`` has run.

        Where several nodes read a parameter, the last one's gradient is kept; the others are added to it and go.
        """
        kept: dict[int, int] = {}
        for source in node.all_input_nodes:
            value = self.env[source]
            if isinstance(value, torch.Tensor) and value.requires_grad and [*source.users][-1] is node:
                key = storage_of(value)
                if key in self._saver.excluded:
                    kept[key] = value.numel() * value.element_size()
        return sum(kept.values())

    def _note(
        self,
        node: fx.Node,
        value: Any,
        forward: tuple[Work, ...],
        backward: tuple[Work, ...],
        requires_grad: bool,
        saved: tuple[SavedStorage, ...],
        key: str = "",
    ) -> None:
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            self._saver.owners[storage_of(value)] = node.name
            self._alive.append(value)
        tensors = tensors_in(value)
        single = value if isinstance(value, torch.Tensor) else None
        if single is not None:
            self._values[node] = single
        self.costs[node.name] = NodeCost(
            forward=forward,
            backward=backward,
            output_bytes=sum(t.numel() * t.element_size() for t in tensors),
            shape=tuple(single.shape) if single is not None else None,
            dtype=str(single.dtype).removeprefix("torch.") if single is not None else _scalar_dtype(value),
            requires_grad=requires_grad,
            saved=saved,
            key=key,
        )


def _scalar_dtype(value: Any) -> str | None:
    return type(value).__name__ if isinstance(value, (bool, int, float)) else None


def _grad_enabled(node: fx.Node) -> bool:
    """Whether the model lets gradients flow there."""
    return next((bool(c[1]) for c in reversed(contexts_of(node)) if c[0] == "grad"), True)


def _writes(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _as_leaf(value: Any) -> Any:
    """The value cut off from what made it, on the same storage."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _stand_in(value: Any, written: bool) -> Any:
    if not written or not isinstance(value, torch.Tensor):
        return value
    return value.clone() if value.requires_grad else value.view_as(value)


def _gained_gradient(before: Any, after: Any) -> bool:
    return isinstance(after, torch.Tensor) and after.requires_grad and not before.requires_grad


def _passed_on(value: torch.Tensor, differentiable: bool, kept: bool) -> torch.Tensor:
    return value.detach().requires_grad_(kept or (differentiable and value.requires_grad))


@dataclass(frozen=True)
class _Backward:
    """Operators of a backward, bytes of its results' gradients, and the most bytes of what it makes alive at once."""

    work: tuple[Work, ...] = ()
    gradient_bytes: int = 0
    peak_bytes: int = 0


def _run_backward(out: Any, inputs: list[Any]) -> _Backward:
    """The node's own gradient, with some gradient for each of its results."""
    outs = [t for t in tensors_in(out) if t.requires_grad]
    unique = list({id(t): t for t in tensors_in(inputs) if t.requires_grad}.values())
    gradients = [torch.empty_like(t) for t in outs]
    mode = WorkMode()
    if outs and unique:
        mode.live.note(gradients)
        with mode:
            torch.autograd.grad(outs, unique, gradients, allow_unused=True)
    return _Backward(tuple(mode.work), sum(map(bytes_read, gradients)), mode.live.peak)
