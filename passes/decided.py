"""A plan by hand (``--decisions``): look its names up, check it, cost it. And the other way round, for every plan.

1. Devices must be the cluster's, each used once.
2. The stages of a virtual worker must be a partition (`check_stages`); minibatches in flight must not rise from stage
   to stage nor exceed Nm; each stage must fit on its device with them.
3. Nothing is changed: stages, devices, Nm and minibatches in flight are taken as they stand. Our search says only how
   near the slowest stage is to the least there is on these devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar

from hetpipe_compiler.errors import ClusterError, PlanningError
from hetpipe_compiler.ir.blocks import NO_REPLAY, BlockChain
from hetpipe_compiler.ir.cluster import Cluster, Device
from hetpipe_compiler.ir.config_file import suggestion
from hetpipe_compiler.ir.decisions import DecidedStage, DecidedWorker, Decisions
from hetpipe_compiler.passes.allocate import Allocation, Group
from hetpipe_compiler.passes.base import Compilation, Pass
from hetpipe_compiler.passes.check_stages import check_stages
from hetpipe_compiler.passes.concurrency import PlannedWorker, WorkerChoice, cost_choices
from hetpipe_compiler.passes.planning import exchange_ms, groups_text, remote_fraction, stages_text
from hetpipe_compiler.passes.split import split_boundaries
from hetpipe_compiler.passes.stage_memory import Recompute

_MIB = 1 << 20


@dataclass(frozen=True)
class AllocateAsDecided(Pass):
    """The groups of a decisions file."""

    name: ClassVar[str] = "allocate"
    ensures: ClassVar[tuple[str, ...]] = ("allocation",)

    decisions: Decisions

    def run(self, compilation: Compilation) -> None:
        compilation.allocation = decided_allocation(self.decisions, compilation.cluster)

    def dump(self, compilation: Compilation) -> str:
        assert compilation.allocation is not None
        return groups_text(compilation.allocation)


@dataclass(frozen=True)
class PartitionAsDecided(Pass):
    """The stages of a decisions file."""

    name: ClassVar[str] = "partition"
    requires: ClassVar[tuple[str, ...]] = ("chain", "allocation")
    ensures: ClassVar[tuple[str, ...]] = ("workers",)

    decisions: Decisions

    def run(self, compilation: Compilation) -> None:
        chain, allocation = compilation.chain, compilation.allocation
        assert chain is not None
        assert allocation is not None
        compilation.workers = decided_workers(chain, compilation.cluster, allocation, self.decisions)

    def dump(self, compilation: Compilation) -> str:
        assert compilation.workers is not None
        return stages_text(compilation.workers)


def decided_allocation(decisions: Decisions, cluster: Cluster) -> Allocation:
    """The groups of devices.

    Raises:
        ClusterError: HP212 an unknown device, HP213 one that is there twice, HP240 ``ordered`` has other devices.
    """
    devices: dict[str, Device] = {device.id: device for device in cluster.devices}
    seen: dict[str, str] = {}
    groups = []
    for at, worker in enumerate(decisions.virtual_workers):
        places = {f"stages[{s}].device": stage.device for s, stage in enumerate(worker.stages)}
        places |= {f"unused[{u}]": name for u, name in enumerate(worker.unused)}
        for inside, name in places.items():
            where = f"--decisions: virtual_workers[{at}].{inside}"
            if name not in devices:
                hint = suggestion(name, devices)
                message = f"the cluster '{cluster.name}' has no device '{name}'"
                raise ClusterError("HP212", message, where=where, hint=hint)
            if name in seen:
                raise ClusterError("HP213", f"'{name}' is also {seen[name]}", where=where, hint="use each device once")
            seen[name] = where.removeprefix("--decisions: ")
        mine = tuple(sorted((devices[name] for name in places.values()), key=cluster.devices.index))
        if worker.ordered:
            if sorted(worker.ordered) != sorted(places.values()):
                where = f"--decisions: virtual_workers[{at}].ordered"
                message = "not the devices of its stages and those unused"
                raise ClusterError("HP240", message, where=where, hint="list these in order, or leave it out")
            mine = tuple(devices[name] for name in worker.ordered)
        groups.append(Group(mine, bool(worker.ordered)))
    unused = tuple(device for device in cluster.devices if device.id not in seen)
    return Allocation(decisions.author(decisions.policy), tuple(groups), unused)


def decided_workers(
    chain: BlockChain, cluster: Cluster, allocation: Allocation, decisions: Decisions, *, bound: bool = True
) -> tuple[PlannedWorker, ...]:
    """The virtual workers, costed; ``bound``: see `cost_choices`.

    Raises:
        PlanningError: HP303 a ``begins_at`` that is unknown, ambiguous or inside a block; HP312, HP313 stages that are
            no partition; HP316 minibatches in flight that cannot be; HP317 a stage that does not fit on its device.
    """
    choices = []
    for at, (worker, group) in enumerate(zip(decisions.virtual_workers, allocation.groups, strict=True)):
        where = f"--decisions: virtual_workers[{at}]"
        stages = _blocks(chain, worker, where)
        check_stages(chain, stages, where)
        in_flight = tuple(stage.in_flight for stage in worker.stages)
        _check_in_flight(in_flight, decisions.nm, where)
        devices = tuple(cluster.device(stage.device) for stage in worker.stages)
        recompute = tuple(stage.recompute for stage in worker.stages)
        choices.append(WorkerChoice(group, devices, stages, in_flight, recompute))
    remote = remote_fraction(allocation, cluster, decisions.placement)
    workers = cost_choices(
        chain,
        cluster,
        choices,
        nm=decisions.nm,
        staleness=decisions.staleness,
        exchange_ms=partial(_exchange_ms, cluster, remote),
        objective=decisions.objective,
        recompute=Recompute(decisions.recompute),
        bound=bound,
    )
    for at, planned in enumerate(workers):
        _check_memory(planned, f"--decisions: virtual_workers[{at}]")
    return workers


def _exchange_ms(cluster: Cluster, remote: float, device: Device, size_bytes: int) -> float:
    return exchange_ms(cluster, device, size_bytes, remote)


def _blocks(chain: BlockChain, worker: DecidedWorker, where: str) -> list[tuple[int, ...]]:
    """The blocks of each stage."""
    if all(stage.blocks is not None and stage.begins_at is None for stage in worker.stages):
        return [
            _ranges(str(stage.blocks), len(chain), f"{where}.stages[{at}].blocks")
            for at, stage in enumerate(worker.stages)
        ]
    if any(stage.blocks is not None for stage in worker.stages):
        message = "some stages say their blocks, and some where they begin"
        raise ClusterError("HP240", message, where=where, hint="give every stage blocks, or every stage begins_at")
    entries = [stage.begins_at for stage in worker.stages]
    if any(entry is None for entry in entries[1:]):
        missing = entries.index(None, 1)
        raise ClusterError("HP240", "missing", where=f"{where}.stages[{missing}].begins_at", hint="name its first node")
    starts = (0, *split_boundaries(chain, [entry for entry in entries[1:] if entry is not None], where=where))
    if entries[0] is not None and split_boundaries(chain, [entries[0]], where=where, least=0) != (0,):
        raise PlanningError(
            "HP303",
            f"'{entries[0]}' is not where the model begins",
            where=f"{where}.stages[0].begins_at",
            hint=f"write '{chain.blocks[0].nodes[0]}', or leave it out",
        )
    return [tuple(range(lo, hi)) for lo, hi in pairwise((*starts, len(chain)))]


def _ranges(text: str, blocks: int, where: str) -> tuple[int, ...]:
    """Blocks of ``0-57 60``, of a model that has ``blocks``."""
    found: list[int] = []
    for part in text.replace(",", " ").split():
        low, dash, high = part.partition("-")
        if len(part) >= 20 or not low.isdecimal() or (dash and not high.isdecimal()):
            raise ClusterError("HP240", f"'{part}' is no range of blocks", where=where, hint="for example 0-57 60")
        last = int(high if dash else low)
        if last >= blocks or last < int(low):
            hint = "the first number of a range is the smaller; --dump-after coarsen lists the blocks"
            raise ClusterError("HP240", f"'{part}': the blocks are 0 to {blocks - 1}", where=where, hint=hint)
        found += range(int(low), last + 1)
    return tuple(found)


def _check_in_flight(in_flight: Sequence[int], nm: int, where: str) -> None:
    for at, (before, w) in enumerate(pairwise((nm, *in_flight))):
        if w > before:
            limit = f"stage {at - 1} has {before}" if at else f"Nm is {nm}"
            raise PlanningError(
                "HP316",
                f"{w} minibatches in flight, and {limit}",
                where=f"{where}.stages[{at}].in_flight",
                hint="from stage to stage the number stays or falls; the first has at most Nm",
            )


def _check_memory(worker: PlannedWorker, where: str) -> None:
    for at, stage in enumerate(worker.stages):
        if stage.memory["replay"] >= NO_REPLAY:
            raise PlanningError(
                "HP317",
                "the stage cannot run its forward again: it has a module that --opaque keeps whole",
                where=f"{where}.stages[{at}].recompute",
                hint="leave recompute out",
            )
        over = stage.memory["total"] - stage.memory["capacity"]
        if over > 0:
            recompute = "" if stage.recompute else ", or let it recompute"
            raise PlanningError(
                "HP317",
                f"the stage needs {stage.memory['total'] / _MIB:.0f} MiB on {stage.device.id}"
                f" ({stage.device.kind.name}), which is {over / _MIB:.1f} MiB more than it has",
                where=f"{where}.stages[{at}]",
                hint=f"give it fewer blocks or a larger device, lower in_flight{recompute}",
            )


def decisions_of(
    chain: BlockChain,
    allocation: Allocation,
    workers: Sequence[PlannedWorker],
    *,
    partitioner: str,
    objective: str,
    staleness: int,
    placement: str,
    recompute: Recompute,
    update_scale: float | None,
) -> Decisions:
    """The decisions of a plan, which give the same plan again."""
    content = {
        "policy": allocation.policy,
        "partitioner": partitioner,
        "objective": objective,
        "nm": workers[0].nm,
        "staleness": staleness,
        "placement": placement,
        "recompute": recompute.value,
        "update_scale": update_scale,
        "virtual_workers": tuple(
            DecidedWorker(
                stages=_decided_stages(chain, worker),
                unused=tuple(device.id for device in worker.unused),
                ordered=tuple(device.id for device in group.devices) if group.ordered else (),
            )
            for worker, group in zip(workers, allocation.groups, strict=True)
        ),
    }
    return Decisions.model_validate(content)


def _decided_stages(chain: BlockChain, worker: PlannedWorker) -> tuple[DecidedStage, ...]:
    in_order = worker.order == tuple(range(len(chain)))
    stages = []
    for stage in worker.stages:
        blocks = worker.order[slice(*stage.blocks)]
        how = {"begins_at": _name(chain, blocks[0])} if in_order else {"blocks": _range_text(blocks)}
        stages.append(DecidedStage(device=stage.device.id, in_flight=stage.in_flight, recompute=stage.recompute, **how))
    return tuple(stages)


def _name(chain: BlockChain, block: int) -> str:
    """The module that begins with ``block``, if its name says that; else the block's first node."""
    name, node = chain.blocks[block].name, chain.blocks[block].nodes[0]
    try:
        return name if split_boundaries(chain, [name], least=0) == (block,) else node
    except PlanningError:
        return node


def _range_text(blocks: Sequence[int]) -> str:
    starts = [at for at, block in enumerate(blocks) if at == 0 or block != blocks[at - 1] + 1]
    runs = [blocks[a:b] for a, b in pairwise((*starts, len(blocks)))]
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
