"""Plays complete programs of all virtual workers in predicted time: the timeline, bubbles, and waiting for waves.

A stage computes in program order. Its sends leave at once and travel beside the computations, a receive waits for the
arrival. A push travels beside them too; weights that hold wave x of everybody reach a stage ``pull_ms`` after the last
push of wave x that it depends on, and only a pull in the program waits for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from hetpipe_compiler.ir.plan import VirtualWorker
from hetpipe_compiler.ir.schedule import Instruction, Op, Schedule
from hetpipe_compiler.passes.place_communication import communicated_programs
from hetpipe_compiler.passes.simulate.costs import PipelineCosts

StageKey = tuple[int, int]
"""(virtual worker, stage)."""

EventKind = Literal["F", "B", "wait", "a>", "g>", "^"]

_SENDS = {Op.RECEIVE_ACTIVATIONS: Op.SEND_ACTIVATIONS, Op.RECEIVE_GRADIENTS: Op.SEND_GRADIENTS}


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """Something that takes time.

    Attributes:
        vw, stage: Where; for a message, its sender.
        op: ``F``, ``B`` and ``wait`` fill the stage's own time and never overlap. ``a>``, ``g>`` (messages on their
            way) and ``^`` (a push on its way) run beside them.
        index: The minibatch; for ``^`` and for waiting at a pull, the wave.
        start_ms, end_ms: From the start of the run.
        instruction: What the program says: for a wait, the receive or pull that waits.
    """

    vw: int
    stage: int
    op: EventKind
    index: int
    start_ms: float
    end_ms: float
    instruction: Instruction


def same_parameters(workers: Sequence[VirtualWorker]) -> dict[StageKey, frozenset[StageKey]]:
    """For each stage, the stages of all virtual workers that hold any of its parameters (itself included)."""
    held = {(w.index, stage.index): frozenset(stage.parameters) for w in workers for stage in w.stages}
    return {key: frozenset(other for other in held if held[other] & held[key]) for key in held}


def simulate_run(
    costs: Sequence[PipelineCosts],
    schedule: Schedule,
    minibatches: int,
    push_ms: Sequence[Sequence[float]],
    pull_ms: Sequence[Sequence[float]],
    shares: dict[StageKey, frozenset[StageKey]] | None = None,
) -> list[TimelineEvent]:
    """The events of a run of ``minibatches`` per virtual worker, by start time.

    Args:
        costs: Per virtual worker.
        schedule: Must be valid (`hetpipe_compiler.passes.verify`).
        push_ms, pull_ms: ``[virtual worker][stage]``: time of a push to reach the servers; of new weights to come back.
        shares: What `same_parameters` returns; by default a pull waits for every stage of every virtual worker.
    """
    programs = [
        communicated_programs(stages, c, minibatches) for stages, c in zip(schedule.programs, costs, strict=True)
    ]
    return _Run(costs, programs, push_ms, pull_ms, shares).play()


class _Run:
    def __init__(
        self,
        costs: Sequence[PipelineCosts],
        programs: Sequence[Sequence[Sequence[Instruction]]],
        push_ms: Sequence[Sequence[float]],
        pull_ms: Sequence[Sequence[float]],
        shares: dict[StageKey, frozenset[StageKey]] | None,
    ) -> None:
        self.costs, self.programs, self.push_ms, self.pull_ms = costs, programs, push_ms, pull_ms
        self.keys = [(n, s) for n, stages in enumerate(programs) for s in range(len(stages))]
        everybody = frozenset(self.keys)
        self.shares = shares or dict.fromkeys(self.keys, everybody)
        self.now = dict.fromkeys(self.keys, 0.0)
        self.arrival: dict[tuple[int, Op, int, int, int], float] = {}  # vw, send op, minibatch, sender, receiver
        self.pushed: dict[tuple[StageKey, int], float] = {}
        self.events: list[TimelineEvent] = []

    def play(self) -> list[TimelineEvent]:
        at = dict.fromkeys(self.keys, 0)
        progress = True
        while progress:
            progress = False
            for key in self.keys:
                program = self.programs[key[0]][key[1]]
                while at[key] < len(program) and self.step(key, program[at[key]]):
                    at[key] += 1
                    progress = True
        assert all(at[n, s] == len(self.programs[n][s]) for n, s in self.keys), "the schedule was not verified"
        return sorted(self.events, key=lambda e: (e.start_ms, e.vw, e.stage, e.end_ms))

    def step(self, key: StageKey, instruction: Instruction) -> bool:
        """Run one instruction; False while it is not known yet when it can run."""
        n, s = key
        op, index, peer = instruction.op, instruction.index, instruction.peer
        costs, now = self.costs[n], self.now[key]
        if op is Op.FORWARD or op is Op.BACKWARD:
            ms = costs.forward_ms[s] if op is Op.FORWARD else costs.backward_ms[s]
            self.now[key] = now + float(ms)
            self.add(key, "F" if op is Op.FORWARD else "B", instruction, now, self.now[key])
        elif op is Op.SEND_ACTIVATIONS or op is Op.SEND_GRADIENTS:
            assert peer is not None
            forward = op is Op.SEND_ACTIVATIONS
            arrival = now + float((costs.activation_ms if forward else costs.gradient_ms)[s, peer])
            self.arrival[n, op, index, s, peer] = arrival
            self.add(key, "a>" if forward else "g>", instruction, now, arrival)
        elif op in _SENDS:
            assert peer is not None
            sent = self.arrival.pop((n, _SENDS[op], index, peer, s), None)
            if sent is None:
                return False
            self.wait(key, instruction, sent)
        elif op is Op.PUSH:
            self.pushed[key, index] = now + self.push_ms[n][s]
            self.add(key, "^", instruction, now, self.pushed[key, index])
        elif op is Op.PULL:
            pushes = [self.pushed.get((other, index)) for other in self.shares[key]]
            known = [ms for ms in pushes if ms is not None]
            if len(known) < len(pushes):
                return False
            self.wait(key, instruction, max(known, default=0.0) + (self.pull_ms[n][s] if known else 0.0))
        return True

    def wait(self, key: StageKey, instruction: Instruction, until: float) -> None:
        if until > self.now[key]:
            self.add(key, "wait", instruction, self.now[key], until)
            self.now[key] = until

    def add(self, key: StageKey, op: EventKind, instruction: Instruction, start: float, end: float) -> None:
        self.events.append(TimelineEvent(*key, op, instruction.index, start, end, instruction))


def peak_in_flight(events: Iterable[TimelineEvent]) -> dict[StageKey, int]:
    """Per stage, the most minibatches between the start of F and the end of B."""
    live: dict[StageKey, int] = {}
    peak: dict[StageKey, int] = {}
    for event in events:  # computations of one stage never overlap, so start order is program order
        key = (event.vw, event.stage)
        if event.op == "F":
            live[key] = live.get(key, 0) + 1
            peak[key] = max(peak.get(key, 0), live[key])
        elif event.op == "B":
            live[key] -= 1
    return peak


def idle_shares(events: Iterable[TimelineEvent], start_ms: float, end_ms: float) -> dict[StageKey, float]:
    """Per stage, the share of [``start_ms``, ``end_ms``] in which it computes nothing: its bubbles."""
    busy: dict[StageKey, float] = {}
    for event in events:
        if event.op in ("F", "B"):
            overlap = min(event.end_ms, end_ms) - max(event.start_ms, start_ms)
            busy[event.vw, event.stage] = busy.get((event.vw, event.stage), 0.0) + max(overlap, 0.0)
    return {key: 1.0 - ms / (end_ms - start_ms) for key, ms in busy.items()}
