"""What can be refused of a plan folder before any process starts: missing files, a schedule that was edited badly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hetpipe_compiler.errors import ArtifactError

if TYPE_CHECKING:
    from hetpipe_compiler.ir.cluster import Cluster
    from hetpipe_compiler.ir.plan import Plan, VirtualWorker


def check_plan_folder(plan: Plan, folder: Path) -> None:
    """Prove the schedule, import the stage modules, and look for every initial value.

    Raises:
        ArtifactError: HP402 the plan names devices that its cluster has not; HP415 a stage module cannot be loaded;
            HP416 values are missing; HP417, HP420-HP421 the schedule cannot be read; HP430-HP438 it breaks a rule, see
            `hetpipe_compiler.passes.verify`.
    """
    from hetpipe_compiler.ir.cluster import Cluster
    from hetpipe_compiler.passes.simulate.costs import PipelineCosts
    from hetpipe_compiler.passes.verify import verify_schedule
    from hetpipe_compiler.runtime.initial import WEIGHTS_FILE, check_names
    from hetpipe_compiler.runtime.programs import SCHEDULE_FILE, load_schedule

    check_stages(plan, folder, plan.virtual_workers)
    cluster = Cluster.from_dict(plan.cluster)
    costs = [PipelineCosts.of_plan(worker, cluster) for worker in plan.virtual_workers]
    in_flight = [[stage.in_flight for stage in worker.stages] for worker in plan.virtual_workers]
    schedule = load_schedule(plan, folder)
    try:
        verify_schedule(schedule, costs, in_flight)
    except ArtifactError as error:
        error.where = str(folder / SCHEDULE_FILE) + (error.where or "").removeprefix(SCHEDULE_FILE)
        raise
    if plan.weights:
        check_names(folder / WEIGHTS_FILE, [t.name for t in (*plan.parameters, *plan.buffers)])


def check_stages(plan: Plan, folder: Path, workers: Sequence[VirtualWorker]) -> None:
    """Import the stage modules of these virtual workers, and look for their devices and the constants.

    Raises:
        ArtifactError: HP402, HP415 and HP416 as above.
    """
    from hetpipe_compiler.ir.cluster import Cluster
    from hetpipe_compiler.ir.stage_file import load_stage_class
    from hetpipe_compiler.runtime.initial import CONSTANTS_FILE, check_names

    _check_devices(plan, folder, Cluster.from_dict(plan.cluster))
    for module in dict.fromkeys(stage.module for worker in workers for stage in worker.stages):
        load_stage_class(folder, module)
    if plan.constants:
        check_names(folder / CONSTANTS_FILE, [t.name for t in plan.constants])


def _check_devices(plan: Plan, folder: Path, cluster: Cluster) -> None:
    known = {device.id for device in cluster.devices}
    for n, worker in enumerate(plan.virtual_workers):
        for s, stage in enumerate(worker.stages):
            if stage.device not in known:
                raise ArtifactError(
                    "HP402",
                    f"virtual_workers.{n}.stages.{s}.device: the cluster has no device '{stage.device}'",
                    where=str(folder / "plan.json"),
                    hint="compile again",
                )
