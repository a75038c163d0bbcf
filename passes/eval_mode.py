"""Make one graph of two: what each node of the training graph is in eval mode.

Export freezes the mode into the graph: ``dropout(x, p, True)``, ``batch_norm(..., True, ...)``, a dropout probability
that is 0 in eval mode, a counter that only training moves. The model is captured a second time, in eval mode, and the
two graphs are laid beside each other in program order:

1. Every operator of the eval graph must be one of the training graph, on the same values. Where a constant argument
   differs (a train flag, a probability), the node notes the other constant.
2. Operators that only the training graph has do not run in eval mode. If the eval graph reads another value in such a
   one's place, and that value is what the operator was computed from, the value stands for it: dropout, drop-path and
   auxiliary losses come out right.
3. Everything else (a branch on ``self.training`` that computes another thing) cannot be told with one graph: the plan
   does not evaluate, and says at which line.

A stage that runs so in eval mode executes exactly the operators of the eval graph. One thing remains: a tensor that the
eval graph writes may have more names than in training (``dropout`` returns its input), so all that touch it must lie
in one component already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, ClassVar

import torch
from torch import fx

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.regions import contexts_of
from hetpipe_compiler.ir.captured import Captured
from hetpipe_compiler.ir.opaque import opaque_call
from hetpipe_compiler.ir.source import module_path, source_place
from hetpipe_compiler.passes.base import Compilation, Pass
from hetpipe_compiler.passes.fuse_atomic import touching_written
from hetpipe_compiler.passes.normalize import Storages, normalize

_KEY = "hetpipe_in_eval"


@dataclass(frozen=True)
class InEval:
    """A node of the training graph that is something else in eval mode.

    Attributes:
        arguments: Argument name -> what it is in eval mode; only constants differ from the training graph.
        runs: Whether the operator runs at all.
        stands_for_it: If not: the argument's node whose value takes its place; None where nothing reads it.
    """

    arguments: Mapping[str, Any]
    runs: bool = True
    stands_for_it: fx.Node | None = None


def in_eval(node: fx.Node) -> InEval | None:
    """What the node is in eval mode; None: the same as in training."""
    found: InEval | None = node.meta.get(_KEY)
    return found


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """All arguments by name in the schema's order, defaults included.

    Functions without a schema count theirs: ``"0"``, ``"1"``.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return {str(at): value for at, value in enumerate(node.args)} | node.kwargs
    schema = node.target._schema.arguments
    given = dict(zip((a.name for a in schema), node.args, strict=False)) | node.kwargs
    return {a.name: given.get(a.name, a.default_value) for a in schema}


@dataclass(frozen=True)
class EvalMode(Pass):
    """See the module's rules."""

    name: ClassVar[str] = "eval_mode"
    requires: ClassVar[tuple[str, ...]] = ("captured",)
    ensures: ClassVar[tuple[str, ...]] = ("captured",)

    def run(self, compilation: Compilation) -> None:
        assert compilation.captured is not None
        compilation.captured = compare_with_eval(compilation.captured)

    def dump(self, compilation: Compilation) -> str:
        captured = compilation.captured
        assert captured is not None
        if captured.evaluation_note:
            return captured.evaluation_note
        rows = ((n.name, in_eval(n)) for n in captured.graph_module.graph.nodes)
        lines = [f"{name}: {_text(found)}" for name, found in rows if found is not None]
        return "\n".join(lines) or "the same in eval mode"


def _text(found: InEval) -> str:
    if found.runs:
        return ", ".join(f"{name}={value}" for name, value in found.arguments.items())
    return f"not run, {found.stands_for_it} in its place" if found.stands_for_it else "not run"


def compare_with_eval(captured: Captured) -> Captured:
    """Note on each node of the normalized training graph what it is in eval mode."""
    if captured.in_eval is None:
        return captured
    _let_idle_dropouts_be(captured.in_eval.graph_module.graph)
    try:
        evaluated = normalize(captured.in_eval)
    except WorkloadError as error:
        note: str | None = f"in eval mode: {error.message}" + (f" ({error.where})" if error.where else "")
    else:
        note = _Comparison(captured, evaluated).run()
    return replace(captured, in_eval=None, evaluation=note is None, evaluation_note=note)


class _Comparison:
    """Lays the eval graph beside the training graph.

    Terms: a training node is *met* when the eval graph has it too; one that is passed over does not run in eval mode.
    """

    def __init__(self, training: Captured, evaluated: Captured) -> None:
        self._training, self._eval = training, evaluated
        nodes = training.graph_module.graph.nodes
        self._calls: list[fx.Node] = [n for n in nodes if n.op == "call_function"]
        self._order = {n: at for at, n in enumerate(self._calls)}
        #: Eval node -> training node of the same value.
        self._twin: dict[fx.Node, fx.Node] = {}
        self._met: set[fx.Node] = set()
        #: Training node that does not run -> the node read in its place.
        self._stands: dict[fx.Node, fx.Node] = {}
        #: Training node that in eval mode returns its very input -> that input. Export then calls both by one name.
        self._returns: dict[fx.Node, fx.Node] = {}
        #: Parameter, buffer or constant -> a node that reads it; constants of one value share one.
        self._attributes: dict[str, fx.Node] = {}
        self._constants: list[tuple[torch.Tensor, fx.Node]] = []
        for node in nodes:
            if node.op == "get_attr" and str(node.target) not in self._attributes:
                value = training.constant_values.get(str(node.target))
                known = self._constant(value) if value is not None else None
                self._attributes[str(node.target)] = known or node
                if value is not None and known is None:
                    self._constants.append((value, node))

    def run(self) -> str | None:
        """Mark the training nodes; returns why it cannot be done instead."""
        nodes = self._eval.graph_module.graph.nodes
        ours = (n for n in self._training.graph_module.graph.nodes if n.op == "placeholder")
        self._twin.update(zip((n for n in nodes if n.op == "placeholder"), ours, strict=True))
        for node in nodes:
            if node.op == "get_attr" and (attribute := self._attribute(str(node.target))) is not None:
                self._twin[node] = attribute
        at = 0
        for node in (n for n in nodes if n.op == "call_function"):
            found = self._find(node, at)
            if found is None:
                return self._something_else(node)
            self._twin[node] = found
            self._met.add(found)
            if _is_idle_dropout(node):
                self._returns[found] = arguments_of(found)["input" if "input" in arguments_of(found) else "self"]
            at = max(at, self._order[found] + 1)
        new: dict[fx.Node, fx.Node] = {}
        if not self._same(self._training.loss_node(), self._eval.loss_node(), new):
            return self._something_else(self._eval.loss_node())
        self._stands.update(new)
        conflict = self._written_by_other_names()
        if conflict is not None:
            return conflict
        self._mark()
        return None

    def _something_else(self, node: fx.Node) -> str:
        place = source_place(node, self._eval.root) or module_path(node)
        return f"the model computes something else in eval mode ({node.target}{' at ' + place if place else ''})"

    def _attribute(self, name: str) -> fx.Node | None:
        """The training graph's node for an attribute of the eval graph; constants are found by value."""
        value = self._eval.constant_values.get(name)
        return self._attributes.get(name) if value is None else self._constant(value)

    def _constant(self, value: torch.Tensor) -> fx.Node | None:
        for ours, node in self._constants:
            if _same_numbers(ours, value):
                return node
        return None

    def _find(self, node: fx.Node, at: int) -> fx.Node | None:
        """The training node that is ``node``: the first one that fits, from ``at`` on.

        A number (a size) that only training needed at an earlier place is the same number there.
        """
        earlier: list[fx.Node] = [n for n in self._calls[:at] if n not in self._met] if _is_number(node) else []
        for other in chain(earlier, islice(self._calls, at, None)):
            if not _same_operator(other, node) or _casts(other) != _casts(node):
                continue
            new: dict[fx.Node, fx.Node] = {}
            if self._same(arguments_of(other), arguments_of(node), new):
                self._stands.update(new)
                return other
        return None

    def _same(self, ours: Any, theirs: Any, new: dict[fx.Node, fx.Node]) -> bool:
        """Whether two arguments are the same but for constants; ``new`` collects what must stand for what."""
        if isinstance(theirs, fx.Node):
            want = self._twin.get(theirs)
            return isinstance(ours, fx.Node) and want is not None and self._reads(ours, want, new)
        if isinstance(ours, fx.Node):
            return False
        if isinstance(ours, dict) or isinstance(theirs, dict):
            return (
                isinstance(ours, dict)
                and isinstance(theirs, dict)
                and ours.keys() == theirs.keys()
                and all(self._same(value, theirs[name], new) for name, value in ours.items())
            )
        if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
            return len(ours) == len(theirs) and all(self._same(a, b, new) for a, b in zip(ours, theirs, strict=True))
        if isinstance(ours, slice) and isinstance(theirs, slice):
            pairs = ((ours.start, theirs.start), (ours.stop, theirs.stop), (ours.step, theirs.step))
            return all(self._same(a, b, new) for a, b in pairs)
        return not _holds_nodes(ours) and not _holds_nodes(theirs)

    def _reads(self, ours: fx.Node, want: fx.Node, new: dict[fx.Node, fx.Node]) -> bool:
        """Whether ``ours`` is ``want`` in eval mode, or can be: by a way back over nodes that do not run."""
        want = self._resolved(want, {})
        if self._resolved(ours, new) is want:
            return True
        came_from: dict[fx.Node, fx.Node | None] = {ours: None}
        queue = deque([ours] if self._idle(ours, new) else [])
        while queue:
            node = queue.popleft()
            for source in node.all_input_nodes:
                if source in came_from:
                    continue
                came_from[source] = node
                if self._resolved(source, new) is want:
                    while (reader := came_from[source]) is not None:
                        new[reader] = source
                        source = reader
                    return True
                if self._idle(source, new):
                    queue.append(source)
        return False

    def _resolved(self, node: fx.Node, new: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """What is read in eval mode where training reads ``node``."""
        while (then := new.get(node) or self._stands.get(node) or self._returns.get(node)) is not None:
            node = then
        return self._attributes[str(node.target)] if node.op == "get_attr" else node

    def _idle(self, node: fx.Node, new: Mapping[fx.Node, fx.Node]) -> bool:
        """Whether the node does not run in eval mode and nothing stands for it yet."""
        return (
            node.op == "call_function"
            and node not in self._met
            and node not in new
            and node not in self._stands
            and not _is_number(node)
        )

    def _written_by_other_names(self) -> str | None:
        """Where the eval graph writes a tensor that nodes of different components name."""
        training, evaluated = self._training.graph_module.graph, self._eval.graph_module.graph
        together = [set(nodes) for nodes in touching_written(training, Storages(training))]
        storages = Storages(evaluated)
        for written in storages.written(evaluated):
            holders = storages.sharers(written)
            values = {self._twin[n] for n in holders if n in self._twin}
            touching = {self._twin[n] for holder in holders for n in (holder, *holder.users) if n in self._twin}
            touching |= {idle for idle in self._stands if self._resolved(idle, {}) in values}
            nodes = {n for n in touching if n.op == "call_function"}
            if len(nodes) > 1 and not any(nodes <= group for group in together):
                first = min(nodes, key=self._order.__getitem__)
                place = source_place(first, self._training.root) or module_path(first)
                return f"in eval mode an operator writes into a tensor that has more names than in training ({place})"
        return None

    def _mark(self) -> None:
        for node, ours in self._twin.items():
            if node.op == "call_function":
                theirs = arguments_of(node)
                changed = {n: theirs[n] for n, v in arguments_of(ours).items() if constants_differ(v, theirs[n])}
                if changed:
                    ours.meta[_KEY] = InEval(changed)
        for ours in self._calls:
            if ours not in self._met:
                ours.meta[_KEY] = InEval({}, runs=False, stands_for_it=self._stands.get(ours))


#: Operators that return their input as it is, and write nothing, when their ``train`` is False.
_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
_IN_PLACE = {getattr(torch.ops.aten, f"{n}_").default: getattr(torch.ops.aten, n).default for n in _DROPOUTS}


def _let_idle_dropouts_be(graph: fx.Graph) -> None:
    """An in-place dropout in eval mode writes nothing, whatever its schema says."""
    for node in graph.nodes:
        if node.target in _IN_PLACE and arguments_of(node)["train"] is False:
            node.target = _IN_PLACE[node.target]


def _is_idle_dropout(node: fx.Node) -> bool:
    return node.target in _IN_PLACE.values() and arguments_of(node)["train"] is False


def _same_operator(ours: fx.Node, theirs: fx.Node) -> bool:
    in_place: Any = ours.target
    if opaque_call(ours) != opaque_call(theirs):
        return False
    return in_place is theirs.target or (_is_idle_dropout(theirs) and _IN_PLACE.get(in_place) is theirs.target)


def constants_differ(ours: Any, theirs: Any) -> bool:
    """Whether two arguments that are the same but for constants differ in one."""
    if isinstance(ours, fx.Node):
        return False
    if isinstance(ours, dict):
        return any(constants_differ(value, theirs[name]) for name, value in ours.items())
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        return any(constants_differ(a, b) for a, b in zip(ours, theirs, strict=True))
    if isinstance(ours, slice) and isinstance(theirs, slice):
        return constants_differ([ours.start, ours.stop, ours.step], [theirs.start, theirs.stop, theirs.step])
    same = type(ours) is type(theirs) and (ours == theirs or (ours != ours and theirs != theirs))
    return not same


def _same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN is NaN, and 0 is not -0."""
    if a.dtype != b.dtype or a.shape != b.shape or a.is_meta or b.is_meta:
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    same = (a == b) & (torch.signbit(a) == torch.signbit(b))
    return bool((same | ((a != a) & (b != b))).all())


def _holds_nodes(value: Any) -> bool:
    parts = [value.start, value.stop, value.step] if isinstance(value, slice) else value
    return isinstance(parts, fx.Node) or (isinstance(parts, (list, tuple)) and any(_holds_nodes(p) for p in parts))


def _is_number(node: fx.Node) -> bool:
    """Whether the node's value is a number, not a tensor: nothing can write into it."""
    return isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def _casts(node: fx.Node) -> tuple[Any, ...]:
    """The autocast regions of a node; those without gradients change no value."""
    return tuple(context for context in contexts_of(node) if context[0] == "autocast")
