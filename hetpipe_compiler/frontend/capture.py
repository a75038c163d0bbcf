"""Capture a workload as one fx graph, from meta tensors.

The model is built on the meta device, so a model of any size is captured without its weights. ``torch.export`` gives ATen
operators before autograd: modules in train mode, in-place operators, dropout and batch-norm updates are all still there.
"""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.load import LoadedWorkload, user_line
from hetpipe_compiler.frontend.training_step import TrainingStep, loss_for
from hetpipe_compiler.ir.captured import Captured
from hetpipe_compiler.ir.plan import Tensor

#: Prefixes that `TrainingStep` adds to the names of the model's and the loss's tensors.
_MODEL, _LOSS = "model.", "loss."


def capture(loaded: LoadedWorkload) -> Captured:
    """Capture model and loss.

    Raises:
        WorkloadError: HP106-HP107 the example does not fit; HP108 no trainable parameters; HP110 the model or the loss
            raises; HP111 it cannot be captured.
    """
    model = build_on_meta(loaded)
    captured = _capture_on(loaded, model, _example(loaded, "meta")) if model is not None else None
    if captured is None:
        # The constructor computes with values (drop-path rates from linspace().item()), or a constant made in forward
        # had no value on meta (torch.tensor(1.0, device=x.device)): look at a real model.
        captured = _capture_on(loaded, build_real(loaded, seed=0), _example(loaded, "cpu"))
        assert captured is not None
    return captured


def build_on_meta(loaded: LoadedWorkload) -> torch.nn.Module | None:
    """The model on the meta device, in train mode; None if its constructor needs values."""
    try:
        with torch.device("meta"):
            model = loaded.workload.model()
    except Exception:
        return None
    if not isinstance(model, torch.nn.Module):
        raise WorkloadError(
            "HP105", f"Workload.model() returned {type(model).__name__}, not a torch.nn.Module", where=str(loaded.path)
        )
    # A constructor that names its device explicitly may have left something real.
    return model.train() if all(t.is_meta for t in (*model.parameters(), *model.buffers())) else None


def build_real(loaded: LoadedWorkload, seed: int) -> torch.nn.Module:
    """The user's model with real weights (unless its author builds it on meta), in train mode, from ``seed``."""
    torch.manual_seed(seed)
    try:
        return loaded.workload.model().train()
    except Exception as error:
        raise WorkloadError(
            "HP110",
            f"Workload.model() raised {type(error).__name__}: {error}",
            where=user_line(error, loaded.path),
            hint="build it in plain PyTorch first",
        ) from error


def _example(loaded: LoadedWorkload, device: str) -> Any:
    try:
        batch = loaded.workload.example_batch()
    except Exception as error:
        raise WorkloadError(
            "HP110", f"Workload.example raised {type(error).__name__}: {error}", where=user_line(error, loaded.path)
        ) from error
    return pytree.tree_map(lambda x: torch.empty_like(x, device=device) if isinstance(x, torch.Tensor) else x, batch)


def _capture_on(loaded: LoadedWorkload, model: torch.nn.Module, batch: Any) -> Captured | None:
    """Capture on the devices of ``model`` and ``batch``; None if a constant lost its value there."""
    step = TrainingStep(loaded.workload, model, batch).train()
    tensors = tuple(leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))
    if not tensors:
        raise WorkloadError("HP106", "the example holds no tensor", where=str(loaded.path))
    step.loss = loss_for(loaded.workload, tensors[0].device.type)
    _check_trainable(loaded, step)
    program, note = _export(loaded, step, tensors)
    graph_module = program.module(check_guards=False)
    assert isinstance(graph_module, fx.GraphModule)
    _strip(graph_module)
    _name_inputs(graph_module, loaded, batch)
    names = _Names(loaded, step, model)
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            value = _attribute(graph_module, str(node.target))
            if isinstance(value, torch.Tensor):
                node.target = names.of(str(node.target), value)
    if any(v.is_meta for v in names.constant_values.values()):
        return None
    dynamic = note is None
    return Captured(
        graph_module=graph_module,
        example=tuple(torch.empty_like(t, device="meta") for t in tensors),
        batch_leaves=step.tensor_leaves,
        batch_size=tensors[0].shape[0] if tensors[0].dim() else 1,
        dynamic_batch=dynamic,
        dynamic_batch_note=note,
        parameters=names.parameters,
        buffers=names.buffers,
        constants=names.constants,
        constant_values=names.constant_values,
        meta=names.meta,
    )


def _check_trainable(loaded: LoadedWorkload, step: TrainingStep) -> None:
    if not any(p.requires_grad for p in step.model.parameters()):
        raise WorkloadError("HP108", "the model has no trainable parameter", where=str(loaded.path))
    if isinstance(step.loss, torch.nn.Module) and any(p.requires_grad for p in step.loss.parameters()):
        raise WorkloadError(
            "HP108",
            "the loss has trainable parameters, which belong to no model",
            where=str(loaded.path),
            hint="move them into the model and have it return its own loss (loss=None)",
        )


def _export(
    loaded: LoadedWorkload, step: TrainingStep, tensors: tuple[torch.Tensor, ...]
) -> tuple[ExportedProgram, str | None]:
    """Export with a free batch size where the model allows; the note says why it is fixed where not."""
    auto = torch.export.Dim.AUTO
    free = ({0: auto} if t.dim() else {} for t in tensors)
    note: str | None = None
    with _quiet():
        if not tensors[0].dim() or tensors[0].shape[0] < 2:
            note = "the example's batch size is 1, which export takes as a constant"
        else:
            try:
                program = torch.export.export(step, tensors, dynamic_shapes=(tuple(free),), strict=False)
                if _is_free(program):
                    return program, None
                note = "the model turns the batch size into a constant"
            except Exception as error:
                note = f"the model needs a fixed batch size: {_first_line(error)}"
        try:
            return torch.export.export(step, tensors, strict=False), note
        except WorkloadError:
            raise
        except Exception as error:
            raise _cannot_capture(loaded, step, tensors, error) from error


def _is_free(program: ExportedProgram) -> bool:
    """Whether dimension 0 of the first user input stayed a symbol."""
    names = program.graph_signature.user_inputs
    node = next(n for n in program.graph.nodes if n.op == "placeholder" and n.name == names[0])
    return isinstance(node.meta["val"].shape[0], torch.SymInt)


def _cannot_capture(
    loaded: LoadedWorkload, step: TrainingStep, tensors: tuple[torch.Tensor, ...], error: Exception
) -> WorkloadError:
    """Tell a model that raises from one that only export cannot follow."""
    try:
        step(*(torch.empty_like(t, device="meta") for t in tensors))
    except Exception as own:
        if not _is_export_only(own):
            return WorkloadError(
                "HP110",
                f"the model or its loss raised {type(own).__name__}: {_first_line(own)}",
                where=_place(own, loaded.path),
                hint="run one training step on the example in plain PyTorch",
            )
    return WorkloadError(
        "HP111",
        f"torch.export cannot follow the model: {_first_line(error)}",
        where=_place(error, loaded.path),
        hint="a branch or loop that depends on values must become torch.where, torch.cond or a fixed count",
    )


def _is_export_only(error: Exception) -> bool:
    """Whether an eager run on meta failed only because meta tensors have no values."""
    text = str(error)
    return "meta tensor" in text.lower() or "Meta" in text or isinstance(error, NotImplementedError)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def _place(error: BaseException, path: Path) -> str:
    """The user's line: from the traceback, else from the frames that torch prints inside its message."""
    line = user_line(error, path)
    if line != str(path):
        return line
    told = re.findall(rf'File "{re.escape(str(path.resolve()))}", line (\d+)', str(error))
    return f"{path}:{told[-1]}" if told else str(path)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep export's own chatter off the terminal; its errors come back as ours."""
    loggers = [logging.getLogger(name) for name in ("torch", "torch.export", "torch._dynamo", "torch.fx")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _strip(graph_module: fx.GraphModule) -> None:
    """Drop the guard call that export leaves, flatten the calling convention, and forget unused attributes."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.op == "call_module" and node.target == "_guards_fn":
            graph.erase_node(node)
    graph.set_codegen(fx.graph.CodeGen())
    for node in reversed(list(graph.nodes)):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    graph_module.recompile()


def _name_inputs(graph_module: fx.GraphModule, loaded: LoadedWorkload, batch: Any) -> None:
    """Call placeholders after the batch's keys, or ``input_0``, ``target_0`` for a tuple's items."""
    targets = loaded.workload.targets if loaded.workload.loss is not None else 0
    inputs = len(batch) - targets if isinstance(targets, int) and isinstance(batch, (tuple, list)) else None
    titles = []
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, torch.Tensor):
            first, rest = path[0], pytree.keystr(path[1:])
            title = pytree.keystr((first,))
            if inputs is not None and isinstance(first, pytree.SequenceKey):
                title = f"input_{first.idx}" if first.idx < inputs else f"target_{first.idx - inputs}"
            titles.append(re.sub(r"\W+", "_", title + rest).strip("_") or "batch")
    placeholders = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
    for node, title in zip(placeholders, titles, strict=True):
        node._rename(title)
        node.target = node.name
    graph_module.recompile()


def _attribute(root: torch.nn.Module, target: str) -> Any:
    value: Any = root
    for part in target.split("."):
        value = getattr(value, part)
    return value


class _Names:
    """Names of parameters, buffers and constants as the user's model has them."""

    def __init__(self, loaded: LoadedWorkload, step: TrainingStep, model: torch.nn.Module) -> None:
        self._first: dict[str, str] = {}
        self.meta: dict[str, torch.Tensor] = {}
        self.constant_values: dict[str, torch.Tensor] = {}
        self._loss = loaded.workload.loss if isinstance(loaded.workload.loss, torch.nn.Module) else None
        self._constants: dict[str, Tensor] = {}
        self.parameters = self._collect(model.named_parameters(remove_duplicate=False), set())
        transient = {
            f"{prefix}.{name}".lstrip(".")
            for prefix, module in model.named_modules(remove_duplicate=False)
            for name in module._non_persistent_buffers_set
        }
        self.buffers = self._collect(model.named_buffers(remove_duplicate=False), transient)

    def _collect(self, named: Any, transient: set[str]) -> tuple[Tensor, ...]:
        """One entry per distinct tensor, under its first name, with the other names as aliases."""
        order: dict[int, list[str]] = {}
        values: dict[int, torch.Tensor] = {}
        for name, value in named:
            order.setdefault(id(value), []).append(name)
            values[id(value)] = value
        entries = []
        for key, names in order.items():
            value = values[key]
            self._first.update(dict.fromkeys(names, names[0]))
            self.meta[names[0]] = torch.empty_like(value, device="meta").requires_grad_(value.requires_grad)
            entries.append(describe(names[0], value, aliases=tuple(names[1:]), persistent=names[0] not in transient))
        return tuple(entries)

    @property
    def constants(self) -> tuple[Tensor, ...]:
        return tuple(self._constants.values())

    def of(self, target: str, value: torch.Tensor) -> str:
        """The name of what a ``get_attr`` node reads; what is not the model's own becomes a constant."""
        if target.startswith(_MODEL) and target[len(_MODEL) :] in self._first:
            return self._first[target[len(_MODEL) :]]
        name = "constant_" + re.sub(r"\W", "_", target.removeprefix(_MODEL))
        if name not in self._constants:
            if self._loss is not None and target.startswith(_LOSS):
                value = _attribute(self._loss, target[len(_LOSS) :])
            self._constants[name] = describe(name, value, persistent=False)
            self.constant_values[name] = value.detach()
            self.meta[name] = torch.empty_like(value, device="meta")
        return name


def describe(name: str, value: torch.Tensor, *, aliases: tuple[str, ...] = (), persistent: bool = True) -> Tensor:
    """A plan's entry for a tensor."""
    return Tensor(
        name=name,
        shape=tuple(value.shape),
        dtype=str(value.dtype).removeprefix("torch."),
        trainable=value.requires_grad,
        persistent=persistent,
        aliases=aliases,
        bytes=value.numel() * value.element_size(),
    )
