"""The planner's passes for given options, and the explanation of what they made. Needs no torch."""

from __future__ import annotations

from dataclasses import replace

from hetpipe_compiler.codegen.explain_plan import Explained, explain_plan
from hetpipe_compiler.errors import ClusterError
from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.options import CompileOptions
from hetpipe_compiler.passes.allocate import Allocation
from hetpipe_compiler.passes.base import Compilation, Pass
from hetpipe_compiler.passes.concurrency import PlannedWorker
from hetpipe_compiler.passes.own_partitioner import load_partitioner
from hetpipe_compiler.passes.planning import (
    AutoAllocate,
    MakeSchedule,
    Partition,
    PlannerOptions,
    Verify,
    is_auto,
    plan_workers,
)


def planning_passes(options: CompileOptions) -> tuple[Pass, ...]:
    """From the chain on. Any policy but ``auto`` has run before."""
    given = _planner_options(options)
    auto = (AutoAllocate(given),) if is_auto(options.policy) else ()
    return (*auto, Partition(given), MakeSchedule(options.staleness), Verify())


def _planner_options(options: CompileOptions) -> PlannerOptions:
    if options.partitioner is not None and options.splits:
        raise ClusterError(
            "HP224",
            "--split and --partitioner both make the stages",
            where="--partitioner",
            hint="leave out one of them",
        )
    partitioner = load_partitioner(options.partitioner) if options.partitioner is not None else None
    return PlannerOptions(
        options.nm, options.staleness, options.placement, options.splits, options.objective, partitioner
    )


def plan_explanation(compilation: Compilation, options: CompileOptions) -> str | None:
    """The text for ``--explain-plan``; None if it is not asked for."""
    if not options.explain_plan:
        return None
    chain, allocation, workers = compilation.chain, compilation.allocation, compilation.workers
    assert chain is not None
    assert allocation is not None
    assert workers is not None

    def replan(cluster: Cluster, allocation: Allocation, nm: int | None) -> tuple[PlannedWorker, ...]:
        assert chain is not None
        return plan_workers(chain, cluster, allocation, replace(_planner_options(options), nm=nm))

    return explain_plan(
        Explained(
            chain=chain,
            cluster=compilation.cluster,
            allocation=allocation,
            workers=workers,
            replan=replan,
            staleness=options.staleness,
            overlapped=options.objective == "overlapped",
            asked_nm=options.nm is not None,
        )
    )
