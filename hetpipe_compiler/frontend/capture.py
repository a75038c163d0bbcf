"""Capture a workload as one fx graph, from meta tensors.

The model is built on the meta device, so a model of any size is captured without its weights; a model that cannot be is
captured for real, on the CPU. ``torch.export`` gives ATen operators before autograd: modules in train mode, in-place
operators, dropout and batch-norm updates are all still there.
"""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.assigned_buffers import read_assigned_from_copies
from hetpipe_compiler.frontend.construct import build_on_meta, build_real
from hetpipe_compiler.frontend.eager_check import CapturedOtherwiseError, EagerCheck
from hetpipe_compiler.frontend.export import Exported, cannot_export, export_step
from hetpipe_compiler.frontend.gradient_hooks import refuse_hooks
from hetpipe_compiler.frontend.load import LoadedWorkload
from hetpipe_compiler.frontend.names import Names, attribute
from hetpipe_compiler.frontend.opaque import Kept
from hetpipe_compiler.frontend.regions import contexts_of, inline_regions, uses_autocast
from hetpipe_compiler.frontend.training_step import TrainingStep, loss_for, refuse_hidden_values
from hetpipe_compiler.ir.captured import Captured
from hetpipe_compiler.ir.opaque import set_opaque_calls
from hetpipe_compiler.ir.source import source_place, told_place
from hetpipe_compiler.user_code import USER_ERRORS, first_line, telling


def capture(loaded: LoadedWorkload, *, evaluation: bool = False, opaque: Sequence[str] = (), seed: int = 0) -> Captured:
    """Capture model and loss in train mode.

    Args:
        loaded: The workload.
        evaluation: Whether to capture them in eval mode too, as ``in_eval``.
        opaque: Submodules that are kept whole, by path or pattern; the model is then also built for real and run.
        seed: What the model's constructor draws, it draws from this.

    Raises:
        WorkloadError: HP106-HP107 the example does not fit, or there is no scalar loss; HP108 no trainable parameters;
            HP110 the model or the loss raises; HP111-HP113 it cannot be captured as it is meant; HP115 autocast is off;
            HP116 a parameter shares memory; HP119 gradients of its own; HP123-HP124 a submodule cannot be kept whole;
            HP128 export has captured something else than eager mode computes.
    """
    kept = Kept(loaded, build_real(loaded, seed), _example(loaded, "cpu"), opaque) if opaque else None
    model, captured = build_on_meta(loaded, seed), None
    if model is not None:
        # Code that asks for the kind of a tensor hears of another one on meta.
        with suppress(CapturedOtherwiseError):
            captured = _capture_on(loaded, model, _example(loaded, "meta"), evaluation, kept)
    if captured is None:
        # The constructor or forward computes with values (drop-path rates from linspace().item()), a constant has none
        # on meta (torch.tensor(1.0, device=x.device)), or autocast decides on dtypes by device: look at a real model.
        captured = _capture_on(loaded, build_real(loaded, seed), _example(loaded, "cpu"), evaluation, kept)
        assert captured is not None
    return captured


def _example(loaded: LoadedWorkload, device: str) -> Any:
    with telling(WorkloadError, "HP110", "Workload.example raised", loaded.path, hint="call it once in plain Python"):
        batch = loaded.workload.example_batch()
    return pytree.tree_map(lambda x: x.detach().to(device) if isinstance(x, torch.Tensor) else x, batch)


def _capture_on(
    loaded: LoadedWorkload, model: torch.nn.Module, batch: Any, evaluation: bool = False, kept: Kept | None = None
) -> Captured | None:
    """Capture on the device of ``batch``; None if a real model must be looked at."""
    step = TrainingStep(loaded.workload, model, batch).train()
    refuse_hidden_values(batch)
    tensors = _tensors(batch)
    if not tensors:
        raise WorkloadError("HP106", "the example holds no tensor", where=str(loaded.path))
    on_meta = tensors[0].is_meta
    step.loss = loss_for(loaded.workload, tensors[0].device.type)
    _check_trainable(loaded, step)
    _check_names(loaded, step.model)
    _refuse_extra_state(loaded, step.model)
    refuse_hooks(step.model, str(loaded.path), kept.paths if kept is not None else ())
    try:
        graph_module, note = _export(loaded, step, tensors, kept)
    except WorkloadError:
        raise
    except USER_ERRORS as error:
        if on_meta:
            return None
        raise cannot_export(step, tensors, loaded.path, error) from error
    captured = _captured(loaded, step, batch, graph_module, note)
    if on_meta and (uses_autocast(graph_module.graph) or any(v.is_meta for v in captured.constant_values.values())):
        return None
    _check_loss(loaded, captured)
    return _with_eval(loaded, captured, step, batch, kept) if evaluation else captured


def _export(
    loaded: LoadedWorkload, step: TrainingStep, tensors: tuple[torch.Tensor, ...], kept: Kept | None
) -> tuple[fx.GraphModule, str | None]:
    """The step as one graph, and why its batch size is fixed."""
    if kept is not None:
        with kept.standing_in(step) as calls:
            exported = export_step(step, tensors, loaded.path)
        return _graph(loaded, exported, calls), exported.note
    exported = export_step(step, tensors, loaded.path)
    graph_module = _graph(loaded, exported)
    check = EagerCheck(step, loaded.path)
    comparable = exported.as_eager and not (tensors[0].is_meta and uses_autocast(graph_module.graph))
    if not comparable or not check.check(graph_module, tensors) or exported.note is not None:
        return graph_module, exported.note
    note = check.note_on_batch(graph_module, exported.program, tensors)
    if note is None:
        return graph_module, None
    fixed = _graph(loaded, export_step(step, tensors, loaded.path, fixed=note))
    check.check(fixed, tensors)
    return fixed, note


def _graph(
    loaded: LoadedWorkload, exported: Exported, opaque_calls: Mapping[str, Any] = MappingProxyType({})
) -> fx.GraphModule:
    """One graph without regions, under export's names."""
    graph_module = exported.program.module(check_guards=False)
    assert isinstance(graph_module, fx.GraphModule)
    set_opaque_calls(graph_module, opaque_calls)
    _refuse_control_flow(loaded, graph_module)
    _strip(graph_module)
    inline_regions(graph_module)
    read_assigned_from_copies(graph_module.graph)
    return graph_module


def _tensors(batch: Any) -> tuple[torch.Tensor, ...]:
    """The batch's leaves that are tensors, in ``tree_flatten`` order."""
    return tuple(leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def _captured(
    loaded: LoadedWorkload, step: TrainingStep, batch: Any, graph_module: fx.GraphModule, note: str | None
) -> Captured:
    """What export gave, under the names of the user's model."""
    tensors = _tensors(batch)
    _name_inputs(graph_module, loaded, batch)
    names = Names(step, loaded.workload.loss, str(loaded.path))
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            node.target = names.of(str(node.target), attribute(graph_module, str(node.target)))
    return Captured(
        graph_module=graph_module,
        example=tuple(torch.empty_like(t, device="meta") for t in tensors),
        batch_leaves=step.tensor_leaves,
        batch_size=tensors[0].shape[0] if tensors[0].dim() else 1,
        dynamic_batch=note is None,
        dynamic_batch_note=note,
        parameters=names.parameters,
        buffers=names.buffers,
        constants=names.constants,
        constant_values=names.constant_values,
        meta=names.meta,
        root=loaded.path.resolve().parent,
    )


def _with_eval(
    loaded: LoadedWorkload, captured: Captured, step: TrainingStep, batch: Any, kept: Kept | None
) -> Captured:
    """The same with the model's graph in eval mode, or a note why there is none."""
    tensors = _tensors(batch)
    step.eval()
    try:
        graph_module, note = _export(loaded, step, tensors, kept)
        return replace(captured, in_eval=_captured(loaded, step, batch, graph_module, note))
    except WorkloadError as error:
        if isinstance(error, CapturedOtherwiseError) and tensors[0].is_meta:
            raise
        where = (error.where or "").replace(str(loaded.path), loaded.path.name)  # a plan goes to other machines
        note = error.message + (f" ({where})" if where else "")
    except USER_ERRORS as error:
        note = f"torch.export cannot follow the model: {first_line(error)}"
    finally:
        step.train()
    return replace(captured, evaluation_note=f"in eval mode: {note}")


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


def _check_names(loaded: LoadedWorkload, model: torch.nn.Module) -> None:
    """Export writes names into Python; a keyword among them makes it fail with a syntax error in nobody's file."""
    for name, _ in (*model.named_parameters(), *model.named_buffers()):
        word = next((part for part in name.split(".") if keyword.iskeyword(part)), None)
        if word is not None:
            raise WorkloadError(
                "HP118",
                f"'{name}': '{word}' is a Python keyword",
                where=str(loaded.path),
                hint="give the parameter, buffer or module another name",
            )


def _refuse_extra_state(loaded: LoadedWorkload, model: torch.nn.Module) -> None:
    """A run's weights are tensors, so a strict ``load_state_dict`` of them would miss it: HP126."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            raise WorkloadError(
                "HP126",
                f"module '{name or '(model)'}' ({type(module).__name__}) has an extra state, which no run would save",
                where=_defined_at(type(module).get_extra_state, loaded.path),
                hint="hold it in a buffer (register_buffer), or delete get_extra_state if it never changes",
            )


def _defined_at(function: Any, path: Path) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return told_place(Path(code.co_filename), code.co_firstlineno, path) if code is not None else str(path)


def _check_loss(loaded: LoadedWorkload, captured: Captured) -> None:
    """One floating-point number that a trainable parameter has a part in."""
    node = captured.loss_node()
    value = node.meta.get("val")
    where = source_place(node, captured.root) or str(loaded.path)
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point or value.dim():
        kind = type(value).__name__
        if isinstance(value, torch.Tensor):
            sizes = ", ".join(str(size) if isinstance(size, int) else "batch" for size in value.shape)
            kind = f"a {str(value.dtype).removeprefix('torch.')} tensor of shape ({sizes})"
        raise WorkloadError(
            "HP107", f"the loss is {kind}, not one floating-point number", where=where, hint="take its mean or sum"
        )
    trainable = {t.name for t in captured.parameters if t.trainable}
    seen, stack = {node}, [node]
    while stack:
        reading = stack.pop()
        if reading.op == "get_attr" and reading.target in trainable:
            return
        if reading.target is torch.ops.aten.detach.default or not _has_gradients(reading):
            continue
        new = [n for n in reading.all_input_nodes if n not in seen]
        seen.update(new)
        stack += new
    raise WorkloadError(
        "HP108", "no gradient of the loss reaches a trainable parameter", where=where, hint="nothing would be trained"
    )


def _has_gradients(node: fx.Node) -> bool:
    return [enabled for kind, enabled, *_ in contexts_of(node) if kind == "grad"][-1:] != [False]


def _refuse_control_flow(loaded: LoadedWorkload, graph_module: fx.GraphModule) -> None:
    """``torch.cond`` and its kin hold graphs that a stage module has no form for: HP112; HP115 for autocast."""
    for module in graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            target = node.target
            regions = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
            if str(target) == "wrap_with_autocast" and node.args[0] == "cuda":
                # Inside forward "cuda" is seen as the CPU (`autocast_on_cpu`): this one was made before, and torch may
                # have switched it off because there is no GPU here.
                raise WorkloadError(
                    "HP115",
                    'an autocast("cuda") that was made outside forward may be off without a GPU',
                    where=str(loaded.path),
                    hint="make it in forward: with torch.autocast(x.device.type, ...)",
                )
            of_functorch = str(getattr(target, "__module__", "")).startswith("torch._functorch")
            if of_functorch or (isinstance(target, torch._ops.HigherOrderOperator) and str(target) not in regions):
                name = "torch.vmap or a kin of it" if of_functorch else target
                raise WorkloadError(
                    "HP112",
                    f"the model calls {name}, which a stage module cannot hold",
                    where=source_place(node, loaded.path.resolve().parent) or str(loaded.path),
                    hint="express it with tensor operators, such as torch.where",
                )


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
