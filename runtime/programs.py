"""The instructions that each stage of a plan executes in a run, messages included."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hetpipe_compiler.errors import ArtifactError
from hetpipe_compiler.ir.schedule import Instruction, Op, Schedule
from hetpipe_compiler.runtime.stage import gradient_names

if TYPE_CHECKING:
    from hetpipe_compiler.ir.plan import Plan, VirtualWorker

SCHEDULE_FILE = "schedule.csv"


def load_schedule(plan: Plan, folder: Path) -> Schedule:
    """``schedule.csv`` of the plan folder; raises `ArtifactError` HP412 no such file or other stages, HP420-HP421."""
    path = folder / SCHEDULE_FILE
    if not path.is_file():
        raise ArtifactError("HP412", "no such file", where=str(path), hint="compile again")
    schedule = Schedule.from_csv(path.read_text(), nm=plan.nm, staleness=plan.staleness)
    have = [len(stages) for stages in schedule.programs]
    want = [len(worker.stages) for worker in plan.virtual_workers]
    if have != want:
        raise ArtifactError(
            "HP412", f"has {have} stages per virtual worker, the plan {want}", where=str(path), hint="compile again"
        )
    return schedule


def with_messages(worker: VirtualWorker, stage: int, program: list[Instruction]) -> list[Instruction]:
    """The program with receives just before the computation that needs them and sends just after.

    Only for a transport whose sends never wait, as in one process: blocking sends need the order of
    `hetpipe_compiler.passes.place_communication`. What is computed is the same under both.
    """
    here = worker.stages[stage]
    sources = sorted({port.source for port in here.inputs if port.source != stage})
    consumers = sorted(here.sends)
    to = [s for s in sources if gradient_names(here.inputs, s)]
    by = [c for c in consumers if gradient_names(worker.stages[c].inputs, stage)]
    placed: list[Instruction] = []
    for instruction in program:
        before: list[Instruction] = []
        after: list[Instruction] = []
        if instruction.op is Op.FORWARD:
            before = [Instruction(Op.RECEIVE_ACTIVATIONS, instruction.index, s) for s in sources]
            after = [Instruction(Op.SEND_ACTIVATIONS, instruction.index, c) for c in consumers]
        elif instruction.op is Op.BACKWARD:
            before = [Instruction(Op.RECEIVE_GRADIENTS, instruction.index, c) for c in by]
            after = [Instruction(Op.SEND_GRADIENTS, instruction.index, s) for s in to]
        placed += [*before, instruction, *after]
    return placed
