"""One stage of one virtual worker: what each instruction of its program does. Knows no transport.

The interpreter and the distributed worker drive the same engine, through the interfaces of `channels`, so both train
the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hetpipe_compiler.ir.schedule import Instruction, Op
from hetpipe_compiler.ir.stage_file import load_stage_class
from hetpipe_compiler.runtime.batch_form import batch_dimension
from hetpipe_compiler.runtime.channels import Mailbox, MessageKind, ParameterLink
from hetpipe_compiler.runtime.optimizers import optimizer_and_scheduler, stepping
from hetpipe_compiler.runtime.randomness import minibatch_seed, seed_torch
from hetpipe_compiler.runtime.recompute import buffers_replaced, kept_inputs, nothing_saved, random_state_kept
from hetpipe_compiler.runtime.stage_error import backward_error, calling_stage
from hetpipe_compiler.runtime.weights import Slot, WeightVersions
from hetpipe_compiler.runtime.wsp.client import LocalUpdates, need_after_push, required_clock, wave_of

if TYPE_CHECKING:
    from torch import Tensor

    from hetpipe_compiler.frontend.load import LoadedWorkload
    from hetpipe_compiler.ir.plan import Plan, Port


@dataclass
class _Flight:
    """A minibatch between its first message and its last on this stage.

    Attributes:
        received: Input name -> value, as it arrives.
        inputs: What F gave the module, by name; those with `requires_grad` get their gradient from B.
        outputs: What F returned, by name; dropped by B, or where B recomputes them once all are sent (``unsent``).
        buffers: Where B recomputes: what the buffers that F changes held before it.
        gradients: Output name -> consumer stage -> gradient or None.
    """

    received: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, dict[int, Tensor | None]] = field(default_factory=dict)
    slot: Slot | None = None
    gradients_to_send: set[int] = field(default_factory=set)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    unsent: set[int] = field(default_factory=set)


class StageEngine:
    """Executes instructions of one stage, in the order they are given.

    Args:
        plan: The plan, and ``folder`` where its stage modules are.
        vw: Virtual worker; ``stage``: index in it.
        mailbox: Messages to and from the other stages of this virtual worker.
        link: The parameter servers.
        weights: Initial values by the model's names, at least this stage's parameters and buffers.
        constants: Values of ``plan.constants``, at least this stage's.
        batches: For stage 0: minibatch -> the leaves of its batch; else None.
        seed: The run's seed.
        device: Where to compute.
        reproducible: Pulled weights are used at a pull instruction only, and exactly those asked for.
        on_event: Gets ``{"event": "forward", "vw", "stage", "minibatch", "wave", "own", "clock", "need"}`` before each
            F: ``own`` is the last minibatch whose update the weights hold, ``clock`` that of the pulled weights in
            them, ``need`` the smallest that the start rule allows.

    Attributes:
        losses: Minibatch -> loss (last stage only), from its U on.
        samples: Samples that the forwards so far have seen: exact on every stage that has an input whose shape names
            the batch dimension; on others ``plan.batch_size`` a minibatch.
        optimizer, scheduler: None when nothing trains here.

    Raises:
        ArtifactError: HP415 a stage module cannot be loaded. RunError: HP513 a value is missing or has another shape;
        HP518 optimizer or scheduler cannot be made. `execute`: HP518 optimizer or scheduler raise in a step;
        HP519 the stage module raises; HP521 its backward does.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        vw: int,
        stage: int,
        *,
        workload: LoadedWorkload,
        mailbox: Mailbox,
        link: ParameterLink,
        weights: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        batches: Callable[[int], list[Any]] | None,
        seed: int,
        device: torch.device | str,
        reproducible: bool,
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        worker = plan.virtual_workers[vw]
        self.vw, self.index = vw, stage
        self._plan, self._stage, self._folder = plan, worker.stages[stage], folder
        self._inputs = {port.name: port for port in self._stage.inputs}
        self._is_last = stage == len(worker.stages) - 1
        self._workload = workload
        self._mailbox, self._link, self._batches = mailbox, link, batches
        self._seed, self._device, self._reproducible = seed, torch.device(device), reproducible
        self._on_event = on_event
        mutated = {b.name for b in plan.buffers if b.mutated}
        self._mutated = tuple(name for name in self._stage.buffers if name in mutated)
        self.weights = WeightVersions(
            load_stage_class(folder, self._stage.module),
            {**constants, **weights},
            self._stage.in_flight,
            self._device,
            frozenset(self._mutated),
        )
        self.local = LocalUpdates(self.weights, plan.nm)
        self.optimizer, self.scheduler = optimizer_and_scheduler(workload, self.weights.parameters)
        self._batch_dimension = batch_dimension(worker.stages[0].inputs, self._stage.inputs)
        self._flights: dict[int, _Flight] = {}
        self._last_update = 0
        self.samples = 0
        self.losses: dict[int, float] = {}
        self._pending_losses: dict[int, Tensor] = {}
        self._actions: dict[Op, Callable[[Instruction], None]] = {
            Op.FORWARD: lambda i: self._forward(i.index),
            Op.BACKWARD: lambda i: self._backward(i.index),
            Op.UPDATE: lambda i: self._update(i.index),
            Op.PUSH: lambda i: self._push(i.index),
            Op.PULL: lambda i: self._pull(i.index),
            Op.SEND_ACTIVATIONS: lambda i: self._send_activations(i.index, _peer(i)),
            Op.RECEIVE_ACTIVATIONS: lambda i: self._receive_activations(i.index, _peer(i)),
            Op.SEND_GRADIENTS: lambda i: self._send_gradients(i.index, _peer(i)),
            Op.RECEIVE_GRADIENTS: lambda i: self._receive_gradients(i.index, _peer(i)),
        }

    def execute(self, instruction: Instruction) -> None:
        """Carry out one instruction; returns when its results exist (on a GPU: are queued)."""
        self._actions[instruction.op](instruction)

    def finish(self) -> None:
        """After the last instruction: report the buffers and say that no more pushes come."""
        assert not self._flights, f"minibatches {sorted(self._flights)} are unfinished"
        self._report_buffers()
        self._link.finish()

    @property
    def sends_weights(self) -> bool:
        """Whether anything trains here, that is, whether pushes and pulls carry anything."""
        return bool(self.weights.trainable)

    # --- messages ------------------------------------------------------------------------------------------------

    def _send_activations(self, minibatch: int, peer: int) -> None:
        flight = self._flights[minibatch]
        values = {name: _to_send(flight.outputs[name]) for name in self._stage.sends[peer]}
        self._mailbox.send(MessageKind.ACTIVATIONS, minibatch, peer, values)
        flight.unsent.discard(peer)
        self._drop_outputs_if_sent(flight)

    def _receive_activations(self, minibatch: int, peer: int) -> None:
        names = tuple(port.name for port in self._stage.inputs if port.source == peer)
        values = self._mailbox.receive(MessageKind.ACTIVATIONS, minibatch, peer, names)
        self._flights.setdefault(minibatch, _Flight()).received.update(values)

    def _send_gradients(self, minibatch: int, peer: int) -> None:
        flight = self._flights[minibatch]
        names = gradient_names(self._stage.inputs, peer)
        gradients = {n: _to_send(flight.inputs[n].grad) for n in names}
        self._mailbox.send(MessageKind.GRADIENTS, minibatch, peer, gradients)
        flight.gradients_to_send.discard(peer)
        self._drop_if_done(minibatch)

    def _receive_gradients(self, minibatch: int, peer: int) -> None:
        names = gradient_names(self._plan.virtual_workers[self.vw].stages[peer].inputs, self.index)
        values = self._mailbox.receive(MessageKind.GRADIENTS, minibatch, peer, names)
        for name, gradient in values.items():
            self._flights[minibatch].gradients.setdefault(name, {})[peer] = gradient

    # --- computation ---------------------------------------------------------------------------------------------

    def _forward(self, minibatch: int) -> None:
        if self.sends_weights and not self._reproducible:
            self.local.apply(self._link.poll())
        flight = self._flights.setdefault(minibatch, _Flight())
        if self.index == 0:
            assert self._batches is not None, "stage 0 needs batches"
            leaves = self._batches(minibatch)
            flight.received = {p.name: leaves[p.batch_leaf] for p in self._stage.inputs if p.batch_leaf is not None}
        flight.inputs = {p.name: self._as_input(p, flight.received.pop(p.name)) for p in self._stage.inputs}
        self.samples += self._batch_size(flight.inputs)
        self._report_forward(minibatch)
        flight.slot = self.weights.acquire()
        if self._stage.recompute:
            self._run_keeping_inputs(minibatch, flight)
        else:
            flight.outputs = self._run(minibatch, flight.slot, flight.inputs)
        if self._is_last and self._plan.loss in flight.outputs:
            self._pending_losses[minibatch] = flight.outputs[self._plan.loss].detach()
        self._drop_outputs_if_sent(flight)

    def _run(self, minibatch: int, slot: Slot, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The module's outputs by name; the same whenever it is called with the same inputs, weights and buffers."""
        seed_torch(minibatch_seed(self._seed, self.vw, minibatch, self.index))
        with calling_stage(self._folder, self._stage):
            values = slot.module(*inputs.values())
        assert len(values) == len(self._stage.outputs), "the stage module returns other values than the plan says"
        return {port.name: value for port, value in zip(self._stage.outputs, values, strict=True)}

    def _run_keeping_inputs(self, minibatch: int, flight: _Flight) -> None:
        """F of a stage that recomputes: see `hetpipe_compiler.runtime.recompute`."""
        assert flight.slot is not None
        flight.buffers = self.weights.mutated_buffers()
        given, flight.inputs = flight.inputs, kept_inputs(flight.inputs, self._stage.inputs)
        with nothing_saved():
            outputs = self._run(minibatch, flight.slot, given)
        flight.outputs = {n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in outputs.items()}
        flight.unsent = set(self._stage.sends)

    def _run_again(self, minibatch: int, flight: _Flight) -> None:
        """The forward once more, before its backward."""
        assert flight.slot is not None
        with random_state_kept(self._device), buffers_replaced(flight.slot.module, flight.buffers):
            flight.outputs = self._run(minibatch, flight.slot, flight.inputs)
        flight.buffers = {}

    def _backward(self, minibatch: int) -> None:
        """Gradients of a value that several stages use are summed from the last stage to the first.

        That is the order in which autograd meets them when the model is not cut, so the sum has the same bits.
        """
        flight = self._flights[minibatch]
        assert flight.slot is not None, f"B{minibatch} before F{minibatch}"
        if self._stage.recompute:
            self._run_again(minibatch, flight)
        gradients: dict[str, Tensor | None] = {}
        for name, value in flight.outputs.items():
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                continue
            if self._is_last and name == self._plan.loss:
                gradients[name] = None
                continue
            total = _sum(g for _, g in sorted(flight.gradients.get(name, {}).items(), reverse=True))
            if total is not None:
                gradients[name] = total
        try:
            _backward(flight.outputs, gradients)
        except Exception as error:
            again = partial(self._train_again, minibatch, flight, gradients)
            raise backward_error(error, self._folder, self._stage, minibatch, again) from error
        self.weights.release(flight.slot)
        flight.slot = None
        flight.outputs, flight.gradients = {}, {}
        flight.inputs = {n: v for n, v in flight.inputs.items() if self._inputs[n].requires_grad}
        flight.gradients_to_send = {self._inputs[n].source for n in flight.inputs}
        self._drop_if_done(minibatch)

    def _train_again(self, minibatch: int, flight: _Flight, gradients: Mapping[str, Tensor | None]) -> None:
        """F and B once more, to see where B fails; buffers stay as they are."""
        assert flight.slot is not None
        flight.outputs = {}
        inputs = {n: self._as_input(self._inputs[n], v) for n, v in flight.inputs.items()}
        with random_state_kept(self._device), buffers_replaced(flight.slot.module, self.weights.mutated_buffers()):
            _backward(self._run(minibatch, flight.slot, inputs), gradients)

    def _update(self, minibatch: int) -> None:
        if self.optimizer is not None:
            self.local.begin_step()
            with stepping(self._workload, "optimizer"):
                self.optimizer.step()
            for parameter in self.weights.parameters.values():  # also those that the user's optimizer leaves out
                parameter.grad = None
            if self.scheduler is not None:
                with stepping(self._workload, "scheduler"):
                    self.scheduler.step()
            self.local.end_step(minibatch)
        self._last_update = minibatch
        if minibatch in self._pending_losses:
            self.losses[minibatch] = float(self._pending_losses.pop(minibatch))

    # --- parameter servers ---------------------------------------------------------------------------------------

    def _push(self, wave: int) -> None:
        if self.sends_weights:
            self._link.push(wave, self.local.updates(wave), need_after_push(wave, self._plan.staleness))
        self._report_buffers()

    def _pull(self, wave: int) -> None:
        if not self.sends_weights or self.local.oldest_clock > wave:
            return
        replies = self._link.wait(wave + 1)
        if self._reproducible:
            assert all(reply.clock == wave + 1 for reply in replies), "reproducible: pulled weights of another clock"
        self.local.apply(replies)
        assert self.local.oldest_clock > wave, "waited for weights, but got older ones"

    def _report_buffers(self) -> None:
        if self._mutated:
            values = {name: self.weights.buffers[name].detach().clone() for name in self._mutated}
            self._link.buffers(values, self.samples)

    # --- small things --------------------------------------------------------------------------------------------

    def _as_input(self, port: Port, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        value = value.detach().to(self._device, non_blocking=True)
        return value.requires_grad_(True) if port.requires_grad and value.is_floating_point() else value

    def _batch_size(self, inputs: Mapping[str, Any]) -> int:
        if self._batch_dimension is None:
            return self._plan.batch_size
        name, dimension = self._batch_dimension
        return int(inputs[name].shape[dimension])

    def _drop_outputs_if_sent(self, flight: _Flight) -> None:
        if self._stage.recompute and not flight.unsent:
            flight.outputs = {}

    def _drop_if_done(self, minibatch: int) -> None:
        if not self._flights[minibatch].gradients_to_send:
            del self._flights[minibatch]

    def _report_forward(self, minibatch: int) -> None:
        if self._on_event is None:
            return
        need = required_clock(minibatch, self._plan.nm, self._plan.staleness) if self.sends_weights else 0
        self._on_event(
            {
                "event": "forward",
                "vw": self.vw,
                "stage": self.index,
                "minibatch": minibatch,
                "wave": wave_of(minibatch, self._plan.nm),
                "own": self._last_update,
                "clock": self.local.oldest_clock,
                "need": need,
            }
        )


def gradient_names(inputs: Iterable[Port], source: int) -> tuple[str, ...]:
    """What goes back to ``source`` from a stage with these inputs, in order."""
    return tuple(port.name for port in inputs if port.source == source and port.requires_grad)


def _backward(outputs: Mapping[str, Any], gradients: Mapping[str, Tensor | None]) -> None:
    if gradients:
        torch.autograd.backward([outputs[name] for name in gradients], list(gradients.values()))


def _peer(instruction: Instruction) -> int:
    assert instruction.peer is not None
    return instruction.peer


def _to_send(value: Any) -> Any:
    # Contiguous here, not in the transport, so that receivers see the same strides whatever the transport is.
    return value.detach().contiguous() if isinstance(value, torch.Tensor) else value


def _sum(gradients: Iterable[Tensor | None]) -> Tensor | None:
    total: Tensor | None = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total
