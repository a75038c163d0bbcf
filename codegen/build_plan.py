"""Put together what the passes decided: the `Plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetpipe_compiler.codegen.stage_cut import StageCut, cut_stages
from hetpipe_compiler.ir.blocks import BlockChain
from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.ir.plan import Plan, Server, Stage, VirtualWorker, WorkloadRef
from hetpipe_compiler.passes.base import Compilation
from hetpipe_compiler.passes.concurrency import PlannedWorker
from hetpipe_compiler.passes.data_parallel import predict_data_parallel
from hetpipe_compiler.passes.place_parameters import place_parameters, server_memory_bytes

Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PlanRequest:
    """What the user asked for, as far as the plan records it.

    Attributes:
        update_scale: Factor on pushed updates; None: 1/N.
    """

    staleness: int
    placement: str
    update_scale: float | None = None
    seed: int = 0
    weights: bool = True


@dataclass(frozen=True)
class Built:
    """The plan with the stages behind its modules: ``cuts[i]`` are those of ``partitions[i]``."""

    plan: Plan
    partitions: tuple[Bounds, ...]
    cuts: tuple[tuple[StageCut, ...], ...]


def module_file(partition: int, stage: int) -> str:
    """Where a stage's Python lies in the plan folder. Virtual workers with the same partition share it."""
    return f"stages/partition{partition}_stage{stage}.py"


def build_plan(compilation: Compilation, request: PlanRequest, workload: WorkloadRef) -> Built:
    """Assemble the plan of a finished compilation of a model."""
    captured, costs, chain = compilation.captured, compilation.costs, compilation.chain
    allocation, workers, cluster = compilation.allocation, compilation.workers, compilation.cluster
    assert captured is not None
    assert costs is not None
    assert chain is not None
    assert allocation is not None
    assert workers is not None
    partitions = tuple(dict.fromkeys(_bounds(w) for w in workers))
    cuts = tuple(cut_stages(captured, costs, chain, bounds) for bounds in partitions)
    planned = tuple(
        _worker(at, w, chain, cluster, partitions.index(_bounds(w)), cuts[partitions.index(_bounds(w))])
        for at, w in enumerate(workers)
    )
    used = {s.device for w in planned for s in w.stages}
    plan = Plan(
        name=chain.name,
        batch_size=chain.batch_size,
        dynamic_batch=captured.dynamic_batch,
        dynamic_batch_note=captured.dynamic_batch_note,
        samples_per_s=len(planned) * min(w.samples_per_s for w in planned),
        policy=allocation.policy,
        nm=planned[0].nm,
        staleness=request.staleness,
        placement=request.placement,
        update_scale=request.update_scale if request.update_scale is not None else 1.0 / len(planned),
        predicted="profile" if chain.measured else "roofline",
        loss=captured.loss_node().name,
        weights=request.weights,
        seed=request.seed,
        workload=workload,
        cluster=cluster.to_dict(),
        cluster_digest=cluster.digest(),
        unused_devices=tuple(d.id for d in cluster.devices if d.id not in used),
        virtual_workers=planned,
        servers=_servers(planned, chain, cluster, request),
        data_parallel=predict_data_parallel(chain, cluster),
        parameters=captured.parameters,
        buffers=captured.buffers,
        constants=captured.constants,
    )
    return Built(plan, partitions, cuts)


def _bounds(worker: PlannedWorker) -> Bounds:
    return tuple(stage.blocks for stage in worker.stages)


def _worker(
    index: int,
    worker: PlannedWorker,
    chain: BlockChain,
    cluster: Cluster,
    partition: int,
    cuts: Sequence[StageCut],
) -> VirtualWorker:
    stages = []
    for at, (planned, cut) in enumerate(zip(worker.stages, cuts, strict=True)):
        kind = planned.device.kind.name
        whole_ms = float(chain.forward_ms[kind].sum() + chain.backward_ms[kind].sum())
        previous = worker.stages[at - 1].device if at else None
        sizes = {port.name: port.bytes for port in cut.outputs}
        stages.append(
            Stage(
                index=at,
                device=planned.device.id,
                kind=kind,
                nodes=cut.own_nodes,
                blocks=planned.blocks,
                module=module_file(partition, at),
                forward_ms=planned.forward_ms,
                backward_ms=planned.backward_ms,
                stage_ms=planned.stage_ms,
                measured=chain.measured,
                share=(planned.forward_ms + planned.backward_ms) / whole_ms if whole_ms else 0.0,
                memory_bytes=planned.memory,
                receives_bytes=planned.receives_bytes,
                sends_bytes={peer: sum(sizes[n] for n in names) for peer, names in cut.sends.items()},
                in_flight=planned.in_flight,
                inputs=cut.inputs,
                outputs=cut.outputs,
                sends=cut.sends,
                parameters=tuple(t.name for t in cut.parameters),
                buffers=tuple(t.name for t in cut.buffers),
                link_from_previous=cluster.link_between(previous, planned.device).name if previous else None,
            )
        )
    slowest = max(range(len(stages)), key=lambda s: stages[s].stage_ms)
    return VirtualWorker(
        index=index,
        nm=worker.nm,
        bottleneck_ms=worker.bottleneck_ms,
        bottleneck_stage=slowest,
        lower_bound_ms=worker.lower_bound_ms,
        samples_per_s=worker.samples_per_s,
        stages=tuple(stages),
    )


def _servers(
    workers: Sequence[VirtualWorker], chain: BlockChain, cluster: Cluster, request: PlanRequest
) -> tuple[Server, ...]:
    """Which node's server holds each trainable parameter, and what memory that takes."""
    sizes = {p.name: p.bytes for p in chain.parameters}
    owners = [
        {name: cluster.device(s.device).node for s in w.stages for name in s.parameters if name in sizes}
        for w in workers
    ]
    nodes = [node.name for node in cluster.nodes]
    placed = place_parameters(owners, sizes, nodes, request.placement)
    servers = []
    for node in nodes:
        held = tuple(name for name, home in placed.items() if home == node)
        held_bytes = sum(sizes[name] for name in held)
        memory = server_memory_bytes(len(workers), held_bytes, request.staleness)
        servers.append(Server(node=node, parameters=held, memory_bytes=memory))
    return tuple(servers)
