"""What training and evaluating check first, and what they then start from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from hetpipe_compiler.errors import ArtifactError
from hetpipe_compiler.frontend.load import LoadedWorkload, load_workload, workload_digest
from hetpipe_compiler.ir.plan import Plan
from hetpipe_compiler.runtime.job import Job
from hetpipe_compiler.runtime.run_options import RunOptions, check_options, check_run_folder, say


@dataclass(frozen=True)
class Prepared:
    """A run that may start: everything that can be refused before has been checked."""

    plan: Plan
    loaded: LoadedWorkload
    job: Job
    run: Path
    console: Console


def open_plan(options: RunOptions, console: Console) -> tuple[Plan, LoadedWorkload]:
    """The plan and its workload, once the options have been checked. Nothing is written.

    Raises:
        ArtifactError: HP401-HP403 the plan; HP404 it was made from a profiled graph.
        RunError: HP550 the run folder is in use; HP551 contradicting options.
        WorkloadError: HP1xx the workload cannot be loaded.
    """
    plan = Plan.load(options.plan)
    if plan.workload is None:
        raise ArtifactError(
            "HP404",
            "the plan was made from a profiled graph: there is no model to train",
            where=str(options.plan),
            hint="compile a model.py",
        )
    check_options(options)
    check_run_folder(options.run)
    return plan, _load(options, plan, console)  # first: stage modules may import what lies beside --workload


def _load(options: RunOptions, plan: Plan, console: Console) -> LoadedWorkload:
    assert plan.workload is not None
    path = options.workload or options.plan / plan.workload.path
    if path.is_file() and workload_digest(path, plan.workload.settings) != plan.workload.digest:
        say(
            console,
            f"warning: {path} is not the model.py that the plan was made from; if you edited it, compile again",
        )
    return load_workload(path, plan.workload.settings)
