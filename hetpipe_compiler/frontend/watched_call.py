"""Watch one call of a module that is to be kept whole: what it is given, what it returns, what it writes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.ir.opaque import Slot, TensorForm, fill
from hetpipe_compiler.ir.storage import storage_of

#: Types of values that can be written into a stage's file.
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class Seen:
    """One call as it happened; see `OpaqueCall` for the fields of the same names.

    Attributes:
        arguments: The template, all numbers still in it.
        tensors: Copies of the tensors in it.
        leaves: What it returned, tensors as their `TensorForm`.
        keeps_state: Whether it changed a plain attribute of the module.
    """

    module: str
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    tensors: tuple[torch.Tensor, ...]
    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec
    state: tuple[str, ...]
    written: tuple[str, ...]
    own: tuple[torch.Tensor, ...]
    keeps_state: bool
    call: Callable[..., Any] = field(repr=False)


def watched_call(path: str, module: torch.nn.Module, seen: dict[str, Seen], inside: list[str]) -> Callable[..., Any]:
    """The module's own call, noted in ``seen`` under ``path#n``; ``inside``: the watched call that is running."""
    original: Callable[..., Any] = module._call_impl

    def watched(*args: Any, **kwargs: Any) -> Any:
        if inside:  # a kept module that another one holds is part of that one
            return original(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        template = (tuple(template_of(a, path, tensors) for a in args), template_of(kwargs, path, tensors))
        copies = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in tensors)
        own = own_tensors(module)
        versions = [t._version for t in (*tensors, *own.values())]
        values = {name: b.detach().clone() for name, b in module.named_buffers(remove_duplicate=False)}
        plain = _state_of(module)
        inside.append(path)
        try:
            out = original(*args, **kwargs)
        finally:
            inside.pop()
        written = _written(path, module, tensors, own, versions, values)
        leaves, structure = pytree.tree_flatten(out)
        _check_returned(path, module, leaves, own)
        key = f"{path}#{sum(s.module == path for s in seen.values())}"
        seen[key] = Seen(
            path, template, copies, tuple(map(_leaf, leaves)), structure,
            tuple(n for n in own if n not in written), written, tuple(own.values()),
            _state_of(module) != plain,
            lambda given: original(*fill(template[0], given, ()), **fill(template[1], given, ())),
        )  # fmt: skip
        return out

    return watched


def own_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers and plain attributes that are tensors, under all their names within the module."""
    found: dict[str, torch.Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    for path, part in module.named_modules():
        found.update({f"{path}.{n}".lstrip("."): v for n, v in vars(part).items() if isinstance(v, torch.Tensor)})
    return found


def plain_attributes(part: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Attributes that are numbers, flags, texts, tensors or None."""
    kinds = (bool, int, float, str, type(None), torch.Tensor)
    return ((n, v) for n, v in vars(part).items() if isinstance(v, kinds))


def _state_of(module: torch.nn.Module) -> list[tuple[str, str, Any]]:
    return [
        (path, name, id(value) if isinstance(value, torch.Tensor) else value)
        for path, part in module.named_modules()
        for name, value in plain_attributes(part)
    ]


def template_of(value: Any, path: str, tensors: list[torch.Tensor]) -> Any:
    """The value with a `Slot` for each tensor, which go to ``tensors``. Raises `WorkloadError` HP124."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return Slot("tensor", len(tensors) - 1)
    if type(value) in (tuple, list):
        return type(value)(template_of(part, path, tensors) for part in value)
    if type(value) is dict and all(isinstance(key, PLAIN) for key in value):
        return {key: template_of(part, path, tensors) for key, part in value.items()}
    if type(value) in PLAIN:
        return value
    if isinstance(value, (torch.SymBool, torch.SymFloat)):
        what = "is called with a number or a flag that depends on the batch's values"
        raise cannot_keep(path, what, "keep the module whole that computes it, and calls this one")
    raise cannot_keep(
        path,
        f"is called with a {type(value).__name__}",
        "call it with tensors, plain values, and tuples, lists and dicts of them",
    )


def _written(
    path: str,
    module: torch.nn.Module,
    tensors: Sequence[torch.Tensor],
    own: dict[str, torch.Tensor],
    versions: Sequence[int],
    values: dict[str, torch.Tensor],
) -> tuple[str, ...]:
    """Names of the buffers that a call has written or replaced; they hold the new values afterwards.

    ``values``: those of the buffers before. Versions alone do not tell: batch norm updates its statistics without one.
    """
    if any(t._version != v for t, v in zip(tensors, versions, strict=False)):
        raise cannot_keep(path, "writes into its arguments", "have it work on a copy (x = x.clone())", module)
    buffers = dict(module.named_buffers(remove_duplicate=False))
    names = []
    now = own_tensors(module)
    for (name, tensor), version in zip(own.items(), versions[len(tensors) :], strict=True):
        same = name not in values or _same_bits(tensor, values[name])
        if tensor._version == version and now.get(name) is tensor and same:
            continue
        new = buffers.get(name)
        if new is None:
            what = f"writes into '{name}', which is no buffer"
            raise cannot_keep(path, what, "make it one (register_buffer); parameters are the optimizer's", module)
        if new.shape != tensor.shape or new.dtype != tensor.dtype:
            what = f"puts another kind of tensor in the place of buffer '{name}'"
            raise cannot_keep(path, what, "keep its shape and dtype", module)
        names.append(name)
        if new is not tensor:
            owner, _, leaf = name.rpartition(".")
            with torch.no_grad():
                module.get_submodule(owner)._buffers[leaf] = tensor.copy_(new)
    return tuple(names)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout != torch.strided:
        return True
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def _check_returned(path: str, module: torch.nn.Module, leaves: Sequence[Any], own: dict[str, torch.Tensor]) -> None:
    memory = {storage_of(t): name for name, t in own.items()}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            name = memory.get(storage_of(leaf))
            if name is not None and leaf.numel():
                raise cannot_keep(path, f"returns its own '{name}' or a view of it", "return a clone of it", module)
            if leaf.layout != torch.strided:
                raise cannot_keep(path, f"returns a {leaf.layout} tensor", "return a dense one", module)
        elif type(leaf) not in PLAIN:
            raise cannot_keep(
                path, f"returns a {type(leaf).__name__}", "return tensors, in tuples, lists or dicts", module
            )


def _leaf(leaf: Any) -> Any:
    """What is remembered of a returned leaf."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    strides = leaf.stride()
    order = tuple(sorted(range(leaf.dim()), key=lambda at: (-strides[at], at)))
    return TensorForm(leaf.dtype, tuple(leaf.shape), order)


def cannot_keep(path: str, what: str, hint: str, module: torch.nn.Module | None = None) -> WorkloadError:
    """HP124, at the line of the module's ``forward``."""
    return WorkloadError("HP124", f"the module cannot be kept whole: it {what}", where=_place(path, module), hint=hint)


def _place(path: str, module: torch.nn.Module | None) -> str:
    """``--opaque solver (model.py:12)``."""
    try:
        forward: Any = type(module).forward  # type: ignore[union-attr]
        file, line = inspect.getsourcefile(forward), inspect.getsourcelines(forward)[1]
    except (OSError, TypeError, AttributeError):
        return f"--opaque {path}"
    return f"--opaque {path} ({Path(file or '').name}:{line})"
