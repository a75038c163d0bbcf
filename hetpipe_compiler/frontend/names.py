"""What the model's tensors are called, whatever export calls them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.training_step import TrainingStep
from hetpipe_compiler.ir.plan import Tensor
from hetpipe_compiler.ir.storage import storage_of

#: Prefixes that `TrainingStep` adds to the names of the model's and the loss's tensors.
_MODEL, _LOSS = "model.", "loss."


class Names:
    """Names of parameters, buffers and constants as the user's model has them.

    Args:
        step: What is captured.
        loss: The user's own loss, which may hold values that the captured copy has lost on meta.
        where: The user's file, for errors.

    Raises:
        WorkloadError: HP116, two parameters share memory without being the same.
    """

    def __init__(self, step: TrainingStep, loss: Any, where: str) -> None:
        self.meta: dict[str, torch.Tensor] = {}
        self.constant_values: dict[str, torch.Tensor] = {}
        self._first: dict[str, str] = {}
        self._constants: dict[str, Tensor] = {}
        self._loss = loss if isinstance(loss, torch.nn.Module) else None
        model = step.model
        _refuse_overlaps(model, where)
        self._where = where
        self._own = {id(t): n for n, t in (*model.named_parameters(), *model.named_buffers())}
        self._memory = {storage_of(t): n for n, t in (*model.named_buffers(), *model.named_parameters()) if t.numel()}
        self.parameters = self._collect(model.named_parameters(remove_duplicate=False), set())
        transient = {
            f"{prefix}.{name}".lstrip(".")
            for prefix, module in model.named_modules(remove_duplicate=False)
            for name in module._non_persistent_buffers_set
        }
        self.buffers = self._collect(model.named_buffers(remove_duplicate=False), transient)

    def _collect(self, named: Iterable[tuple[str, torch.Tensor]], transient: set[str]) -> tuple[Tensor, ...]:
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
            persistent = any(name not in transient for name in names)
            entries.append(describe(names[0], value, aliases=tuple(names[1:]), persistent=persistent))
        return tuple(entries)

    @property
    def constants(self) -> tuple[Tensor, ...]:
        """Tensors that are no part of the model's state, as far as `of` has met them."""
        return tuple(self._constants.values())

    def of(self, target: str, value: torch.Tensor) -> str:
        """The name of what a ``get_attr`` node reads; what is not the model's own becomes a constant."""
        if target.startswith(_MODEL) and target[len(_MODEL) :] in self._first:
            return self._first[target[len(_MODEL) :]]
        if not isinstance(value, torch.Tensor):
            raise WorkloadError(
                "HP112",
                f"forward reads a {type(value).__name__} of its own, which a stage module cannot hold",
                where=self._where,
                hint="let random operators draw from torch's own generator",
            )
        if id(value) in self._own:  # reached by another way than its name, such as through a list
            return self._own[id(value)]
        if value.numel() and storage_of(value) in self._memory:
            raise WorkloadError(
                "HP116",
                f"forward reads the memory of '{self._memory[storage_of(value)]}' through another tensor, '{target}'",
                where=self._where,
                hint="read the parameter or buffer itself, and slice it in forward",
            )
        name = "constant_" + re.sub(r"\W", "_", target.removeprefix(_MODEL))
        while name in self._first:  # the model has such a name itself
            name += "_"
        if name not in self._constants:
            if self._loss is not None and target.startswith(_LOSS):
                value = attribute(self._loss, target[len(_LOSS) :])
            self._constants[name] = describe(name, value.detach(), persistent=False)
            self.constant_values[name] = value.detach()
            self.meta[name] = torch.empty_like(value, device="meta", requires_grad=False)
        return name


def _refuse_overlaps(model: torch.nn.Module, where: str) -> None:
    """A parameter and another tensor on one storage would be one number in the model and two in the stages. (Buffers
    that share memory may be read; see `passes.normalize` for writes.)"""
    seen: dict[int, tuple[str, torch.Tensor]] = {}
    parameters = dict(model.named_parameters())
    for name, value in (*parameters.items(), *model.named_buffers()):
        if not value.numel():
            continue
        first, other = seen.setdefault(storage_of(value), (name, value))
        if other is not value and first in parameters:
            kind = "parameter" if name in parameters else "buffer"
            raise WorkloadError(
                "HP116",
                f"parameter '{first}' and {kind} '{name}' share memory but are two tensors",
                where=where,
                hint="assign the same Parameter to both, or slice it in forward",
            )


def attribute(root: Any, target: str) -> Any:
    """The value at a dotted path."""
    value = root
    for part in target.split("."):
        value = getattr(value, part)
    return value


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
