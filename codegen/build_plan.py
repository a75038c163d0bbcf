"""Put together what the passes decided about a model: its stages, and the `Plan`."""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe_compiler.codegen.assemble_plan import StageParts, assemble_plan
from hetpipe_compiler.codegen.stage_cut import StageCut, cut_stages
from hetpipe_compiler.ir.plan import Plan, WorkloadRef
from hetpipe_compiler.options import CompileOptions
from hetpipe_compiler.passes.base import Compilation
from hetpipe_compiler.passes.concurrency import PlannedWorker

#: The order of the chain's blocks, and the stages as half-open intervals of it.
Cuts = tuple[tuple[int, ...], tuple[tuple[int, int], ...]]


@dataclass(frozen=True)
class Built:
    """The plan with the stages behind its modules: ``cuts[i]`` are those of ``partitions[i]``."""

    plan: Plan
    partitions: tuple[Cuts, ...]
    cuts: tuple[tuple[StageCut, ...], ...]


def module_file(partition: int, stage: int) -> str:
    """Where a stage's Python lies in the plan folder. Virtual workers with the same partition share it."""
    return f"stages/partition{partition}_stage{stage}.py"


def build_plan(compilation: Compilation, options: CompileOptions, workload: WorkloadRef) -> Built:
    """Assemble the plan of a finished compilation of a model; ``options.weights``: whether the folder has them."""
    captured, costs, chain, workers = compilation.captured, compilation.costs, compilation.chain, compilation.workers
    assert captured is not None
    assert costs is not None
    assert chain is not None
    assert workers is not None
    partitions = tuple(dict.fromkeys(_cuts(w) for w in workers))
    cuts = tuple(cut_stages(captured, costs, chain.permuted(order), bounds) for order, bounds in partitions)
    parts = [tuple(_parts(cut, at, stage) for stage, cut in enumerate(stages)) for at, stages in enumerate(cuts)]
    plan = assemble_plan(
        compilation,
        options,
        [parts[partitions.index(_cuts(worker))] for worker in workers],
        dynamic_batch=captured.dynamic_batch,
        dynamic_batch_note=captured.dynamic_batch_note,
        evaluation=captured.evaluation,
        evaluation_note=captured.evaluation_note,
        loss=captured.loss_node().name,
        counted_with="cpu",
        workload=workload,
        parameters=captured.parameters,
        buffers=captured.buffers,
        constants=captured.constants,
    )
    return Built(plan, partitions, cuts)


def _cuts(worker: PlannedWorker) -> Cuts:
    return worker.order, tuple(stage.blocks for stage in worker.stages)


def _parts(cut: StageCut, partition: int, stage: int) -> StageParts:
    return StageParts(
        nodes=cut.own_nodes,
        module=module_file(partition, stage),
        inputs=cut.inputs,
        outputs=cut.outputs,
        sends=cut.sends,
        parameters=tuple(t.name for t in cut.parameters),
        buffers=tuple(t.name for t in cut.buffers),
    )
