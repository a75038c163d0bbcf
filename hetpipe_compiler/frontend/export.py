"""Run ``torch.export`` on a training step, and tell in the user's terms why it cannot follow.

Export follows one call of ``forward``. What a call leaves behind in plain attributes, for the next call to find, is
lost on it; a model that counts on such an attribute is refused rather than changed in meaning.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import logging
import re
import textwrap
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch._subclasses import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.frozen_calls import refusing_other_random_numbers, watched_calls
from hetpipe_compiler.frontend.idle_python import idle_python
from hetpipe_compiler.frontend.load import user_line
from hetpipe_compiler.frontend.own_gradients import OwnGradients
from hetpipe_compiler.frontend.regions import autocast_on_cpu
from hetpipe_compiler.frontend.training_step import TrainingStep
from hetpipe_compiler.garbage import no_cyclic_garbage
from hetpipe_compiler.ir.source import is_internal, short_path

#: Module path and attribute.
_Attribute: TypeAlias = tuple[str, str]


@dataclass(eq=False)
class _Observed:
    """Plain attributes of modules before and after ``forward``; export puts them back, so they are looked at inside
    it."""

    before: dict[_Attribute, Any] = field(default_factory=dict)
    after: dict[_Attribute, Any] = field(default_factory=dict)

    def changed_numbers(self) -> dict[_Attribute, Any]:
        """Numbers and flags that the call changed, with their new values."""
        return {
            key: value
            for key, value in self.after.items()
            if isinstance(value, (bool, int, float))
            and isinstance(self.before.get(key), (bool, int, float))
            and value != self.before[key]
        }

    def new_tensors(self) -> dict[_Attribute, torch.Tensor]:
        """Attributes that were None and hold a tensor now."""
        return {
            key: value
            for key, value in self.after.items()
            if isinstance(value, torch.Tensor) and key in self.before and self.before[key] is None
        }

    def replaced_tensors(self) -> set[_Attribute]:
        """Attributes that held a tensor and hold another one now."""
        return {
            key
            for key, value in self.before.items()
            if isinstance(value, torch.Tensor) and self.after.get(key) is not value
        }


class _ObservedStep(TrainingStep):
    """A training step that notes what its call does to plain attributes."""

    def __init__(self, step: TrainingStep, observed: _Observed, path: Path) -> None:
        torch.nn.Module.__init__(self)
        self.__dict__.update(step.__dict__)
        self._observed, self._path = observed, path

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        self._observed.before = _plain_attributes(self)
        buffers = [(module, dict(module._buffers)) for module in self.modules()]
        with refusing_other_random_numbers(self._path):
            loss = super().forward(*tensors)
        for module, before in buffers:
            _write_assigned(module, before)
        self._observed.after = _plain_attributes(self)
        return loss


def _write_assigned(module: torch.nn.Module, before: dict[str, torch.Tensor | None]) -> None:
    """``self.buffer = value`` gets lost on export where the module is not the outermost: write the value instead."""
    for name, old in before.items():
        new = module._buffers.get(name)
        if old is None or new is old:
            continue
        if new is None or new.shape != old.shape or new.dtype != old.dtype:
            raise WorkloadError(
                "HP113",
                f"forward puts another kind of tensor in the place of buffer '{name}'",
                where=_assignment(module, name),
                hint="keep its shape and dtype, and change it in place",
            )
        with torch.no_grad():
            old.copy_(new)
        module._buffers[name] = old


def _plain_attributes(step: torch.nn.Module) -> dict[_Attribute, Any]:
    kinds = (bool, int, float, torch.Tensor, type(None))
    return {
        (path, name): value
        for path, module in step.named_modules()
        for name, value in (*vars(module).items(), *module._buffers.items())
        if isinstance(value, kinds)
    }


def export_step(
    step: TrainingStep, tensors: tuple[torch.Tensor, ...], path: Path
) -> tuple[ExportedProgram, str | None]:
    """Export with a free batch size where the model allows; the note says why it is fixed where not.

    Raises:
        WorkloadError: HP113 if ``forward`` counts on a plain attribute that it changed in the call before; HP119 if it
            makes gradients of its own.
        Exception: Whatever export raises.
    """
    observed, gradients = _Observed(), OwnGradients(path)
    with gradients.watched(), watched_calls(path):
        program, note = _export(_ObservedStep(step, observed, path), tensors)
    gradients.check()
    for module, name in observed.replaced_tensors():
        full = f"{module}.{name}".lstrip(".")
        if full in program.constants:
            raise _keeps_state(step, module, name, "", path)
    for (module, name), value in observed.new_tensors().items():
        if _follows_batch(program, value) and _asks_for_none(step.get_submodule(module), name):
            raise _keeps_state(step, module, name, "", path)
    changed = observed.changed_numbers()
    if changed:
        _refuse_counters(step, tensors, program, changed, path)
    return program, note


def _refuse_counters(
    step: TrainingStep,
    tensors: tuple[torch.Tensor, ...],
    program: ExportedProgram,
    changed: dict[_Attribute, Any],
    path: Path,
) -> None:
    """Make the next call: HP113 if it computes something else, or changes the numbers again."""
    modules = dict(step.named_modules())
    old = {key: getattr(modules[key[0]], key[1]) for key in changed}
    next_call = _Observed()
    try:
        for (module, name), value in changed.items():
            setattr(modules[module], name, value)
        again, _ = _export(_ObservedStep(step, next_call, path), tensors)
    finally:
        for (module, name), value in old.items():
            setattr(modules[module], name, value)
    moving = next_call.changed_numbers()
    if moving or str(again.graph) != str(program.graph):
        key = next(iter(moving or changed))
        raise _keeps_state(step, *key, f" ({old.get(key)}, then {changed.get(key)})", path)


def _follows_batch(program: ExportedProgram, value: torch.Tensor) -> bool:
    """Whether a tensor made in forward depends on more of the batch than its sizes."""
    memory = value.untyped_storage()._cdata
    vals = {n: n.meta.get("val") for n in program.graph.nodes}
    stack = [n for n, v in vals.items() if isinstance(v, torch.Tensor) and v.untyped_storage()._cdata == memory]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if node.name in program.graph_signature.user_inputs:
            return True
        if isinstance(vals[node], torch.Tensor):
            new = [n for n in node.all_input_nodes if n not in seen]
            seen.update(new)
            stack += new
    return False


def _asks_for_none(module: torch.nn.Module, name: str) -> bool:
    """Whether the module's class treats its first call apart: ``self.name is None``."""
    try:
        source = inspect.getsource(type(module))
    except (OSError, TypeError):
        return False
    return re.search(rf"\bself\.{name}\s+is\s+(not\s+)?None\b", source) is not None


def _keeps_state(step: TrainingStep, module: str, name: str, values: str, path: Path) -> WorkloadError:
    owner = dict(step.named_modules())[module]
    title = f"{module.removeprefix('model').lstrip('.')}.{name}".lstrip(".")
    return WorkloadError(
        "HP113",
        f"forward changes the plain attribute '{title}' from call to call{values}; the captured model would not",
        where=(_assignment(owner, name) or str(path)).replace(str(path.resolve()), str(path)),
        hint="make it a buffer (register_buffer) and change it in place, or keep the count outside the model",
    )


def _assignment(module: torch.nn.Module, name: str) -> str | None:
    """The line of the module's class that assigns the attribute outside ``__init__``."""
    try:
        lines, first = inspect.getsourcelines(type(module))
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None
    functions = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.name != "__init__"]
    for node in (n for f in functions for n in ast.walk(f)):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        if any(isinstance(t, ast.Attribute) and t.attr == name for t in targets):
            assert isinstance(node, (ast.Assign, ast.AugAssign))
            return f"{inspect.getsourcefile(type(module))}:{first + node.lineno - 1}"
    return None


def _export(step: TrainingStep, tensors: tuple[torch.Tensor, ...]) -> tuple[ExportedProgram, str | None]:
    auto = torch.export.Dim.AUTO
    free = tuple({0: auto} if t.dim() else {} for t in tensors)
    with _quiet(), no_cyclic_garbage(), autocast_on_cpu(), _meta_as_cpu(), idle_python():
        if not tensors[0].dim() or tensors[0].shape[0] < 2:
            note = "the example's batch size is 1, which export takes as a constant"
        else:
            try:
                program = torch.export.export(step, tensors, dynamic_shapes=(free,), strict=False)
                if _is_free(program):
                    return program, None
                note = "the model turns the batch size into a constant"
            except WorkloadError:
                raise
            except Exception as error:
                note = f"the model needs a fixed batch size: {first_line(error)}"
        return torch.export.export(step, tensors, strict=False), note


def _is_free(program: ExportedProgram) -> bool:
    """Whether dimension 0 of the first user input stayed a symbol."""
    names = program.graph_signature.user_inputs
    node = next(n for n in program.graph.nodes if n.op == "placeholder" and n.name == names[0])
    size = node.meta["val"].shape[0]
    # A symbol that turned out to be a constant is still a SymInt.
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def cannot_export(step: TrainingStep, tensors: tuple[torch.Tensor, ...], path: Path, error: Exception) -> WorkloadError:
    """Tell a model that raises (HP110) from one that only export cannot follow (HP111), by calling it on real
    tensors."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step(*tensors)
    except WorkloadError as own:
        return own
    except Exception as own:
        return WorkloadError(
            "HP110",
            f"the model or its loss raised {type(own).__name__}: {first_line(own)}",
            where=_place(own, path),
            hint="run one training step on the example in plain PyTorch",
        )
    problem = f"torch.export cannot follow the model: {first_line(error)}"
    if isinstance(error, GuardOnDataDependentSymNode):
        problem = "what forward does depends on a tensor's values, which nobody knows when compiling"
    at_fault = _module_at_fault(error, step)
    whole = f"or keep it whole: --opaque {at_fault}" if at_fault else "or lie in a submodule that --opaque keeps whole"
    return WorkloadError(
        "HP111",
        problem + _library_line(error, path),
        where=_place(error, path),
        hint=f"a branch or a loop that depends on values must become torch.where or a fixed count; {whole}",
    )


def _module_at_fault(error: Exception, step: TrainingStep) -> str:
    """Path of the innermost submodule that was running; '' if the error came from the model's own forward."""
    paths = {id(module): path for path, module in step.model.named_modules()}
    found, trace = "", error.__traceback__
    while trace is not None:
        found = paths.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return found


def first_line(error: BaseException) -> str:
    """The first line of an error's text, at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def _place(error: BaseException, path: Path) -> str:
    """The user's line: from the traceback, else from the frames that torch prints inside its message."""
    line = user_line(error, path)
    if line != str(path):
        return line
    told = re.findall(rf'File "{re.escape(str(path.resolve()))}", line (\d+)', str(error))
    return f"{path}:{told[-1]}" if told else str(path)


def _library_line(error: BaseException, path: Path) -> str:
    """`` (at transformers/models/x/modeling_x.py:12)`` where the innermost model code is not the user's own file."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if not is_internal(f.filename) and _is_model_code(Path(f.filename), path)]
    if not outside or Path(outside[-1].filename).resolve() == path.resolve():
        return ""
    return f" (at {short_path(Path(outside[-1].filename), path.resolve().parent)}:{outside[-1].lineno})"


def _is_model_code(file: Path, path: Path) -> bool:
    """A library or a file beside the user's, not Python's own."""
    return "site-packages" in file.parts or file.resolve().is_relative_to(path.resolve().parent)


@contextlib.contextmanager
def _meta_as_cpu() -> Iterator[None]:
    """While export looks, meta tensors say that they are on the CPU, which is the path that runs on every device.

    Models ask ``x.device.type == "cpu"`` to go around what only a GPU can do; and a constant made on ``x.device`` keeps
    its value.
    """
    original = FakeTensorMode.from_tensor

    def from_tensor(self: FakeTensorMode, tensor: torch.Tensor, **settings: Any) -> Any:
        fake = original(self, tensor, **settings)
        if tensor.is_meta:
            fake.fake_device = torch.device("cpu")
        return fake

    with mock.patch.object(FakeTensorMode, "from_tensor", from_tensor):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep export's own chatter off the terminal; its errors come back as ours."""
    names = ("torch", "torch.export", "torch._dynamo", "torch.fx", "torch.fx.experimental.symbolic_shapes")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    # Export prints the whole graph so far to stderr before it raises.
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
