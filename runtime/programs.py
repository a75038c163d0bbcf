"""The instructions that each stage of a plan executes in a run, messages included."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hetpipe_compiler.errors import ArtifactError
from hetpipe_compiler.ir.schedule import Instruction, Schedule
from hetpipe_compiler.passes.place_communication import communicated_programs
from hetpipe_compiler.passes.simulate.costs import PipelineCosts

if TYPE_CHECKING:
    from hetpipe_compiler.ir.cluster import Cluster
    from hetpipe_compiler.ir.plan import Plan

SCHEDULE_FILE = "schedule.csv"


def load_schedule(plan: Plan, folder: Path) -> Schedule:
    """``schedule.csv`` of the plan folder; raises `ArtifactError` HP417 no such file or other stages, HP420-HP421."""
    path = folder / SCHEDULE_FILE
    if not path.is_file():
        raise ArtifactError("HP417", "no such file", where=str(path), hint="compile again")
    schedule = Schedule.read(path, nm=plan.nm, staleness=plan.staleness)
    have = [len(stages) for stages in schedule.programs]
    want = [len(worker.stages) for worker in plan.virtual_workers]
    if have != want:
        raise ArtifactError(
            "HP417", f"has {have} stages per virtual worker, the plan {want}", where=str(path), hint="compile again"
        )
    return schedule


def complete_programs(plan: Plan, folder: Path, cluster: Cluster, minibatches: int) -> list[list[list[Instruction]]]:
    """``[vw][stage]``: all instructions of a run of ``minibatches``.

    Raises:
        ArtifactError: as `load_schedule`, and HP436-HP437 a schedule under which stages wait for ever.
    """
    schedule = load_schedule(plan, folder)
    return [
        communicated_programs(programs, PipelineCosts.of_plan(worker, cluster), minibatches)
        for programs, worker in zip(schedule.programs, plan.virtual_workers, strict=True)
    ]
