"""Refuse a model that keeps something in Python from one call of ``forward`` to the next: HP113.

Export follows one call. What the call leaves behind outside of buffers, for the next call to find, is lost on it. So
where a call has changed something there, the next one is made as well:

1. If that changes the same things again, they are state (a counter, a list that grows).
2. If it reads a tensor that the first call has kept, and that follows the batch or was drawn, that tensor is state (a
   memory).
3. If it computes something else, but for reading tensors instead of making them, the first call was a special one.
   A file that the first call has written is such a change too.
4. Else what was kept is a cache, and harmless.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.assigned_buffers import AssignedBuffers
from hetpipe_compiler.frontend.frozen_calls import refusing_other_random_numbers
from hetpipe_compiler.frontend.python_state import Place, PythonState, Unsaid
from hetpipe_compiler.frontend.regions import text_with_regions
from hetpipe_compiler.frontend.remembered_numbers import draws, refusing_remembered_numbers
from hetpipe_compiler.frontend.swallowed_errors import refusing_swallowed_errors
from hetpipe_compiler.frontend.training_step import TrainingStep
from hetpipe_compiler.frontend.written_files import noting_written_files
from hetpipe_compiler.ir.source import is_internal, told_place
from hetpipe_compiler.ir.storage import storage_of

_Export: TypeAlias = Callable[[TrainingStep, tuple[torch.Tensor, ...]], tuple[ExportedProgram, str | None]]
_HINT = (
    "make it a buffer (register_buffer) and change it in place, keep the count outside the model, or keep its module "
    "whole: --opaque MODULE"
)
_DRAWS = "draw with torch: torch.rand, torch.bernoulli, F.dropout; or keep its module whole: --opaque MODULE"


@dataclass(eq=False)
class Observed:
    """What there is in Python before and after ``forward``; export puts it back, so it is looked at inside."""

    before: PythonState = field(default_factory=PythonState)
    after: PythonState = field(default_factory=PythonState)
    #: Files that were written in between, and by which lines.
    files: list[tuple[str, str]] = field(default_factory=list)

    @cached_property
    def changed(self) -> dict[Place, tuple[Any, Any]]:
        """What the call has changed, before and after it."""
        return self.after.changed(self.before)

    def replaced_tensors(self) -> dict[Place, torch.Tensor]:
        """Tensors that lay where another one, or none, lies now."""
        return {
            place: value
            for place, value in self.before.values.items()
            if isinstance(value, torch.Tensor) and self.after.values.get(place) is not value
        }


class ObservedStep(TrainingStep):
    """A training step that notes what its call does in Python."""

    def __init__(self, step: TrainingStep, observed: Observed, path: Path) -> None:
        torch.nn.Module.__init__(self)
        self.__dict__.update(step.__dict__)
        self._observed, self._path = observed, path

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        self._observed.before = PythonState.of(self)
        buffers = AssignedBuffers(self)
        parts = _parts(self)
        self._observed.files.clear()
        with (
            refusing_other_random_numbers(self._path),
            refusing_swallowed_errors(self._path),
            refusing_remembered_numbers(self._observed.before.caches, self._path),
            noting_written_files(self._path, self._observed.files),
        ):
            loss = super().forward(*tensors)
        _refuse_other_parts(parts, _parts(self), self._path)
        buffers.write(self._path, _changing_line)
        self._observed.after = PythonState.of(self)
        return loss


def _parts(step: TrainingStep) -> dict[str, tuple[torch.nn.Module, Any]]:
    """What stands under each name of a submodule or a parameter: its owner, and what tells it from others: a module's
    own dictionary (export hands out a new stand-in for a module at each look, around that), whether there is a
    parameter."""
    return {
        f"{path}.{name}".partition(".")[2]: (
            module,
            None if part is None else vars(part) if name in module._modules else True,
        )
        for path, module in step.named_modules(remove_duplicate=False)
        if path.partition(".")[0] == "model"
        for name, part in (*module._modules.items(), *module._parameters.items())
    }


def _refuse_other_parts(
    before: dict[str, tuple[torch.nn.Module, Any]], after: dict[str, tuple[torch.nn.Module, Any]], path: Path
) -> None:
    """HP113 where forward exchanges, adds or removes a submodule or parameter."""
    for name in (*before, *after):
        old, new = before.get(name), after.get(name)
        if old is not None and new is not None and old[1] is new[1]:
            continue
        owner = (old or new or (None,))[0]
        raise WorkloadError(
            "HP113",
            f"forward exchanges, adds or removes '{name}'",
            where=_changing_line(owner, name.rpartition(".")[2], path),
            hint="do it where the model is built, in __init__",
        )


def refuse_state(
    step: TrainingStep,
    tensors: tuple[torch.Tensor, ...],
    program: ExportedProgram,
    observed: Observed,
    export: _Export,
    path: Path,
) -> None:
    """Raises `WorkloadError` HP113 if the call that was exported leaves something to the next one.

    Args:
        step: The training step.
        tensors: What it was exported with.
        program: What that gave.
        observed: What was seen in that call.
        export: Makes the next call.
        path: The user's file.
    """
    read = {storage_of(value) for value in program.constants.values() if isinstance(value, torch.Tensor)}
    for place, tensor in observed.replaced_tensors().items():
        if ".".join(place).lstrip(".") in program.constants or storage_of(tensor) in read:
            raise _keeps_state(step, place, None, path)
    left = [v for _, v in observed.changed.values() if isinstance(v, torch.Tensor)]
    if observed.files or len(left) < len(observed.changed) or any(_ages(step, program, tensor) for tensor in left):
        _compare_next_call(step, tensors, program, observed, export, path)


def _compare_next_call(
    step: TrainingStep,
    tensors: tuple[torch.Tensor, ...],
    program: ExportedProgram,
    observed: Observed,
    export: _Export,
    path: Path,
) -> None:
    changed, start, next_call, kept = observed.changed, PythonState.of(step), Observed(), _Kept()
    try:
        observed.after.put_back(kept.stand_in)
        again, _ = export(ObservedStep(step, next_call, path), tensors)
    finally:
        start.put_back()
    moving = next_call.after.changed(observed.after)
    if moving:
        place = next(iter(moving))
        raise _keeps_state(step, place, changed.get(place, moving[place]), path)
    read = kept.read_by(again)
    for tensor in read:
        if _ages(step, program, tensor):
            place = next((at for at, value in observed.after.values.items() if value is tensor), next(iter(changed)))
            raise _keeps_state(step, place, None, path)
    texts = [text_with_regions(found.graph_module) for found in (program, again)]
    if texts[0] != texts[1] and not (read and _same_but_kept(program, again, kept)):
        if observed.files:
            raise _depends_on_file(*observed.files[0])
        place = next((at for at, (_, new) in changed.items() if not isinstance(new, torch.Tensor)), next(iter(changed)))
        raise _keeps_state(step, place, changed[place], path)


class _Kept:
    """Tensors that a call has kept, and what stands for them in the next one."""

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def stand_in(self, value: Any) -> Any:
        """A tensor of no export for one of the last, its size for a symbol."""
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value.node.hint if value.node.has_hint() else value
        if not isinstance(value, FakeTensor):
            return value
        if id(value) not in self._pairs:
            sizes = [self.stand_in(size) for size in value.shape]
            self._pairs[id(value)] = value, torch.zeros(sizes, dtype=value.dtype, device=value.device)
        return self._pairs[id(value)][1]

    def read_by(self, program: ExportedProgram) -> list[torch.Tensor]:
        """Those that a program reads, as they were."""
        constants = {storage_of(c) for c in program.constants.values() if isinstance(c, torch.Tensor)}
        return [old for old, new in self._pairs.values() if storage_of(new) in constants]

    def names_in(self, program: ExportedProgram) -> set[str]:
        """Under which names a program reads them."""
        memories = {storage_of(new) for _, new in self._pairs.values()}
        names = {n for n, c in program.constants.items() if isinstance(c, torch.Tensor) and storage_of(c) in memories}
        return {
            node for node, name in program.graph_signature.inputs_to_lifted_tensor_constants.items() if name in names
        }

    @property
    def memories(self) -> set[int]:
        return {storage_of(old) for old, _ in self._pairs.values()}


def _same_but_kept(program: ExportedProgram, again: ExportedProgram, kept: _Kept) -> bool:
    """Whether the calls apply the same operators, but for those that make what is kept."""
    names = kept.names_in(again)
    placed = {storage_of(n.meta["val"]) for n in again.graph.nodes if n.name in names}
    return _operators(program.graph, kept.memories) == _operators(again.graph, placed)


def _operators(graph: fx.Graph, kept: set[int]) -> Counter[str]:
    """What the graph's results and writes are made with, not looking behind what lies in the memories ``kept``."""
    stack = [n for n in graph.nodes if n.op == "output" or (not n.users and _writes(n))]
    seen = set(stack)
    while stack:
        for node in stack.pop().all_input_nodes:
            value = node.meta.get("val")
            if node not in seen and not (isinstance(value, torch.Tensor) and storage_of(value) in kept):
                seen.add(node)
                stack.append(node)
    return Counter(str(node.target) for node in seen if node.op == "call_function")


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _ages(step: TrainingStep, program: ExportedProgram, value: torch.Tensor) -> bool:
    """Whether a tensor made in forward is another in the next one: it depends on more of the batch than its sizes, on
    what training changes, or on random numbers."""
    trained = {name for name, p in step.named_parameters(remove_duplicate=False) if p.requires_grad and step.training}
    signature = program.graph_signature
    moving = {*signature.user_inputs, *(n for n, name in signature.inputs_to_parameters.items() if name in trained)}
    memory = storage_of(value)
    vals = {n: n.meta.get("val") for n in program.graph.nodes}
    stack = [n for n, v in vals.items() if isinstance(v, torch.Tensor) and storage_of(v) == memory]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if node.name in moving or draws(node.target):
            return True
        if isinstance(vals[node], torch.Tensor):
            new = [n for n in node.all_input_nodes if n not in seen]
            seen.update(new)
            stack += new
    return False


def _depends_on_file(name: str, where: str) -> WorkloadError:
    return WorkloadError(
        "HP113",
        f"forward changes '{name}' on the disk, and then computes something else; the captured model would not",
        where=where,
        hint=_HINT,
    )


def _told(values: tuple[Any, Any]) -> str:
    old, new = values
    if isinstance(new, Unsaid):
        return f" ({new})"
    short = all(len(str(value)) < 40 and not isinstance(value, torch.Tensor) for value in values)
    return f" ({old}, then {new})" if short else ""


def _keeps_state(step: TrainingStep, place: Place, values: tuple[Any, Any] | None, path: Path) -> WorkloadError:
    """HP113 at the line that changes ``place``; ``values``: what it was and what it is then."""
    module, name = place
    owner = dict(step.named_modules()).get(module, step.loss)
    title = f"{module.removeprefix('model').lstrip('.')}.{name}".lstrip(".")
    kind = "plain attribute" if name.isidentifier() else "Python value"
    told = _told(values) if values else ""
    return WorkloadError(
        "HP113",
        f"forward changes the {kind} '{title}' from call to call{told}; the captured model would not",
        where=_changing_line(owner, name, path),
        hint=_DRAWS if values and isinstance(values[1], Unsaid) and values[1].draws else _HINT,
    )


def _changing_line(owner: Any, name: str, path: Path) -> str:
    """The line of the owner's class, or else of the user's file, that assigns the attribute outside ``__init__``, or
    else calls a method of it; the user's file if there is none."""
    attribute = re.split(r"\W", name, maxsplit=1)[0]
    try:
        lines, first = inspect.getsourcelines(type(owner))
        file = Path(inspect.getsourcefile(type(owner)) or path)
        line = _line_about(attribute, "".join(lines))
        if line is None or is_internal(str(file)):
            with tokenize.open(path) as source:
                file, first, line = path, 1, _line_about(attribute, source.read())
    except (OSError, TypeError, SyntaxError):
        return str(path)
    return str(path) if line is None else told_place(file, first + line - 1, path)


def _line_about(attribute: str, text: str) -> int | None:
    """Of the functions of a text, but for ``__init__``: the line that assigns the attribute, or else calls a method."""
    tree = ast.parse(textwrap.dedent(text))
    functions = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.name != "__init__"]
    nodes = [node for f in functions for node in ast.walk(f)]
    assigned = [n for n in nodes if _about(_targets(n), attribute)]
    called = [n for n in nodes if isinstance(n, ast.Call) and _about([n.func], attribute)]
    return next((n.lineno for n in (*assigned, *called) if isinstance(n, (ast.stmt, ast.expr))), None)


def _targets(node: ast.AST) -> Iterable[ast.expr]:
    if isinstance(node, ast.Assign):
        return [part for t in node.targets for part in (t.elts if isinstance(t, (ast.Tuple, ast.List)) else [t])]
    return [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else []


def _about(targets: Iterable[ast.expr], attribute: str) -> bool:
    """Whether one of them is an attribute of that name, or something in it."""
    for target in targets:
        part = target
        while isinstance(part, (ast.Subscript, ast.Attribute)):
            if isinstance(part, ast.Attribute) and part.attr == attribute:
                return True
            part = part.value
        if isinstance(part, ast.Name) and part.id == attribute:
            return True
    return False
