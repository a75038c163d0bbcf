"""The planner's passes for given options, and the explanation of what they made. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

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
    BoundCoarsening,
    MakeSchedule,
    Partition,
    PlannerOptions,
    Verify,
    is_auto,
    plan_workers,
)
from hetpipe_compiler.passes.stage_memory import Recompute


@dataclass(frozen=True)
class PlanningSteps:
    """The planner's passes, in order, and what is said of the plan afterwards.

    Making one loads the user's own partitioner, so that a mistake in it is told before the model is traced.

    Raises:
        ClusterError: HP223 there is no such partitioner, HP224 ``--split`` beside it.
    """

    options: CompileOptions

    def __post_init__(self) -> None:
        _ = self._given  # loaded now, and kept

    @property
    def first(self) -> tuple[Pass, ...]:
        """What needs no model, so that a mistake in it is told before the model is traced."""
        options = self.options
        if options.decisions is not None:
            return (AllocateAsDecided(options.decisions),)
        return () if is_auto(options.policy) else (Allocate(options.policy),)

    @property
    def planning(self) -> tuple[Pass, ...]:
        """From the chain on; `first` have run before."""
        options, given = self.options, self._given
        after = (BoundCoarsening(given), MakeSchedule(options.staleness), Verify())
        if options.decisions is not None:
            return (PartitionAsDecided(options.decisions), *after)
        auto = (AutoAllocate(given),) if is_auto(options.policy) else ()
        return (*auto, Partition(given), *after)

    @cached_property
    def _given(self) -> PlannerOptions:
        options = self.options
        if options.partitioner is not None and options.splits:
            raise ClusterError(
                "HP224",
                "--split and --partitioner both make the stages",
                where="--partitioner",
                hint="leave out one of them",
            )
        return PlannerOptions(
            options.nm,
            options.staleness,
            options.placement,
            options.splits,
            options.objective,
            Recompute(options.recompute),
            load_partitioner(options.partitioner) if options.partitioner is not None else None,
        )

    def decisions_text(self, compilation: Compilation) -> str:
        """The content of ``decisions.yaml``: what was decided, for people to edit."""
        return self._decisions(compilation).to_yaml()

    def _decisions(self, compilation: Compilation) -> Decisions:
        chain, allocation, workers = compilation.chain, compilation.allocation, compilation.workers
        assert chain is not None
        assert allocation is not None
        assert workers is not None
        return decisions_of(
            chain,
            allocation,
            workers,
            partitioner=self.options.made_by,
            objective=self.options.objective,
            staleness=self.options.staleness,
            placement=self.options.placement,
            recompute=Recompute(self.options.recompute),
            update_scale=self.options.update_scale,
        )

    def explanation(self, compilation: Compilation) -> str | None:
        """The text for ``--explain-plan``; None if it is not asked for."""
        if not self.options.explain_plan:
            return None
        chain, allocation, workers = compilation.chain, compilation.allocation, compilation.workers
        assert chain is not None
        assert allocation is not None
        assert workers is not None
        decisions = self._decisions(compilation)

        def recost(asked: Asked) -> tuple[PlannedWorker, ...]:
            assert chain is not None
            cluster = asked.cluster or compilation.cluster
            allocated = decided_allocation(decisions, cluster)
            return decided_workers(asked.chain or chain, cluster, allocated, decisions, bound=False)

        def replan(asked: Asked) -> tuple[PlannedWorker, ...]:
            assert chain is not None
            assert allocation is not None
            cluster, given = asked.cluster or compilation.cluster, self._given
            changed = replace(given, nm=asked.nm or given.nm, objective=asked.objective or given.objective)
            if asked.by_search:
                changed = replace(changed, splits=None, partitioner=None)
            groups = tuple(
                replace(g, devices=tuple(cluster.device(d.id) for d in g.devices)) for g in allocation.groups
            )
            return plan_workers(asked.chain or chain, cluster, replace(allocation, groups=groups), changed)

        return explain_plan(
            Explained(
                chain=chain,
                whole=compilation.whole,
                uncoarsened_bounds_ms=compilation.uncoarsened_bounds_ms,
                cluster=compilation.cluster,
                allocation=allocation,
                workers=workers,
                replan=replan,
                recost=recost,
                staleness=self.options.staleness,
                objective=self.options.objective,
                recompute=Recompute(self.options.recompute),
                asked_nm=self.options.nm is not None,
                made_by=self.options.made_by,
                fixed=self.options.decisions is not None,
            )
        )
