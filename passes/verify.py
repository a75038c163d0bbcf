"""Proves a schedule before it runs.

Programs are periodic, so what holds for the prologue and some periods holds for ever: `verify_schedule` unrolls runs of
several lengths (short last waves among them) and checks of every stage of every virtual worker:

1. each forward, backward and update of a minibatch runs once, in minibatch order (HP430);
2. a minibatch's F, B, U come in this order, and its update before the next backward (HP431);
3. at F(p) the updates of minibatches up to p - Nm are done: no own update older than a wave is missed (HP432);
4. at most w_s minibatches are between F and B: the memory that was planned suffices (HP433);
5. each wave is pushed once, in order, after its last update (HP434);
6. at F(p) a pull has made sure of the clock R(p) of the start rule (HP435);
7. nothing waits for ever: with blocking sends, and with pulls that wait for the pushes of all virtual workers (HP436,
   HP437).

HP438: the schedule does not fit the plan's virtual workers and stages.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NoReturn

from hetpipe_compiler.errors import ArtifactError
from hetpipe_compiler.ir.schedule import Instruction, Op, Schedule, StageProgram
from hetpipe_compiler.passes.place_communication import communicated_programs
from hetpipe_compiler.passes.simulate.costs import PipelineCosts
from hetpipe_compiler.passes.simulate.rendezvous import stuck_stages


def proof_lengths(nm: int, staleness: int) -> tuple[int, ...]:
    """Run lengths that show a periodic schedule's prologue, periods, gates and short last waves; the longest first.

    (A mistake in the period is plainest in a run that has whole periods.)
    """
    whole = (staleness + 4) * nm
    return tuple(sorted({1, nm, nm + 1, whole, whole + 1, whole + nm - 1}, reverse=True))


def required_clock(p: int, nm: int, staleness: int) -> int:
    """R(p): how many waves of all virtual workers the weights of F(p) must hold."""
    missing_at_most = (staleness + 1) * nm + nm - 1
    return -(-max(0, p - missing_at_most) // nm)


def verify_schedule(
    schedule: Schedule,
    costs: Sequence[PipelineCosts],
    in_flight: Sequence[Sequence[int]],
    minibatches: Sequence[int] | None = None,
) -> None:
    """Prove ``schedule``, or raise `ArtifactError` HP430-HP438 for the first violation.

    Args:
        schedule: The programs, as computed or as read from an edited schedule.csv.
        costs: Per virtual worker: which stages exchange messages, and the times by which messages are placed.
        in_flight: w_s per virtual worker and stage: what the planned memory is for.
        minibatches: Run lengths to check; by default `proof_lengths`.
    """
    _verify_shape(schedule, in_flight)
    distinct = _distinct(schedule, costs, in_flight)
    for length in minibatches or proof_lengths(schedule.nm, schedule.staleness):
        for n in distinct:
            for s, program in enumerate(schedule.programs[n]):
                stage = _StageCheck(n, s, schedule.nm, schedule.staleness, in_flight[n][s], length)
                stage.run(program.unroll(length))
        _verify_liveness({n: (schedule.programs[n], costs[n]) for n in distinct}, length)


def _distinct(
    schedule: Schedule, costs: Sequence[PipelineCosts], in_flight: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """Virtual workers that differ: what is proved of one holds of its copies, which wait for the same waves."""
    first: dict[Hashable, int] = {}
    for n, stages in enumerate(schedule.programs):
        first.setdefault((stages, tuple(in_flight[n]), costs[n].key), n)
    return tuple(first.values())


def _verify_shape(schedule: Schedule, in_flight: Sequence[Sequence[int]]) -> None:
    given = [len(stages) for stages in schedule.programs]
    planned = [len(stages) for stages in in_flight]
    if given != planned:
        raise ArtifactError(
            "HP438",
            f"stages per virtual worker are {given}, the plan has {planned}",
            where="schedule.csv",
            hint="compile again, or give each stage of the plan its column",
        )


def _verify_liveness(workers: Mapping[int, tuple[tuple[StageProgram, ...], PipelineCosts]], length: int) -> None:
    complete = []
    for n, (stages, worker_costs) in workers.items():
        try:
            complete.append(communicated_programs(stages, worker_costs, length))
        except ArtifactError as error:
            error.where = f"schedule.csv, vw{n}"
            error.message += f" (in a run of {length} minibatches)"
            raise
    stuck = stuck_stages(complete)
    if stuck:
        numbers = [*workers]
        raise ArtifactError(
            "HP437",
            "the virtual workers wait for each other for ever: "
            + "; ".join(f"vw{numbers[n]}/stage{s} at {instruction}" for (n, s), instruction in stuck.items())
            + f" (in a run of {length} minibatches)",
            where="schedule.csv",
            hint="every wave must be pushed by all before any stage pulls it",
        )


class _StageCheck:
    """The rules that one stage's program keeps on its own."""

    def __init__(self, vw: int, stage: int, nm: int, staleness: int, w: int, length: int) -> None:
        self.where = f"schedule.csv, vw{vw}/stage{stage}"
        self.nm, self.staleness, self.w, self.length = nm, staleness, w, length
        self.done = {Op.FORWARD: 0, Op.BACKWARD: 0, Op.UPDATE: 0}
        self.waves_pushed = 0
        self.clock = 0

    def run(self, program: Iterable[Instruction]) -> None:
        for instruction in program:
            if instruction.op in self.done:
                self.compute(instruction)
            elif instruction.op is Op.PUSH:
                self.push(instruction)
            elif instruction.op is Op.PULL:
                self.clock = max(self.clock, instruction.index + 1)
            else:
                self.refuse("HP430", f"{instruction} is a message", "leave messages out: they are placed when it runs")
        for op, last in self.done.items():
            if last < self.length:
                self.refuse(
                    "HP430",
                    f"a run of {self.length} minibatches never runs {op.value}{last + 1}",
                    f"the period must hold {op.value} of {self.nm} consecutive minibatches",
                )
        waves = -(-self.length // self.nm)
        if self.waves_pushed < waves:
            self.refuse(
                "HP434",
                f"a run of {self.length} minibatches never pushes wave {self.waves_pushed}",
                f"put ^{self.waves_pushed} after U{min((self.waves_pushed + 1) * self.nm, self.length)}",
            )

    def compute(self, instruction: Instruction) -> None:
        op, p = instruction.op, instruction.index
        due = self.done[op] + 1
        if p < due:
            self.refuse("HP430", f"{instruction} runs a second time", f"remove one; {op.value}{due} is due")
        if p > due:
            self.refuse("HP430", f"{instruction} comes before {op.value}{due}", f"put {op.value}{due} first")
        self.done[op] = p
        if op is Op.FORWARD:
            self.forward(p)
        elif op is Op.BACKWARD:
            self.after(instruction, Op.FORWARD, p)
            self.after(instruction, Op.UPDATE, p - 1)
        else:
            self.after(instruction, Op.BACKWARD, p)

    def forward(self, p: int) -> None:
        if self.done[Op.UPDATE] < p - self.nm:
            self.refuse(
                "HP432",
                f"F{p} misses U{self.done[Op.UPDATE] + 1}: own updates may be late by {self.nm - 1} minibatches",
                f"put U{p - self.nm} before F{p}",
            )
        live = p - self.done[Op.BACKWARD]
        if live > self.w:
            self.refuse(
                "HP433",
                f"F{p} makes {live} minibatches in flight; the planned memory holds {self.w}",
                f"put B{p - self.w} before F{p}",
            )
        need = required_clock(p, self.nm, self.staleness)
        if self.clock < need:
            self.refuse(
                "HP435",
                f"F{p} needs wave {need - 1} of every virtual worker (D = {self.staleness}); "
                + (f"the last pull before it is v{self.clock - 1}" if self.clock else "no pull comes before it"),
                f"put v{need - 1} before F{p}",
            )

    def after(self, instruction: Instruction, op: Op, p: int) -> None:
        if self.done[op] < p:
            self.refuse("HP431", f"{instruction} comes before {op.value}{p}", f"put {op.value}{p} first")

    def push(self, instruction: Instruction) -> None:
        wave = instruction.index
        if wave < self.waves_pushed:
            self.refuse("HP434", f"wave {wave} is pushed a second time", f"remove one; ^{self.waves_pushed} is due")
        if wave > self.waves_pushed:
            self.refuse("HP434", f"{instruction} comes before ^{self.waves_pushed}", f"put ^{self.waves_pushed} first")
        last = min((wave + 1) * self.nm, self.length)
        if self.done[Op.UPDATE] < last:
            self.refuse("HP434", f"{instruction} comes before U{last}, the last of its wave", f"put U{last} first")
        self.waves_pushed = wave + 1

    def refuse(self, code: str, message: str, hint: str) -> NoReturn:
        raise ArtifactError(code, message, where=self.where, hint=hint)
