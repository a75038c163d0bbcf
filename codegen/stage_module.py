"""Write a stage as a Python file that people can read and that needs nothing but torch.

A module that is kept whole (``--opaque``) is the exception: the file then calls the user's own, from the model.py in
the plan folder.
"""

from __future__ import annotations

import keyword
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from hetpipe_compiler.codegen.stage_cut import StageCut
from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.regions import Context, contexts_of
from hetpipe_compiler.ir.opaque import OpaqueCall, TensorForm, fill, opaque_call
from hetpipe_compiler.ir.source import module_path, source_place
from hetpipe_compiler.passes.eval_mode import arguments_of, constants_differ, in_eval

_RESERVED = frozenset({"torch", "nn", "aten", "math", "self", "device"})
_INFIX = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.floordiv: "//", operator.truediv: "/",
    operator.mod: "%", operator.pow: "**", operator.eq: "==", operator.ne: "!=", operator.lt: "<", operator.le: "<=",
    operator.gt: ">", operator.ge: ">=", operator.and_: "&", operator.or_: "|",
}  # fmt: skip
_PREFIX = {operator.neg: "-", operator.not_: "not "}
_PLAIN: dict[Any, str] = {
    **{getattr(torch, name): f"torch.{name}" for name in (
        "sym_int", "sym_float", "sym_not", "sym_max", "sym_min", "sym_ite", "sym_sum")},
    **{function: function.__name__ for function in (min, max, int, float, abs, round)},
    **{function: f"math.{function.__name__}" for function in (math.ceil, math.floor, math.trunc, math.sqrt)},
}  # fmt: skip
#: A statement that reads the local ``device``.
_DEVICE = re.compile(r"\bdevice(\.type)?[,)\]]")

_HELPERS = '''
class _Scope(nn.Module):
    """A submodule of the original model: holds its parameters under their own names."""

    def __getitem__(self, name: str) -> nn.Module:
        return getattr(self, name)


def _scope(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    *parts, name = path.split(".")
    for part in parts:
        if part not in root._modules:
            root.add_module(part, _Scope())
        root = root._modules[part]
    return root, name


def _parameter(root: nn.Module, path: str, shape: tuple, dtype: torch.dtype, trainable: bool = True) -> None:
    scope, name = _scope(root, path)
    scope.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=trainable))


def _buffer(root: nn.Module, path: str, shape: tuple, dtype: torch.dtype, persistent: bool = True) -> None:
    scope, name = _scope(root, path)
    scope.register_buffer(name, torch.empty(shape, dtype=dtype), persistent=persistent)
'''


def emit_stage(cut: StageCut, *, model: str, stages: int, root: Path) -> str:
    """The text of a stage's file.

    Args:
        cut: The stage.
        model: The model's name, for the first line.
        stages: How many stages the partition has.
        root: Folder of the user's model.py: places below it are shown relative to it.

    Raises:
        WorkloadError: HP112 if the graph calls something that cannot be written down.
    """
    writer = _Writer(cut, root)
    forward = list(writer.forward())
    modules = [p for p in dict.fromkeys(_top(module_path(n)) for n in cut.nodes) if p]
    span = modules[0] if len(modules) == 1 else f"{modules[0]} ... {modules[-1]}" if modules else "no submodule"
    opaque = [line for node in cut.nodes for line in writer.kept_whole(node)]
    needs = "torch, and the plan's model.py where it says Opaque" if opaque else "nothing but torch"
    lines = [
        f'"""Stage {cut.index} of {stages} of {model}: {span}.',
        "",
        f"Written by hetpipe-compile; needs {needs}.",
        '"""',
        "",
        *(["import math", ""] if any("math." in line for line in forward) else []),
        "import torch",
        "from torch import nn",
        *(["", "from hetpipe_compiler.runtime.opaque import Opaque"] if opaque else []),
        "",
        "aten = torch.ops.aten",
        "",
        *opaque,
        _HELPERS,
        "",
        "class Stage(_Scope):",
        f"    INPUTS = {tuple(p.name for p in cut.inputs)!r}",
        f"    OUTPUTS = {tuple(p.name for p in cut.outputs)!r}",
        "",
        "    def __init__(self) -> None:",
        "        super().__init__()",
        *(f"        {line}" for line in _state(cut)),
        "",
        *(f"    {line}" if line else "" for line in forward),
    ]
    return "\n".join(lines) + "\n"


def _top(path: str) -> str:
    """The first two parts of a module path: enough to see where a stage begins and ends."""
    return ".".join(path.split(".")[:3])


def _state(cut: StageCut) -> Iterator[str]:
    for tensor in cut.parameters:
        frozen = "" if tensor.trainable else ", trainable=False"
        yield f'_parameter(self, "{tensor.name}", {tensor.shape!r}, torch.{tensor.dtype}{frozen})'
    for tensor in (*cut.buffers, *cut.constants):
        transient = "" if tensor.persistent else ", persistent=False"
        yield f'_buffer(self, "{tensor.name}", {tensor.shape!r}, torch.{tensor.dtype}{transient})'


def _only_trains(node: fx.Node) -> bool:
    """Whether nothing stands for the node's value in eval mode."""
    evaluated = in_eval(node)
    return evaluated is not None and not evaluated.runs and evaluated.stands_for_it is None


def _opaque_name(node: fx.Node) -> str:
    return f"{node.name}_module"


class _Writer:
    """Prints a stage's nodes as lines of Python."""

    def __init__(self, cut: StageCut, root: Path) -> None:
        self._cut = cut
        self._root = root

    def forward(self) -> Iterator[str]:
        inputs = [_safe(p.name) for p in self._cut.inputs]
        yield f"def forward({', '.join(['self', *inputs])}):"
        body = list(self._body({p.name for p in self._cut.outputs}, set(inputs)))
        if any(_DEVICE.search(line) for line in body):
            yield f"    device = {self._device()}"
        yield from body
        results = [self._result(p.name) for p in self._cut.outputs]
        yield f"    return ({', '.join(results)}{',' if len(results) == 1 else ''})"

    def _device(self) -> str:
        """The stage's device: all its tensors are on it. An input that does not run in eval mode is None there."""
        received = [p.name for p in self._cut.inputs if p.kind != "scalar"]
        own = [_attribute(t.name) for t in (*self._cut.parameters, *self._cut.buffers, *self._cut.constants)]
        absent = {n.name for reader in self._cut.nodes for n in reader.all_input_nodes if _only_trains(n)}
        always = [*(_safe(name) for name in received if name not in absent), *own]
        if always:
            return f"{always[0]}.device"
        default = "torch.get_default_device()"
        return f"{_safe(received[0])}.device if self.training else {default}" if received else default

    def _result(self, name: str) -> str:
        parameter = self._cut.returned.get(name)
        return _attribute(parameter) if parameter is not None else _safe(name)

    def _body(self, keep: set[str], inputs: set[str]) -> Iterator[str]:
        """One statement a node, under a comment for each place of the model, inside the contexts of the node."""
        heading: str | None = None
        contexts: tuple[Context, ...] = ()
        dying = _last_reads(self._cut.nodes, keep)
        dead: list[str] = []
        for node in self._cut.nodes:
            now, around = self._heading(node), contexts_of(node)
            if now != heading or around != contexts:
                if dead:
                    yield f"{_indent(contexts)}del {', '.join(dead)}"
                    dead = []
                if around != contexts:
                    yield from _enter(around)
                yield f"{_indent(around)}# {now}"
                heading, contexts = now, around
            yield from (_indent(around) + line for line in self._statement(node))
            dead += [_safe(name) for name in dying.get(node, ()) if _safe(name) not in inputs]

    def _heading(self, node: fx.Node) -> str:
        path = module_path(node) or "(model)"
        place = source_place(node, self._root)
        return f"{path}  {place}" if place else path

    def _statement(self, node: fx.Node) -> list[str]:
        """The lines that run the node: in eval mode it may have other arguments, or not run at all."""
        evaluated = in_eval(node)
        call = self._call(node, evaluated.arguments if evaluated is not None else {})
        name = f"{_safe(node.name)} = " if node.users else ""
        if evaluated is None or evaluated.runs:
            return [name + call]
        if not name:
            return ["if self.training:", f"    {call}"]
        return [f"{name}{call} if self.training else {self._value(evaluated.stands_for_it)}"]

    def _call(self, node: fx.Node, in_eval_mode: Mapping[str, Any]) -> str:
        target: Any = node.target

        def text(name: str, value: Any) -> str:
            return self._value(value) if name not in in_eval_mode else self._either(value, in_eval_mode[name])

        if (opaque := opaque_call(node)) is not None:
            return self._opaque(node, opaque)
        arguments = [text(name, value) for name, value in zip(arguments_of(node), node.args, strict=False)]
        if target is operator.getitem:
            return f"{arguments[0]}[{arguments[1]}]"
        if target in _INFIX:
            return f"{arguments[0]} {_INFIX[target]} {arguments[1]}"
        if target in _PREFIX:
            return f"{_PREFIX[target]}{arguments[0]}"
        arguments += [f"{name}={text(name, value)}" for name, value in node.kwargs.items()]
        # Export leaves out what equals a default; the other mode may need it.
        given = {*list(arguments_of(node))[: len(node.args)], *node.kwargs}
        missing = [name for name in in_eval_mode if name not in given]
        arguments += [f"{name}={text(name, arguments_of(node)[name])}" for name in missing]
        return f"{self._callee(node)}({', '.join(arguments)})"

    def kept_whole(self, node: fx.Node) -> Iterator[str]:
        """What calls the user's own module in place of ``node``, if that is kept whole."""
        call = opaque_call(node)
        if call is not None:
            forms = [list(r.sizes) if isinstance(r, TensorForm) else r for r in call.returns]
            returns, writes = self._value(forms), self._value(list(call.written))
            yield f'{_opaque_name(node)} = Opaque(__file__, "{call.module}", {call.batch}, {returns}, {writes})'

    def _opaque(self, node: fx.Node, call: OpaqueCall) -> str:
        """The call of a module that is kept whole; its tensors that lie elsewhere than in the model go along by
        name."""
        _, tensors, numbers, state, written = node.args
        holders = zip((*call.state, *call.written), (*state, *written), strict=True)  # type: ignore[misc]
        elsewhere = {
            name: holder
            for name, holder in holders
            if str(holder.target) != f"{call.module}.{name}" or str(holder.target) in self._cut.received
        }
        args, kwargs = fill(call.arguments, tensors, numbers)  # type: ignore[arg-type]
        given = ["self", self._value(elsewhere), *map(self._value, args)]
        given += [f"{name}={self._value(value)}" for name, value in kwargs.items()]
        return f"{_opaque_name(node)}({', '.join(given)})"

    def _either(self, training: Any, evaluated: Any) -> str:
        """An argument that differs between the modes as Python text."""
        if not constants_differ(training, evaluated):
            return self._value(training)
        if isinstance(training, (list, tuple)) and isinstance(evaluated, (list, tuple)):
            inside = ", ".join(self._either(a, b) for a, b in zip(training, evaluated, strict=True))
            return f"[{inside}]"
        if training is True and evaluated is False:
            return "self.training"
        if training is False and evaluated is True:
            return "not self.training"
        return f"({self._value(training)} if self.training else {self._value(evaluated)})"

    def _callee(self, node: fx.Node) -> str:
        target: Any = node.target
        if isinstance(target, torch._ops.OpOverload):
            namespace, op = target._schema.name.split("::")
            packet = f"aten.{op}" if namespace == "aten" else f"torch.ops.{namespace}.{op}"
            return f"{packet}.{target._overloadname}"
        if target in _PLAIN:
            return _PLAIN[target]
        raise self._cannot_write(node)

    def _cannot_write(self, node: fx.Node) -> WorkloadError:
        return WorkloadError(
            "HP112",
            f"the model calls {node.target}, which a stage module cannot hold",
            where=source_place(node, self._root) or None,
            hint="express it with tensor operators",
        )

    def _value(self, value: Any) -> str:
        """An argument as Python text."""
        if isinstance(value, fx.Node):
            if value.op != "get_attr":
                return _safe(value.name)
            name = str(value.target)
            return _safe(self._cut.received[name]) if name in self._cut.received else _attribute(name)
        if isinstance(value, torch.device):
            return "device"
        if isinstance(value, (list, tuple)):
            inside = ", ".join(self._value(v) for v in value)
            if isinstance(value, list):
                return f"[{inside}]"
            return f"({inside},)" if len(value) == 1 else f"({inside})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self._value(v)}" for k, v in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({self._value(value.start)}, {self._value(value.stop)}, {self._value(value.step)})"
        if isinstance(value, float) and value in (float("inf"), float("-inf")):
            return f'float("{value}")'
        if isinstance(value, float) and value != value:
            return 'float("nan")'
        return repr(value)


def _last_reads(nodes: Sequence[fx.Node], keep: set[str]) -> dict[fx.Node, list[str]]:
    """For each node: the names that nobody reads after it, so that the stage can let go of their memory."""
    made = {n for n in nodes if n.users}
    seen: set[fx.Node] = set()
    dying: dict[fx.Node, list[str]] = {}
    for node in reversed(nodes):
        for read in [*node.all_input_nodes, node]:
            if read in made and read not in seen:
                seen.add(read)
                if read.name not in keep:
                    dying.setdefault(node, []).append(read.name)
    return dying


def _indent(contexts: tuple[Context, ...]) -> str:
    return "    " * (1 + len(contexts))


def _enter(contexts: tuple[Context, ...]) -> Iterator[str]:
    for depth, (kind, *rest) in enumerate(contexts):
        if kind == "grad":
            manager = f"torch.set_grad_enabled({rest[0]})"
        else:
            # The region was captured on the CPU; it means the device that the stage is on.
            _, dtype, enabled = rest
            manager = f"torch.autocast(device.type, {dtype}, {enabled})"
        yield f"{_indent(contexts[:depth])}with {manager}:"


def _safe(name: str) -> str:
    return f"{name}_" if name in _RESERVED or keyword.iskeyword(name) else name


def _attribute(path: str) -> str:
    """``features.0.weight`` -> ``self.features["0"].weight``."""
    text = "self"
    for part in path.split("."):
        text += f".{part}" if part.isidentifier() and not keyword.iskeyword(part) else f'["{part}"]'
    return text
