"""Adds the messages between stages to the programs of one virtual worker.

Sends just after their producer and receives just before their consumer are best for speed, but alone they deadlock
when two stages both send first. So one global order of all computations and messages is made, and each stage's program
is its projection onto that stage: then even blocking sends cannot wait in a circle.

The order comes from running the programs with blocking sends:

1. A send follows its producer at once.
2. A receiver takes a message only when its next computation needs it: as late as possible, so that no ready computation
   waits for a message that it does not need.
3. When every stage is stuck, one waiting message is taken early by its receiver: the one for which the receiver waits
   the shortest in predicted time; among equals, whose flight has the earliest middle. (Of two messages in opposite
   directions that is the choice which delays the other less. Taking the earliest sent, or the earliest to arrive, made
   random pipelines slower.)
4. A pull of wave x comes after the pushes of wave x of all stages of the virtual worker. As this holds in all of them,
   waiting for one another's waves cannot close a circle either.

The order is made lazily, and by every stage's process alike: it depends on nothing but the arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hetpipe_compiler.errors import ArtifactError
from hetpipe_compiler.ir.schedule import MESSAGE_OPS, Instruction, Op, StageProgram
from hetpipe_compiler.passes.simulate.costs import PipelineCosts

_RECEIVE = {Op.SEND_ACTIVATIONS: Op.RECEIVE_ACTIVATIONS, Op.SEND_GRADIENTS: Op.RECEIVE_GRADIENTS}


def stage_instructions(
    programs: Sequence[StageProgram], costs: PipelineCosts, minibatches: int, stage: int
) -> Iterator[Instruction]:
    """The complete program of one stage, messages included, for a run of ``minibatches``."""
    return (instruction for s, instruction in global_order(programs, costs, minibatches) if s == stage)


def buffered_instructions(
    programs: Sequence[StageProgram], costs: PipelineCosts, minibatches: int, stage: int
) -> Iterator[Instruction]:
    """The same program for a transport whose sends return at once: each send straight after what makes its values, each
    receive right before what reads them.

    No stage then waits to hand something over, and none can deadlock: a receive waits only for a computation that comes
    earlier in `global_order`. Per pair of stages and kind the messages keep their order.
    """
    sends = {
        Op.FORWARD: [(Op.SEND_ACTIVATIONS, int(j)) for j in np.flatnonzero(~np.isnan(costs.activation_ms[stage]))],
        Op.BACKWARD: [(Op.SEND_GRADIENTS, int(j)) for j in np.flatnonzero(~np.isnan(costs.gradient_ms[stage]))],
    }
    consumer = {Op.RECEIVE_ACTIVATIONS: Op.FORWARD, Op.RECEIVE_GRADIENTS: Op.BACKWARD}
    held: dict[tuple[Op, int], list[Instruction]] = {}
    for instruction in stage_instructions(programs, costs, minibatches, stage):
        if instruction.op in consumer:
            held.setdefault((consumer[instruction.op], instruction.index), []).append(instruction)
        elif instruction.op not in MESSAGE_OPS:
            yield from held.pop((instruction.op, instruction.index), ())
            yield instruction
            yield from (Instruction(op, instruction.index, peer) for op, peer in sends.get(instruction.op, ()))


def communicated_programs(
    programs: Sequence[StageProgram], costs: PipelineCosts, minibatches: int
) -> list[list[Instruction]]:
    """The complete programs of all stages."""
    complete: list[list[Instruction]] = [[] for _ in programs]
    for s, instruction in global_order(programs, costs, minibatches):
        complete[s].append(instruction)
    return complete


def global_order(
    programs: Sequence[StageProgram], costs: PipelineCosts, minibatches: int
) -> Iterator[tuple[int, Instruction]]:
    """All instructions of a virtual worker as (stage, instruction), each send followed by its receive.

    Args:
        programs: Of its stages.
        costs: Which stages exchange messages, and the predicted times: they only help to choose a good order.
        minibatches: Length of the run.

    Raises:
        ArtifactError: when the programs wait for each other in a circle whatever the order of the messages: HP437
            where a pull is part of it, else HP436.
    """
    return _Placement(programs, costs, minibatches).run()


@dataclass(slots=True)
class _Message:
    """A sent message that its receiver has not taken yet."""

    sender: int
    receiver: int
    op: Op  # of the send
    minibatch: int
    ready_ms: float
    arrival_ms: float


@dataclass(slots=True)
class _Stage:
    """Where a stage is: its next computation, what it has received, and the sends that block it."""

    program: Iterator[Instruction]
    next: Instruction | None = None
    free_ms: float = 0.0
    pushed: int = 0
    inbox: dict[tuple[Op, int], dict[int, float]] = field(
        default_factory=dict
    )  # (send op, minibatch) -> sender -> arrival
    outbox: list[_Message] = field(default_factory=list)


class _Placement:
    def __init__(self, programs: Sequence[StageProgram], costs: PipelineCosts, minibatches: int) -> None:
        k = len(programs)
        assert len(costs) == k
        self.stages = [_Stage(program.unroll(minibatches)) for program in programs]
        for stage in self.stages:
            stage.next = next(stage.program, None)
        self.ms = {Op.FORWARD: costs.forward_ms.tolist(), Op.BACKWARD: costs.backward_ms.tolist()}
        self.message_ms = {
            Op.SEND_ACTIVATIONS: costs.activation_ms.tolist(),
            Op.SEND_GRADIENTS: costs.gradient_ms.tolist(),
        }
        # The nearest stage needs its message first.
        self.peers = {
            op: [sorted((j for j in range(k) if not math.isnan(ms[s][j])), key=lambda j: abs(j - s)) for s in range(k)]
            for op, ms in self.message_ms.items()
        }
        self.sources = {
            op: [[i for i in range(k) if not math.isnan(ms[i][s])] for s in range(k)]
            for op, ms in self.message_ms.items()
        }

    def run(self) -> Iterator[tuple[int, Instruction]]:
        while True:
            progress = False
            for s in range(len(self.stages)):
                for step in self.advance(s):
                    progress = True
                    yield step
            if progress:
                continue
            if all(stage.next is None and not stage.outbox for stage in self.stages):
                return
            yield from self.take_early()

    def advance(self, s: int) -> Iterator[tuple[int, Instruction]]:
        """Run stage s until it must wait."""
        stage = self.stages[s]
        while stage.next is not None and not stage.outbox:
            instruction = stage.next
            if instruction.op is Op.FORWARD:
                yield from self.take_needed(s, Op.SEND_ACTIVATIONS, instruction.index)
                if not self.compute(s, instruction, Op.SEND_ACTIVATIONS):
                    return
            elif instruction.op is Op.BACKWARD:
                yield from self.take_needed(s, Op.SEND_GRADIENTS, instruction.index)
                if not self.compute(s, instruction, Op.SEND_GRADIENTS):
                    return
            elif instruction.op is Op.PULL:
                if any(other.pushed <= instruction.index for other in self.stages):
                    return
            elif instruction.op is Op.PUSH:
                stage.pushed = max(stage.pushed, instruction.index + 1)
            yield s, instruction
            stage.next = next(stage.program, None)

    def take_needed(self, s: int, op: Op, minibatch: int) -> Iterator[tuple[int, Instruction]]:
        """Receive what the next computation of stage s needs and is waiting at its sender."""
        for source in self.sources[op][s]:
            for message in self.stages[source].outbox:
                if message.receiver == s and message.op is op and message.minibatch == minibatch:
                    yield from self.transfer(message)
                    break

    def compute(self, s: int, instruction: Instruction, op: Op) -> bool:
        """Run a forward or backward if its messages are there; its own messages go to the outbox."""
        stage = self.stages[s]
        key = (op, instruction.index)
        arrived = stage.inbox.get(key, {})
        if len(arrived) < len(self.sources[op][s]):
            return False
        start_ms = max([stage.free_ms, *arrived.values()])
        stage.inbox.pop(key, None)
        stage.free_ms = start_ms + self.ms[instruction.op][s]
        for peer in self.peers[op][s]:
            arrival_ms = stage.free_ms + self.message_ms[op][s][peer]
            stage.outbox.append(_Message(s, peer, op, instruction.index, stage.free_ms, arrival_ms))
        return True

    def take_early(self) -> Iterator[tuple[int, Instruction]]:
        waiting = [message for stage in self.stages for message in stage.outbox]
        if not waiting:
            raise self.deadlock()
        message = min(waiting, key=self.cost)
        yield from self.transfer(message)
        receiver = self.stages[message.receiver]
        receiver.free_ms = max(receiver.free_ms, message.arrival_ms)
        for held_up in receiver.outbox:
            flight_ms = held_up.arrival_ms - held_up.ready_ms
            held_up.ready_ms = max(held_up.ready_ms, receiver.free_ms)
            held_up.arrival_ms = held_up.ready_ms + flight_ms

    def cost(self, message: _Message) -> tuple[float, float, int, int]:
        wait_ms = max(0.0, message.arrival_ms - self.stages[message.receiver].free_ms)
        return wait_ms, message.ready_ms + message.arrival_ms, message.sender, message.receiver

    def transfer(self, message: _Message) -> Iterator[tuple[int, Instruction]]:
        self.stages[message.sender].outbox.remove(message)
        receiver = self.stages[message.receiver]
        receiver.inbox.setdefault((message.op, message.minibatch), {})[message.sender] = message.arrival_ms
        yield message.sender, Instruction(message.op, message.minibatch, message.receiver)
        yield message.receiver, Instruction(_RECEIVE[message.op], message.minibatch, message.sender)

    def deadlock(self) -> ArtifactError:
        stuck = {s: stage.next for s, stage in enumerate(self.stages) if stage.next is not None}
        pulls = {s: instruction.index for s, instruction in stuck.items() if instruction.op is Op.PULL}
        if pulls:
            s, wave = min(pulls.items(), key=lambda item: item[1])
            late = [str(t) for t, stage in enumerate(self.stages) if stage.pushed <= wave]
            pushers = f"{'stage' if len(late) == 1 else 'stages'} {', '.join(late)}"
            return ArtifactError(
                "HP437",
                f"stage {s} waits at v{wave} for ever: wave {wave} is pushed only after it, by {pushers}",
                where="schedule.csv",
                hint=f"put ^{wave} before v{wave}, or pull an earlier wave",
            )
        return ArtifactError(
            "HP436",
            "the stages wait for each other for ever: "
            + "; ".join(f"stage {s} before {instruction}" for s, instruction in stuck.items()),
            where="schedule.csv",
            hint="earlier stages run F(p) before later ones do, later stages run B(p) before earlier ones",
        )
