"""Weight versions of one stage: a master that the optimizer steps on, and a ring of slots that F and B use.

``F(p)`` and ``B(p)`` use the same weights, while updates of other minibatches land in between.
Autograd saves parameters by reference, so each version that a pending backward needs is a tensor of its own. A slot
that a pending backward holds is never written: that is counted here, because a write through ``.data`` or a message
that arrives in place would go unnoticed by autograd and give wrong gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hetpipe_compiler.runtime.flat import FlatTensors
from hetpipe_compiler.runtime.stage_tensors import put_tensors, value_for

if TYPE_CHECKING:
    from torch import Tensor, nn


class VersionError(AssertionError):
    """Weights that a pending backward needs were about to be overwritten, or no slot is free: a bug of the caller."""


@dataclass(eq=False)
class Slot:
    """One version of the weights.

    Attributes:
        module: An instance of the stage module whose trainable parameters are views of ``values``.
        values: The slot's own flat buffer (slot 0 of a ring of one: the master's).
        pending: Backwards that still need it.
        version: Number of the master version it holds; -1 before the first.
    """

    module: nn.Module
    values: FlatTensors
    pending: int = 0
    version: int = -1


class WeightVersions:
    """The weights of a stage.

    Args:
        make_stage: Makes an instance of the stage module; called under the meta device.
        values: Initial values by name: parameters, buffers and constants (others are ignored). Copied, except frozen
            parameters and the buffers not in ``mutated``, which are used as they are.
        slots: Length of the ring: the stage's number of minibatches in flight. With 1, the slot is the master itself.
        device: Where everything lives.
        mutated: Names of the buffers that the forward pass changes.

    Attributes:
        trainable: Names of the parameters that train, in module order.
        master: Their newest values. Write only between `begin_write` and the next `acquire`.
        parameters: The same as leaf parameters, for the optimizer.
        buffers: Buffers and constants: one tensor each, shared by all slots.
        frozen: Parameters that do not train, shared likewise.

    Raises:
        RunError: HP513 when a value is missing, or its shape or dtype is not the module's.
    """

    def __init__(
        self,
        make_stage: Callable[[], nn.Module],
        values: Mapping[str, Tensor],
        slots: int,
        device: torch.device | str,
        mutated: frozenset[str] = frozenset(),
    ) -> None:
        assert slots >= 1
        with torch.device("meta"):
            modules = [make_stage() for _ in range(slots)]
        declared = dict(modules[0].named_parameters())
        self.trainable = tuple(name for name, p in declared.items() if p.requires_grad)
        self.frozen: dict[str, Tensor] = {
            name: torch.nn.Parameter(value_for(values, name, p).to(device), requires_grad=False)
            for name, p in declared.items()
            if not p.requires_grad
        }
        self._mutated = mutated
        self.buffers: dict[str, Tensor] = {}
        for name, buffer in modules[0].named_buffers():
            value = value_for(values, name, buffer)
            self.buffers[name] = value.to(device, copy=True) if name in mutated else value.to(device)
        self.master = FlatTensors({name: declared[name] for name in self.trainable}, device)
        for name, view in self.master.views.items():
            view.copy_(value_for(values, name, declared[name]))
        self.parameters: dict[str, nn.Parameter] = {
            name: torch.nn.Parameter(view) for name, view in self.master.views.items()
        }
        self.slots = [self._make_slot(module, alone=slots == 1) for module in modules]
        self._newest: Slot | None = None
        self._version = 0

    def _make_slot(self, module: nn.Module, *, alone: bool) -> Slot:
        if alone:
            slot, parameters = Slot(module, self.master), self.parameters
        else:
            slot = Slot(module, self.master.empty_like())
            parameters = {name: torch.nn.Parameter(view) for name, view in slot.values.views.items()}
        put_tensors(module, {**self.frozen, **parameters}, self.buffers)
        return slot

    def acquire(self) -> Slot:
        """The newest weights, for one forward; `release` them after its backward.

        Copies the master into a free slot only if it changed since the newest slot was filled.

        Raises:
            VersionError: when every slot is held by a pending backward.
        """
        slot = self._newest
        if slot is None or slot.version != self._version:
            slot = next((s for s in self.slots if s.pending == 0), None)
            if slot is None:
                raise VersionError(f"all {len(self.slots)} weight versions are held by pending backwards")
            self.fill(slot)
        slot.pending += 1
        return slot

    def fill(self, slot: Slot) -> None:
        """Copy the master into ``slot``; raises `VersionError` when a pending backward holds it."""
        if slot.pending:
            raise VersionError(f"{slot.pending} pending backwards hold the weight version to be overwritten")
        if slot.values is not self.master:
            slot.values.copy_(self.master)
        slot.version = self._version
        self._newest = slot

    def release(self, slot: Slot) -> None:
        """The backward of one `acquire` is done: move the slot's gradients to the master's parameters."""
        assert slot.pending > 0, "released more often than acquired"
        slot.pending -= 1
        if slot.values is self.master:
            return
        for name, parameter in _parameters(slot, self.trainable):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            master = self.parameters[name]
            master.grad = gradient if master.grad is None else master.grad + gradient

    def mutated_buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers that the forward pass changes."""
        return {name: buffer.clone() for name, buffer in self.buffers.items() if name in self._mutated}

    def begin_write(self) -> FlatTensors:
        """Announce a change of the master and get it.

        Raises:
            VersionError: when a pending backward holds the master itself (a ring of one slot).
        """
        if self.slots[0].values is self.master and self.slots[0].pending:
            raise VersionError("a pending backward holds the master weights (a ring of one slot)")
        self._version += 1
        return self.master


def _parameters(slot: Slot, names: tuple[str, ...]) -> list[tuple[str, nn.Parameter]]:
    return [(name, slot.module.get_parameter(name)) for name in names]
