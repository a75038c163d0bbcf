"""The planner's passes for given options, and the explanation of what they made. Needs no torch."""

from __future__ import annotations

from dataclasses import replace

from hetpipe_compiler.codegen.explain_plan import Asked, Explained, explain_plan
from hetpipe_compiler.errors import ClusterError
from hetpipe_compiler.ir.decisions import Decisions
from hetpipe_compiler.options import CompileOptions
from hetpipe_compiler.passes.base import Compilation, Pass
from hetpipe_compiler.passes.concurrency import PlannedWorker
from hetpipe_compiler.passes.decided import (
    AllocateAsDecided,
    PartitionAsDecided,
    decided_allocation,
    decided_workers,
    decisions_of,
)
from hetpipe_compiler.passes.own_partitioner import load_partitioner
from hetpipe_compiler.passes.planning import (
    Allocate,
    AutoAllocate,
    MakeSchedule,
    Partition,
    PlannerOptions,
    Verify,
    is_auto,
    plan_workers,
)
from hetpipe_compiler.passes.stage_memory import Recompute


def first_passes(options: CompileOptions) -> tuple[Pass, ...]:
    """What needs no model, so that a mistake in it is told before the model is traced."""
    if options.decisions is not None:
        return (AllocateAsDecided(options.decisions),)
    return () if is_auto(options.policy) else (Allocate(options.policy),)


def planning_passes(options: CompileOptions) -> tuple[Pass, ...]:
    """From the chain on; `first_passes` have run before."""
    if options.decisions is not None:
        return (PartitionAsDecided(options.decisions), MakeSchedule(options.staleness), Verify())
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
        options.nm,
        options.staleness,
        options.placement,
        options.splits,
        options.objective,
        Recompute(options.recompute),
        partitioner,
    )


def decisions_text(compilation: Compilation, options: CompileOptions) -> str:
    """The content of ``decisions.yaml``: what was decided, for people to edit."""
    return _decisions(compilation, options).to_yaml()


def _decisions(compilation: Compilation, options: CompileOptions) -> Decisions:
    chain, allocation, workers = compilation.chain, compilation.allocation, compilation.workers
    assert chain is not None
    assert allocation is not None
    assert workers is not None
    return decisions_of(
        chain,
        allocation,
        workers,
        partitioner=options.made_by,
        objective=options.objective,
        staleness=options.staleness,
        placement=options.placement,
        recompute=Recompute(options.recompute),
        update_scale=options.update_scale,
    )


def plan_explanation(compilation: Compilation, options: CompileOptions) -> str | None:
    """The text for ``--explain-plan``; None if it is not asked for."""
    if not options.explain_plan:
        return None
    chain, allocation, workers = compilation.chain, compilation.allocation, compilation.workers
    assert chain is not None
    assert allocation is not None
    assert workers is not None
    given = _planner_options(options)
    decisions = _decisions(compilation, options)

    def recost(asked: Asked) -> tuple[PlannedWorker, ...]:
        assert chain is not None
        cluster = asked.cluster or compilation.cluster
        return decided_workers(
            asked.chain or chain, cluster, decided_allocation(decisions, cluster), decisions, bound=False
        )

    def replan(asked: Asked) -> tuple[PlannedWorker, ...]:
        assert chain is not None
        assert allocation is not None
        cluster = asked.cluster or compilation.cluster
        changed = replace(given, nm=asked.nm or given.nm, objective=asked.objective or given.objective)
        if asked.by_search:
            changed = replace(changed, splits=None, partitioner=None)
        groups = tuple(replace(g, devices=tuple(cluster.device(d.id) for d in g.devices)) for g in allocation.groups)
        return plan_workers(asked.chain or chain, cluster, replace(allocation, groups=groups), changed)

    return explain_plan(
        Explained(
            chain=chain,
            whole=compilation.whole,
            cluster=compilation.cluster,
            allocation=allocation,
            workers=workers,
            replan=replan,
            recost=recost,
            staleness=options.staleness,
            objective=options.objective,
            recompute=Recompute(options.recompute),
            asked_nm=options.nm is not None,
            made_by=options.made_by,
            fixed=options.decisions is not None,
        )
    )
