"""From planned virtual workers to the `Plan`, for a model and for a profiled graph alike. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hetpipe_compiler.ir.blocks import BlockChain
from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.ir.plan import Plan, Port, Server, Stage, VirtualWorker
from hetpipe_compiler.options import CompileOptions
from hetpipe_compiler.passes.base import Compilation
from hetpipe_compiler.passes.concurrency import PlannedWorker
from hetpipe_compiler.passes.data_parallel import predict_data_parallel
from hetpipe_compiler.passes.place_parameters import place_parameters, server_memory_bytes


@dataclass(frozen=True)
class StageParts:
    """What `Stage` says of a stage beside what the planner decided; see there."""

    nodes: tuple[str, ...]
    module: str | None = None
    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()
    sends: dict[int, tuple[str, ...]] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()


def assemble_plan(
    compilation: Compilation, options: CompileOptions, parts: Sequence[Sequence[StageParts]], **of_model: Any
) -> Plan:
    """The plan of a finished compilation.

    Args:
        options: ``weights``: whether the folder has them.
        parts: For each virtual worker, of each of its stages.
        of_model: Further fields of `Plan`: what only a plan made from a model has.
    """
    chain, allocation, workers, cluster = (
        compilation.chain,
        compilation.allocation,
        compilation.workers,
        compilation.cluster,
    )
    assert chain is not None
    assert allocation is not None
    assert workers is not None
    bounds = compilation.uncoarsened_bounds_ms or (None,) * len(workers)
    planned = tuple(
        _worker(at, worker, bound_ms, chain, cluster, stages)
        for at, (worker, bound_ms, stages) in enumerate(zip(workers, bounds, parts, strict=True))
    )
    used = {s.device for w in planned for s in w.stages}
    any_measured = any(s.measured_share > 0 for w in planned for s in w.stages)
    return Plan(
        name=chain.name,
        batch_size=chain.batch_size,
        samples_per_s=len(planned) * min(w.samples_per_s for w in planned),
        policy=allocation.policy,
        partitioner=options.made_by,
        nm=planned[0].nm,
        staleness=options.staleness,
        placement=options.placement,
        update_scale=options.update_scale if options.update_scale is not None else 1.0 / len(planned),
        predicted="profile" if any_measured else "roofline",
        runs=compilation.runs,
        weights=options.weights,
        seed=options.seed,
        cluster=cluster.to_dict(),
        cluster_digest=cluster.digest(),
        unused_devices=tuple(d.id for d in cluster.devices if d.id not in used),
        virtual_workers=planned,
        servers=_servers(planned, chain, cluster, options),
        data_parallel=predict_data_parallel(chain, cluster),
        **of_model,
    )


def _worker(
    index: int,
    worker: PlannedWorker,
    uncoarsened_bound_ms: float | None,
    chain: BlockChain,
    cluster: Cluster,
    parts: Sequence[StageParts],
) -> VirtualWorker:
    stages = []
    for at, (planned, part) in enumerate(zip(worker.stages, parts, strict=True)):
        kind = planned.device.kind.name
        once_ms = planned.forward_ms + planned.backward_ms - (planned.forward_ms if planned.recompute else 0.0)
        whole_ms = float(chain.forward_ms[kind].sum() + chain.backward_ms[kind].sum())
        measured_share = chain.permuted(worker.order).measured_share(kind, planned.blocks)
        sizes = {port.name: port.bytes for port in part.outputs}
        stages.append(
            Stage(
                index=at,
                device=planned.device.id,
                kind=kind,
                nodes=part.nodes,
                blocks=planned.blocks,
                module=part.module,
                forward_ms=planned.forward_ms,
                backward_ms=planned.backward_ms,
                stage_ms=planned.stage_ms,
                measured=measured_share == 1.0,
                measured_share=measured_share,
                share=once_ms / whole_ms if whole_ms else 0.0,
                memory_bytes=planned.memory,
                receives_bytes=planned.receives_bytes,
                sends_bytes={peer: sum(sizes[n] for n in names) for peer, names in part.sends.items()},
                sends_links={
                    peer: cluster.link_between(planned.device, worker.stages[peer].device).name for peer in part.sends
                },
                in_flight=planned.in_flight,
                recompute=planned.recompute,
                inputs=part.inputs,
                outputs=part.outputs,
                sends=part.sends,
                parameters=part.parameters,
                buffers=part.buffers,
            )
        )
    slowest = max(range(len(stages)), key=lambda s: stages[s].stage_ms)
    return VirtualWorker(
        index=index,
        nm=worker.nm,
        bottleneck_ms=worker.bottleneck_ms,
        bottleneck_stage=slowest,
        lower_bound_ms=worker.lower_bound_ms,
        optimal=worker.optimal,
        searched=worker.searched,
        uncoarsened_bound_ms=uncoarsened_bound_ms,
        samples_per_s=worker.samples_per_s,
        stages=tuple(stages),
    )


def _servers(
    workers: Sequence[VirtualWorker], chain: BlockChain, cluster: Cluster, options: CompileOptions
) -> tuple[Server, ...]:
    """Which node's server holds each trainable parameter, and what memory that takes."""
    sizes = {p.name: p.bytes for p in chain.parameters}
    owners = [
        {name: cluster.device(s.device).node for s in w.stages for name in s.parameters if name in sizes}
        for w in workers
    ]
    nodes = [node.name for node in cluster.nodes]
    placed = place_parameters(owners, sizes, nodes, options.placement)
    servers = []
    for node in nodes:
        held = tuple(name for name, home in placed.items() if home == node)
        held_bytes = sum(sizes[name] for name in held)
        memory = server_memory_bytes(len(workers), held_bytes, options.staleness)
        servers.append(Server(node=node, parameters=held, memory_bytes=memory))
    return tuple(servers)
