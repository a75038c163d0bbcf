"""The planner's steps as passes: allocate, partition (with concurrency), schedule, verify. Each wraps the file of its
name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from hetpipe_compiler.ir.blocks import BlockChain
from hetpipe_compiler.ir.cluster import Cluster, Device
from hetpipe_compiler.ir.schedule import Schedule
from hetpipe_compiler.passes.allocate import Allocation, allocate
from hetpipe_compiler.passes.auto import auto_allocation
from hetpipe_compiler.passes.base import Compilation, Pass
from hetpipe_compiler.passes.concurrency import PlannedWorker, choose_concurrency
from hetpipe_compiler.passes.multilevel import shorten_chain
from hetpipe_compiler.passes.own_partitioner import OwnPartitioner
from hetpipe_compiler.passes.partition import message_ms
from hetpipe_compiler.passes.proven_bound import uncoarsened_bounds_ms
from hetpipe_compiler.passes.schedules.wsp import wsp_program
from hetpipe_compiler.passes.simulate.pipeline import PipelineCosts
from hetpipe_compiler.passes.stage_memory import MemoryRule, Recompute
from hetpipe_compiler.passes.verify import verify_schedule

#: Policy ``auto`` compares groupings by plans of so many blocks at most.
_AUTO_BLOCKS = 256


@dataclass(frozen=True)
class Allocate(Pass):
    """Group devices into virtual workers: see `hetpipe_compiler.passes.allocate`."""

    name: ClassVar[str] = "allocate"
    ensures: ClassVar[tuple[str, ...]] = ("allocation",)

    policy: str

    def run(self, compilation: Compilation) -> None:
        compilation.allocation = allocate(compilation.cluster, self.policy)

    def dump(self, compilation: Compilation) -> str:
        assert compilation.allocation is not None
        return groups_text(compilation.allocation)


@dataclass(frozen=True)
class PlannerOptions:
    """What the search for a plan is asked.

    Attributes:
        nm: Minibatches in flight; None: the smallest within 1 % of the best.
        staleness: D, in clocks.
        placement: Where parameters live: see `place_parameters`.
        splits: Cuts by hand, one for each virtual worker or one for all.
        objective: What each partition minimises: see `partition.partition`.
        recompute: Which stages may keep their inputs only and run their forward again.
        partitioner: Makes the stages in place of our search.
    """

    nm: int | None = None
    staleness: int = 0
    placement: str = "local"
    splits: tuple[tuple[str | int, ...], ...] | None = None
    objective: str = "hetpipe"
    recompute: Recompute = Recompute.WHERE_NEEDED
    partitioner: OwnPartitioner | None = None


@dataclass(frozen=True)
class AutoAllocate(Pass):
    """Group devices for the most samples a second: see `hetpipe_compiler.passes.auto`."""

    name: ClassVar[str] = "allocate"
    requires: ClassVar[tuple[str, ...]] = ("chain",)
    ensures: ClassVar[tuple[str, ...]] = ("allocation",)

    options: PlannerOptions = PlannerOptions()

    def run(self, compilation: Compilation) -> None:
        chain, cluster, options = compilation.chain, compilation.cluster, self.options
        assert chain is not None
        by_search = options.splits is None and options.partitioner is None
        quick = None
        if by_search and len(chain) > _AUTO_BLOCKS:
            short = shorten_chain(chain, _AUTO_BLOCKS, max(kind.memory_bytes for kind in cluster.kinds()))
            quick = partial(plan_workers, short, cluster, options=options)
        compilation.allocation = auto_allocation(
            chain,
            cluster,
            partial(plan_workers, chain, cluster, options=options),
            quick=quick,
            staleness=options.staleness,
            overlapped=options.objective == "overlapped",
            recompute=options.recompute,
        )

    def dump(self, compilation: Compilation) -> str:
        allocation = compilation.allocation
        assert allocation is not None
        rows = [groups_text(allocation)]
        rows += [f"runner-up: {other.policy} {other.samples_per_s:.1f} samples/s" for other in allocation.runners_up]
        return "\n".join([*rows, f"no allocation exceeds {allocation.bound_samples_per_s:.1f} samples/s"])


def groups_text(allocation: Allocation) -> str:
    """A virtual worker a line, and what is left over."""
    rows = [f"vw{n}: {' '.join(d.id for d in g.devices)}" for n, g in enumerate(allocation.groups)]
    return "\n".join([*rows, f"unused: {' '.join(d.id for d in allocation.unused) or 'none'}"])


def stages_text(workers: Iterable[PlannedWorker]) -> str:
    """A stage a line."""
    return "\n".join(
        f"vw{n} stage{s}: {stage.device.id} blocks {stage.blocks} {stage.stage_ms:.3f} ms w={stage.in_flight}"
        + (" recompute" if stage.recompute else "")
        for n, worker in enumerate(workers)
        for s, stage in enumerate(worker.stages)
    )


def is_auto(policy: str) -> bool:
    """Whether the allocation waits for the model's costs."""
    return policy.lower() == "auto"


def plan_workers(
    chain: BlockChain, cluster: Cluster, allocation: Allocation, options: PlannerOptions | None = None
) -> tuple[PlannedWorker, ...]:
    """`choose_concurrency` with the time that stages exchange their parameters in."""
    options = options or PlannerOptions()
    remote = remote_fraction(allocation, cluster, options.placement)
    return choose_concurrency(
        chain,
        cluster,
        allocation,
        nm=options.nm,
        staleness=options.staleness,
        splits=options.splits,
        exchange_ms=lambda device, size: exchange_ms(cluster, device, size, remote),
        objective=options.objective,
        recompute=options.recompute,
        partitioner=options.partitioner,
    )


@dataclass(frozen=True)
class Partition(Pass):
    """Cut the chain for every virtual worker and choose Nm: see `hetpipe_compiler.passes.concurrency`."""

    name: ClassVar[str] = "partition"
    requires: ClassVar[tuple[str, ...]] = ("chain", "allocation")
    ensures: ClassVar[tuple[str, ...]] = ("workers",)

    options: PlannerOptions = PlannerOptions()

    def run(self, compilation: Compilation) -> None:
        assert compilation.chain is not None
        assert compilation.allocation is not None
        compilation.workers = plan_workers(compilation.chain, compilation.cluster, compilation.allocation, self.options)

    def dump(self, compilation: Compilation) -> str:
        assert compilation.workers is not None
        return stages_text(compilation.workers)


@dataclass(frozen=True)
class BoundCoarsening(Pass):
    """What merging components into blocks costs at most: see `hetpipe_compiler.passes.proven_bound`."""

    name: ClassVar[str] = "bound_coarsening"
    requires: ClassVar[tuple[str, ...]] = ("allocation", "workers")
    ensures: ClassVar[tuple[str, ...]] = ("uncoarsened_bounds_ms",)

    options: PlannerOptions = PlannerOptions()

    def run(self, compilation: Compilation) -> None:
        allocation, workers, whole = compilation.allocation, compilation.workers, compilation.whole
        assert allocation is not None
        assert workers is not None
        if whole is None:
            return
        held = [
            (group, worker.nm, worker.bottleneck_ms) for group, worker in zip(allocation.groups, workers, strict=True)
        ]
        rule = MemoryRule.of(whole, self.options.staleness, recompute=self.options.recompute)
        compilation.uncoarsened_bounds_ms = uncoarsened_bounds_ms(
            whole, held, compilation.cluster, rule, overlapped=self.options.objective == "overlapped"
        )

    def dump(self, compilation: Compilation) -> str:
        bounds = enumerate(compilation.uncoarsened_bounds_ms)
        return "\n".join(f"vw{n}: {bound_ms:.3f} ms" for n, bound_ms in bounds) or "nothing was merged"


def remote_fraction(allocation: Allocation, cluster: Cluster, placement: str) -> float:
    """Share of the parameters that a stage exchanges with servers on other nodes.

    ``round-robin`` spreads parameters over all nodes. ``local`` keeps them at home if each virtual worker has the same
    devices on the same nodes, so that a stage sits on one node in all of them (ED); else it is no better.
    """
    nodes = len(cluster.nodes)
    nodes_of = ([d.node for d in group.devices] for group in allocation.groups)
    alike = {
        tuple(names if group.ordered else sorted(names))
        for names, group in zip(nodes_of, allocation.groups, strict=True)
    }
    if placement == "local" and len(alike) == 1:
        return 0.0
    return 1.0 - 1.0 / nodes


def exchange_ms(cluster: Cluster, device: Device, size_bytes: int, remote: float) -> float:
    """Milliseconds of pushing and then pulling a stage's parameters once; its part on other nodes takes the network."""
    home = cluster.node(device.node).link
    away_bytes = int(size_bytes * remote)
    return 2.0 * max(home.ms(size_bytes - away_bytes), cluster.network.ms(away_bytes) if away_bytes else 0.0)


@dataclass(frozen=True)
class MakeSchedule(Pass):
    """The default programs for the chosen in-flight vectors: see `hetpipe_compiler.passes.schedules.wsp`."""

    name: ClassVar[str] = "schedule"
    requires: ClassVar[tuple[str, ...]] = ("workers",)
    ensures: ClassVar[tuple[str, ...]] = ("schedule",)

    staleness: int = 0

    def run(self, compilation: Compilation) -> None:
        assert compilation.workers is not None
        nm = compilation.workers[0].nm
        programs = tuple(wsp_program(worker.in_flight, nm, self.staleness) for worker in compilation.workers)
        compilation.schedule = Schedule(nm, self.staleness, programs)

    def dump(self, compilation: Compilation) -> str:
        assert compilation.schedule is not None
        return compilation.schedule.to_csv()


@dataclass(frozen=True)
class Verify(Pass):
    """Prove the schedule before it runs: see `hetpipe_compiler.passes.verify`."""

    name: ClassVar[str] = "verify"
    requires: ClassVar[tuple[str, ...]] = ("schedule", "workers", "chain")
    ensures: ClassVar[tuple[str, ...]] = ("schedule",)

    def run(self, compilation: Compilation) -> None:
        assert compilation.schedule is not None
        assert compilation.workers is not None
        assert compilation.chain is not None
        costs = []
        for worker in compilation.workers:
            activations, gradients = message_ms(
                compilation.chain.permuted(worker.order), worker.stages, compilation.cluster
            )
            costs.append(
                PipelineCosts(
                    forward_ms=np.array([s.forward_ms for s in worker.stages]),
                    backward_ms=np.array([s.backward_ms for s in worker.stages]),
                    activation_ms=activations,
                    gradient_ms=gradients,
                )
            )
        verify_schedule(compilation.schedule, costs, [worker.in_flight for worker in compilation.workers])

    def dump(self, compilation: Compilation) -> str:
        assert compilation.schedule is not None
        return f"proved for {sum(map(len, compilation.schedule.programs))} programs"
