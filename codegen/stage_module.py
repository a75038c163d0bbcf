"""Write a stage as a Python file that people can read and that needs nothing but torch."""

from __future__ import annotations

import inspect
import keyword
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from hetpipe_compiler.codegen.stage_cut import StageCut
from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.ir.plan import Tensor
from hetpipe_compiler.passes.coarsen import module_path

_RESERVED = frozenset({"torch", "nn", "aten", "self", "device"})
_INFIX = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.floordiv: "//", operator.truediv: "/",
    operator.mod: "%", operator.pow: "**", operator.eq: "==", operator.ne: "!=", operator.lt: "<", operator.le: "<=",
    operator.gt: ">", operator.ge: ">=", operator.and_: "&", operator.or_: "|",
}  # fmt: skip
_PREFIX = {operator.neg: "-", operator.not_: "not "}
_PLAIN = {torch.sym_int: "torch.sym_int", torch.sym_float: "torch.sym_float", torch.sym_not: "torch.sym_not",
          torch.sym_max: "torch.sym_max", torch.sym_min: "torch.sym_min", torch.sym_ite: "torch.sym_ite",
          min: "min", max: "max", int: "int", float: "float", abs: "abs"}  # fmt: skip

_HELPERS = '''
class _Scope(nn.Module):
    """A submodule of the original model: holds its parameters under their own names."""

    def __getitem__(self, name: str) -> nn.Module:
        return self._modules[name]


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


def emit_stage(cut: StageCut, *, model: str, stages: int, root: Path, graph_module: fx.GraphModule) -> str:
    """The text of a stage's file.

    Args:
        cut: The stage.
        model: The model's name, for the first line.
        stages: How many stages the partition has.
        root: Folder of the user's model.py: places below it are shown relative to it.
        graph_module: Holds the sub-graphs of ``no_grad`` and ``autocast`` regions.

    Raises:
        WorkloadError: HP112 if the graph calls something that cannot be written down.
    """
    writer = _Writer(cut, root, graph_module)
    forward = list(writer.forward())
    regions = [line for region in writer.regions for line in ("", *region)]
    modules = [p for p in dict.fromkeys(_top(module_path(n)) for n in cut.nodes) if p]
    span = modules[0] if len(modules) == 1 else f"{modules[0]} ... {modules[-1]}" if modules else "no submodule"
    lines = [
        f'"""Stage {cut.index} of {stages} of {model}: {span}.',
        "",
        "Written by hetpipe-compile; needs nothing but torch.",
        '"""',
        "",
        "import torch",
        "from torch import nn",
        "",
        "aten = torch.ops.aten",
        "",
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
        *(f"    {line}" if line else "" for line in regions),
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


class _Writer:
    """Prints one graph as lines of Python."""

    def __init__(self, cut: StageCut, root: Path, graph_module: fx.GraphModule) -> None:
        self._cut = cut
        self._root = root
        self._graph_module = graph_module
        self._tensors: dict[str, Tensor] = {t.name: t for t in (*cut.parameters, *cut.buffers, *cut.constants)}
        self.regions: list[list[str]] = []
        self._region_names: dict[int, str] = {}

    def forward(self) -> Iterator[str]:
        names = [p.name for p in self._cut.inputs]
        yield f"def forward({', '.join(['self', *map(_safe, names)])}):"
        tensor = next((p.name for p in self._cut.inputs if p.kind != "scalar"), None)
        keep = {p.name for p in self._cut.outputs}
        yield from self._body(self._cut.nodes, self._graph_module, tensor, keep, set(names))
        results = [self._result(p.name) for p in self._cut.outputs]
        yield f"    return ({', '.join(results)}{',' if len(results) == 1 else ''})"

    def _result(self, name: str) -> str:
        parameter = self._cut.returned.get(name)
        return _attribute(parameter) if parameter is not None else _safe(name)

    def _body(
        self, nodes: Sequence[fx.Node], owner: fx.GraphModule, tensor: str | None, keep: set[str], inputs: set[str]
    ) -> Iterator[str]:
        text: list[str] = []
        heading = None
        dying = _last_reads(nodes, keep)
        dead: list[str] = []
        for node in nodes:
            now = self._heading(node)
            if now != heading:
                if dead:
                    text.append(f"    del {', '.join(dead)}")
                    dead = []
                text.append(f"    # {now}")
                heading = now
            text += [f"    {line}" for line in self._statement(node, owner)]
            dead += [_safe(name) for name in dying.get(node, ()) if name not in inputs]
        if any("device=device" in line or ", device)" in line or ", device," in line for line in text):
            yield f"    device = {_safe(tensor)}.device" if tensor else "    device = torch.get_default_device()"
        yield from text

    def _heading(self, node: fx.Node) -> str:
        path = module_path(node) or "(model)"
        place = source_place(node, self._root)
        return f"{path}  {place}" if place else path

    def _statement(self, node: fx.Node, owner: fx.GraphModule) -> list[str]:
        name = f"{_safe(node.name)} = " if node.users else ""
        target: Any = node.target
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._region(node, owner, name)
        if target is operator.getitem:
            return [f"{name}{self._value(node.args[0], owner)}[{self._value(node.args[1], owner)}]"]
        if target in _INFIX:
            left, right = (self._value(a, owner) for a in node.args)
            return [f"{name}{left} {_INFIX[target]} {right}"]
        if target in _PREFIX:
            return [f"{name}{_PREFIX[target]}{self._value(node.args[0], owner)}"]
        arguments = [self._value(a, owner) for a in node.args]
        arguments += [f"{k}={self._value(v, owner)}" for k, v in node.kwargs.items()]
        return [f"{name}{self._callee(node)}({', '.join(arguments)})"]

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

    def _region(self, node: fx.Node, owner: fx.GraphModule, name: str) -> list[str]:
        """A ``no_grad`` or ``autocast`` region: its own method, called inside the context."""
        op = str(node.target)
        if op == "wrap_with_set_grad_enabled":
            (enabled, region, *rest), context = node.args, "torch.set_grad_enabled({})"
            context = context.format(enabled)
        elif op == "wrap_with_autocast":
            kind, dtype, enabled, cache, region, *rest = node.args
            context = f"torch.autocast({kind!r}, {dtype}, {enabled}, {cache})"
        else:
            raise self._cannot_write(node)
        assert isinstance(region, fx.Node)
        inner = owner.get_submodule(str(region.target))
        assert isinstance(inner, fx.GraphModule)
        method = self._method(inner, str(region.target))
        call = f"self.{method}({', '.join(self._value(a, owner) for a in rest)})"
        return [f"with {context}:", f"    {name}{call}"]

    def _method(self, inner: fx.GraphModule, target: str) -> str:
        if id(inner) not in self._region_names:
            name = "_" + re.sub(r"\W", "_", target)
            while name in self._region_names.values():
                name += "_"
            self._region_names[id(inner)] = name
            nodes = [n for n in inner.graph.nodes if n.op == "call_function"]
            inputs = [n for n in inner.graph.nodes if n.op == "placeholder"]
            output = next(n for n in inner.graph.nodes if n.op == "output")
            tensor = next((n.name for n in inputs if isinstance(n.meta.get("val"), torch.Tensor)), None)
            keep = {n.name for n in output.all_input_nodes}
            lines = [f"def {name}({', '.join(['self', *(_safe(n.name) for n in inputs)])}):"]
            lines += self._body(nodes, inner, tensor, keep, {n.name for n in inputs})
            lines.append(f"    return {self._value(output.args[0], inner)}")
            self.regions.append(lines)
        return self._region_names[id(inner)]

    def _value(self, value: Any, owner: fx.GraphModule) -> str:
        """An argument as Python text."""
        if isinstance(value, fx.Node):
            if value.op != "get_attr":
                return _safe(value.name)
            name = str(value.target)
            return _safe(self._cut.received[name]) if name in self._cut.received else _attribute(name)
        if isinstance(value, torch.device):
            return "device"
        if isinstance(value, (list, tuple)):
            inside = ", ".join(self._value(v, owner) for v in value)
            if isinstance(value, list):
                return f"[{inside}]"
            return f"({inside},)" if len(value) == 1 else f"({inside})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self._value(v, owner)}" for k, v in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({self._value(value.start, owner)}, {self._value(value.stop, owner)}, {self._value(value.step, owner)})"
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


def _safe(name: str | None) -> str:
    assert name is not None
    return f"{name}_" if name in _RESERVED or keyword.iskeyword(name) else name


def _attribute(path: str) -> str:
    """``features.0.weight`` -> ``self.features["0"].weight``."""
    text = "self"
    for part in path.split("."):
        text += f".{part}" if part.isidentifier() and not keyword.iskeyword(part) else f'["{part}"]'
    return text


_TORCH = str(Path(inspect.getfile(torch)).parent)


def source_place(node: fx.Node, root: Path) -> str:
    """``model.py:31``: the innermost line of the user's (or a library's) code outside torch that made the node; '' if unknown."""
    frames = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
    for name, line in reversed(frames):
        path = Path(name)
        if name.startswith(_TORCH) or "hetpipe_compiler" in path.parts or "fx/passes" in name:
            continue
        return f"{_short(path, root)}:{line}"
    return ""


def _short(path: Path, root: Path) -> str:
    """A path without the machine's part: below the user's folder, below site-packages, or just the name."""
    if path.is_relative_to(root):
        return str(path.relative_to(root))
    parts: Iterable[str] = path.parts
    if "site-packages" in path.parts:
        parts = path.parts[path.parts.index("site-packages") + 1 :]
        return "/".join(parts)
    return path.name
