"""``--opaque MODULE``: submodules that export does not look into.

Sizes of what such a module returns cannot be worked out, so the real model runs on the example batch, and on larger
ones made of it, and is watched. While export looks, a call of the module then becomes one call of `OPAQUE` with the
module's tensors as arguments.

A module can be kept whole if its arguments are tensors, plain values, and tuples, lists and dicts of them; if the sizes
and numbers that it returns follow the batch size alone; and if it writes into nothing but its own buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.load import LoadedWorkload
from hetpipe_compiler.frontend.regions import autocast_on_cpu
from hetpipe_compiler.frontend.training_step import TrainingStep, loss_for
from hetpipe_compiler.frontend.watched_call import (
    Seen,
    cannot_keep,
    own_tensors,
    plain_attributes,
    template_of,
    watched_call,
)
from hetpipe_compiler.ir.opaque import OPAQUE, OpaqueCall, Size, Slot, TensorForm, exporting, size_at
from hetpipe_compiler.user_code import telling


class Kept:
    """The submodules to keep whole, and what was seen of their calls.

    Args:
        loaded: The workload.
        model: Its model with real values, in train mode. It is used: its buffers change.
        batch: The example with real values.
        patterns: Paths of submodules, or patterns such as ``blocks.*.router``.

    Raises:
        WorkloadError: HP110 the model raises; HP123 a pattern names no submodule, or one that is never called; HP124
            one cannot be kept whole.
    """

    def __init__(self, loaded: LoadedWorkload, model: torch.nn.Module, batch: Any, patterns: Sequence[str]) -> None:
        self._loaded, self._model, self._batch = loaded, model, batch
        self._paths = _matching(model, patterns, str(loaded.path))
        self._fixed = False
        #: How many hooks a module has when it is built; those that come later are the model's.
        self._hooks = {path: len(module._forward_hooks) for path, module in model.named_modules()}
        called = {call.module for call in self.in_training.values()}
        for pattern, paths in self._paths.items():
            if not called.intersection(paths):
                raise self._never_called(pattern, paths)

    @property
    def paths(self) -> set[str]:
        """Where the modules lie in the model."""
        return {path for paths in self._paths.values() for path in paths}

    def _never_called(self, pattern: str, paths: Sequence[str]) -> WorkloadError:
        around = next((outer for outer in sorted(self.paths) for path in paths if path.startswith(f"{outer}.")), None)
        problem = "forward never calls this module"
        hint = "name the module whose own forward is called; a container's is not"
        if around is not None:
            problem = f"this module lies in '{around}', which is kept whole with all that is in it"
            hint = "name only one of them"
        return WorkloadError("HP123", f"'{pattern}': {problem}", where="--opaque", hint=hint)

    @cached_property
    def in_training(self) -> dict[str, OpaqueCall]:
        """The calls of a training step, by ``path#n``."""
        return _with_written(self._watch(training=True), {})

    @cached_property
    def in_eval(self) -> dict[str, OpaqueCall]:
        """Those in eval mode; a buffer that training writes counts as written. Raises `WorkloadError` HP110, HP124."""
        return _with_written(self._watch(training=False), self.in_training)

    @contextmanager
    def standing_in(self, step: TrainingStep) -> Iterator[dict[str, OpaqueCall]]:
        """While export looks at ``step``: calls of the modules are single nodes. Yields what they stand for."""
        calls = self.in_training if step.training else self.in_eval
        made: dict[str, int] = {}
        with ExitStack() as stack:
            stack.enter_context(exporting(calls))
            for path in self.paths:
                module = step.model.get_submodule(path)
                stand_in = _stand_in(path, module, calls, made, self._fixed, self._hooks[path])
                stack.enter_context(mock.patch.object(module, "_call_impl", stand_in))
            stack.enter_context(mock.patch.object(step.model, "_call_impl", _anew(step.model, made)))
            yield calls

    def _watch(self, *, training: bool) -> dict[str, OpaqueCall]:
        """Run the model at several batch sizes; what its calls have in common."""
        step = TrainingStep(self._loaded.workload, self._model, self._batch).train(training)
        step.loss = loss_for(self._loaded.workload, "cpu")
        leaves = [leaf for leaf in pytree.tree_leaves(self._batch) if isinstance(leaf, torch.Tensor)]
        batch = leaves[0].shape[0] if leaves[0].dim() else 1
        try:
            runs = {batch: self._run(step, leaves)}
            for larger in (batch + 1, 2 * batch) if batch > 1 else ():
                try:
                    runs[larger] = self._run(step, [_repeated(leaf, batch, larger) for leaf in leaves])
                except WorkloadError as error:
                    if error.code != "HP110":
                        raise
        finally:
            step.train()
        self._fixed = len(runs) == 1
        return {key: _in_common(key, [run.get(key) for run in runs.values()], list(runs)) for key in runs[batch]}

    def _run(self, step: TrainingStep, leaves: Sequence[torch.Tensor]) -> dict[str, Seen]:
        seen: dict[str, Seen] = {}
        before = {name: b.detach().clone() for name, b in step.named_buffers()}
        plain = [(part, dict(plain_attributes(part))) for part in step.modules()]
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(autocast_on_cpu())
            inside: list[str] = []
            for path in self.paths:
                module = step.model.get_submodule(path)
                stack.enter_context(mock.patch.object(module, "_call_impl", watched_call(path, module, seen, inside)))
            hint = "run one training step on the example in plain PyTorch"
            with telling(WorkloadError, "HP110", "the model or its loss raised", self._loaded.path, hint=hint):
                step(*(leaf.clone() for leaf in leaves))
        with torch.no_grad():
            for name, buffer in step.named_buffers():
                if name in before and before[name].shape == buffer.shape:
                    buffer.copy_(before[name])
        for part, values in plain:  # a cache of another batch size must not be met again
            vars(part).update(values)
        return seen


def _matching(model: torch.nn.Module, patterns: Sequence[str], where: str) -> dict[str, list[str]]:
    """Pattern -> the paths that it names, each module under its first path."""
    first = {id(module): path for path, module in reversed(list(model.named_modules(remove_duplicate=False)))}
    paths = {p: first[id(m)] for p, m in model.named_modules(remove_duplicate=False) if p}
    found = {}
    for pattern in patterns:
        found[pattern] = list(dict.fromkeys(f for p, f in paths.items() if f and fnmatchcase(p, pattern)))
        if not found[pattern]:
            near = [p for p in paths if pattern.rpartition(".")[2] in p][:3] or list(paths)[:3]
            raise WorkloadError(
                "HP123",
                f"'{pattern}' names no submodule of the model in {where}",
                where="--opaque",
                hint=f"for example {', '.join(near)}" if near else "the model has no submodules",
            )
    return found


def _repeated(leaf: torch.Tensor, batch: int, larger: int) -> torch.Tensor:
    """A batch of more samples: the first ones come again."""
    if not leaf.dim() or leaf.shape[0] != batch:
        return leaf
    return torch.cat([leaf, leaf[: larger - batch]])


# --- what several calls have in common -------------------------------------------------------------------------------


def _in_common(key: str, found: Sequence[Seen | None], batches: Sequence[int]) -> OpaqueCall:
    """One call from the same one at several batch sizes."""
    first = found[0]
    assert first is not None
    path = first.module
    calls = [call for call in found if call is not None]
    if len(calls) < len(found) or any(c.structure != first.structure for c in calls):
        raise cannot_keep(path, "returns other things, or is called another number of times, for other values", _FIXED)
    if first.keeps_state and not key.endswith("#0"):
        what = "changes a plain attribute and is called several times: its calls may lie in different stages"
        raise cannot_keep(path, what, "make the attribute a buffer (register_buffer)")
    arguments = _common([c.arguments for c in calls], batches, path, [0])
    sizes = [
        (at, dimension, _fitted([c.tensors[at].shape[dimension] for c in calls], batches, path))
        for at, tensor in enumerate(first.tensors)
        for dimension in range(tensor.dim())
    ]
    follows = [(at, dimension, *size) for at, dimension, size in sizes if isinstance(size, tuple)]
    batch = next((place for place in follows if place[2:] == (1, 0)), next(iter(follows), None))
    returns = tuple(_common_leaf([c.leaves[at] for c in calls], batches, path) for at in range(len(first.leaves)))
    if batch is None and any(isinstance(s, tuple) for r in returns for s in (r.sizes if _is_form(r) else [r])):
        raise cannot_keep(path, "returns sizes that follow none of its arguments' sizes", _FIXED)
    written = tuple(dict.fromkeys(name for call in calls for name in call.written))
    state = tuple(name for name in (*first.state, *first.written) if name not in written)
    return OpaqueCall(
        path, arguments, returns, first.structure, batch, state, written, first.tensors, first.own, first.call
    )  # fmt: skip


def _with_written(calls: dict[str, OpaqueCall], others: dict[str, OpaqueCall]) -> dict[str, OpaqueCall]:
    """The calls, each with the buffers that some call of its module writes, here or among ``others``."""
    written: dict[str, dict[str, None]] = {}
    for call in (*others.values(), *calls.values()):
        written.setdefault(call.module, {}).update(dict.fromkeys(call.written))
    return {
        key: replace(
            call,
            state=tuple(n for n in (*call.state, *call.written) if n not in written[call.module]),
            written=tuple(written[call.module]),
        )
        for key, call in calls.items()
    }


_FIXED = "make its result's size depend on nothing but its arguments' sizes: pad it, or use a mask"


def _is_form(leaf: Any) -> bool:
    return isinstance(leaf, TensorForm)


def _common(values: Sequence[Any], batches: Sequence[int], path: str, numbers: list[int]) -> Any:
    """The argument at all batch sizes; a number that follows them becomes a `Slot`."""
    first = values[0]
    if any(type(v) is not type(first) for v in values):
        raise cannot_keep(path, "is called with other arguments for other values", _FIXED)
    if isinstance(first, (tuple, list)) and all(len(v) == len(first) for v in values):
        return type(first)(_common(parts, batches, path, numbers) for parts in zip(*values, strict=True))
    if isinstance(first, dict) and all(v.keys() == first.keys() for v in values):
        return {key: _common([v[key] for v in values], batches, path, numbers) for key in first}
    if type(first) is int and isinstance(_fitted(values, batches, path), tuple):
        numbers[0] += 1
        return Slot("number", numbers[0] - 1)
    if any(v != first and not (v != v and first != first) for v in values):
        raise cannot_keep(path, "is called with other arguments for other values", _FIXED)
    return first


def _common_leaf(values: Sequence[Any], batches: Sequence[int], path: str) -> Any:
    first = values[0]
    same = all(type(v) is type(first) for v in values)
    if same and isinstance(first, TensorForm):
        if any((v.dtype, len(v.sizes)) != (first.dtype, len(first.sizes)) for v in values):
            raise cannot_keep(path, "returns another dtype or number of dimensions for other values", _FIXED)
        sizes = tuple(_fitted(found, batches, path) for found in zip(*(v.sizes for v in values), strict=True))
        return TensorForm(first.dtype, sizes, first.order)
    if same and type(first) is int:
        return _fitted(values, batches, path)
    if not same or any(v != first and not (v != v and first != first) for v in values):
        raise cannot_keep(path, f"returns {first!r}, or something else for other values", "return it as a tensor")
    return first


def _fitted(values: Sequence[int], batches: Sequence[int], path: str) -> Size:
    """The number as a line over the batch size."""
    if all(value == values[0] for value in values):
        return values[0]
    per_batch, rest = divmod(values[1] - values[0], batches[1] - batches[0])
    fixed = values[0] - per_batch * batches[0]
    if rest or any(value != per_batch * at + fixed for value, at in zip(values, batches, strict=True)):
        raise cannot_keep(path, "has sizes or numbers that depend on the batch's values", _FIXED)
    return per_batch, fixed


# --- standing in for a call ------------------------------------------------------------------------------------------


def _stand_in(
    path: str, module: torch.nn.Module, calls: dict[str, OpaqueCall], made: dict[str, int], fixed: bool, own_hooks: int
) -> Callable[..., Any]:
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        key = f"{path}#{made.get(path, 0)}"
        made[path] = made.get(path, 0) + 1
        call = calls.get(key)
        if call is None:
            raise cannot_keep(path, "is called another number of times than on the example batch", _FIXED, module)
        tensors: list[torch.Tensor] = []
        template = (tuple(_traced(a, path, tensors) for a in args), _traced(kwargs, path, tensors))
        numbers = _numbers(call.arguments, template, path)
        if fixed:  # only one batch size was seen: asking for the numbers makes them constants
            [int(size) for tensor in tensors for size in tensor.shape]
        own = own_tensors(module)
        out = OPAQUE(key, tensors, numbers, [own[n] for n in call.state], [own[n] for n in call.written])
        results, batch = iter(out), call.batch_of(tensors)
        leaves = [next(results) if _is_form(r) else size_at(r, batch) if _is_size(r) else r for r in call.returns]
        value = pytree.tree_unflatten(leaves, call.structure)
        # Hooks that the model has put on since (transformers collects router logits so) are no part of the module.
        for hook in list(module._forward_hooks.values())[own_hooks:]:
            changed = hook(module, args, value)
            value = value if changed is None else changed
        return value

    return stand_in


def _anew(model: torch.nn.Module, made: dict[str, int]) -> Callable[..., Any]:
    """The model's own call, from which on calls of its modules are counted anew: export may look several times."""
    original: Callable[..., Any] = model._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        made.clear()
        return original(*args, **kwargs)

    return call


def _traced(value: Any, path: str, tensors: list[torch.Tensor]) -> Any:
    """`template_of` while export looks, where numbers may be symbols."""
    if isinstance(value, torch.SymInt):
        return value
    if type(value) in (tuple, list):
        return type(value)(_traced(part, path, tensors) for part in value)
    if type(value) is dict:
        return {key: _traced(part, path, tensors) for key, part in value.items()}
    return template_of(value, path, tensors)


def _numbers(template: Any, found: Any, path: str) -> list[Any]:
    """What lies in the number slots of ``template``; the rest must be as it was on the example batch."""
    if isinstance(template, Slot):
        if template.kind == "number":
            return [found]
        if found == template:
            return []
    elif isinstance(template, (tuple, list)) and type(found) is type(template) and len(found) == len(template):
        return [n for a, b in zip(template, found, strict=True) for n in _numbers(a, b, path)]
    elif isinstance(template, dict) and isinstance(found, dict) and found.keys() == template.keys():
        return [n for key in template for n in _numbers(template[key], found[key], path)]
    elif isinstance(template, torch.device) or found == template or (found != found and template != template):
        return []
    raise cannot_keep(path, f"is called with {found!r}, on the example batch with {template!r}", _FIXED)


def _is_size(leaf: Any) -> bool:
    return isinstance(leaf, tuple) or type(leaf) is int
