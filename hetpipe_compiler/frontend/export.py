"""Run ``torch.export`` on a training step, and tell in the user's terms why it cannot follow."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.batch_guards import condition_on_batch
from hetpipe_compiler.frontend.call_to_call import Observed, ObservedStep, refuse_state
from hetpipe_compiler.frontend.checkpointing import followed_checkpoints
from hetpipe_compiler.frontend.eager_answers import EagerAnswers
from hetpipe_compiler.frontend.frozen_calls import watched_calls
from hetpipe_compiler.frontend.gradient_hooks import refusing_hooks
from hetpipe_compiler.frontend.idle_python import idle_python
from hetpipe_compiler.frontend.loss_lines import loss_lines
from hetpipe_compiler.frontend.moments import Moments
from hetpipe_compiler.frontend.own_gradients import OwnGradients
from hetpipe_compiler.frontend.python_state import PythonState
from hetpipe_compiler.frontend.regions import autocast_on_cpu, no_grad_kept_in_autocast
from hetpipe_compiler.frontend.training_step import TrainingStep
from hetpipe_compiler.garbage import no_cyclic_garbage
from hetpipe_compiler.ir.source import is_internal, short_path
from hetpipe_compiler.user_code import USER_ERRORS, first_line, told, user_line


@dataclass(frozen=True)
class Exported:
    """What export gave.

    Attributes:
        program: The graph and more.
        note: Why the batch size is fixed; None where it is free.
        as_eager: Whether the model's code was called as in eager mode; else a library knew that it is exported.
    """

    program: ExportedProgram
    note: str | None
    as_eager: bool


def export_step(
    step: TrainingStep, tensors: tuple[torch.Tensor, ...], path: Path, fixed: str | None = None
) -> Exported:
    """Export with a free batch size where the model allows, and ``fixed`` does not say why not.

    Raises:
        WorkloadError: HP112 if ``forward`` computes with the moment it runs in; HP113 if it counts on a plain
            attribute that it changed in the call before; HP119 if it makes gradients of its own.
        Exception: Whatever export raises.
    """
    answers = EagerAnswers(path)
    with answers.given(step):
        try:
            return Exported(*_export_step(step, tensors, path, fixed), as_eager=True)
        except WorkloadError:
            raise
        except Exception:
            if not answers.asked_by_library:
                raise
            answers.truth_for_libraries = True
            return Exported(*_export_step(step, tensors, path, fixed), as_eager=False)


def _export_step(
    step: TrainingStep, tensors: tuple[torch.Tensor, ...], path: Path, fixed: str | None
) -> tuple[ExportedProgram, str | None]:
    observed, gradients, moments = Observed(), OwnGradients(path), Moments(path)

    def export(step: TrainingStep, tensors: tuple[torch.Tensor, ...]) -> tuple[ExportedProgram, str | None]:
        return _export(step, tensors, fixed)

    with (
        gradients.watched(),
        followed_checkpoints(step, path),
        refusing_hooks(path),
        watched_calls(path),
        loss_lines(step.loss),
    ):
        with moments.watched(step):
            program, note = export(ObservedStep(step, observed, path), tensors)
        with moments.returning(step):
            refuse_state(step, tensors, program, observed, export, path)
        moments.refuse(step, program, lambda: export(ObservedStep(step, Observed(), path), tensors)[0])
    gradients.check()
    return program, note


def _export(
    step: TrainingStep, tensors: tuple[torch.Tensor, ...], fixed: str | None
) -> tuple[ExportedProgram, str | None]:
    auto = torch.export.Dim.AUTO
    free = tuple({0: auto} if t.dim() else {} for t in tensors)
    with _quiet(), no_cyclic_garbage(), autocast_on_cpu(), _meta_as_cpu(), idle_python():
        if fixed is not None:
            note = fixed
        elif not tensors[0].dim() or tensors[0].shape[0] < 2:
            note = "the example's batch size is 1, which export takes as a constant"
        else:
            try:
                program = _exported(step, tensors, (free,))
                note = "the model turns the batch size into a constant"
                if _is_free(program):
                    condition = condition_on_batch(program, tensors)
                    if condition is None:
                        return program, None
                    note = f"the model goes this way only where {condition}"
            except WorkloadError:
                raise
            except USER_ERRORS as error:
                note = f"the model needs a fixed batch size: {first_line(error)}"
        return _exported(step, tensors, None), note


def _exported(step: TrainingStep, tensors: tuple[torch.Tensor, ...], sizes: Any) -> ExportedProgram:
    """Export leaves what modules hold in Python as it was, in the same containers (torch puts copies there)."""
    state = PythonState.of(step)
    try:
        with no_grad_kept_in_autocast():
            return torch.export.export(step, tensors, dynamic_shapes=sizes, strict=False)
    finally:
        state.put_back()


def _is_free(program: ExportedProgram) -> bool:
    """Whether dimension 0 of the first user input stayed a symbol."""
    names = program.graph_signature.user_inputs
    node = next(n for n in program.graph.nodes if n.op == "placeholder" and n.name == names[0])
    size = node.meta["val"].shape[0]
    # A symbol that turned out to be a constant is still a SymInt.
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def cannot_export(
    step: TrainingStep, tensors: tuple[torch.Tensor, ...], path: Path, error: BaseException
) -> WorkloadError:
    """Tell a model that raises (HP110) from one that only export cannot follow (HP111), by calling it on real
    tensors."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step(*tensors)
    except WorkloadError as own:
        return own
    except USER_ERRORS as own:
        return WorkloadError(
            "HP110",
            f"the model or its loss raised {told(own)}",
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


def _module_at_fault(error: BaseException, step: TrainingStep) -> str:
    """Path of the innermost submodule that was running; '' if the error came from the model's own forward."""
    paths = {id(module): path for path, module in step.model.named_modules()}
    found, trace = "", error.__traceback__
    while trace is not None:
        found = paths.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return found


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
