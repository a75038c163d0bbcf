"""Compile a model cut at any legal place, and hold the stages to it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import networkx as nx
import torch
from random_models.strategy import DrawnCut

from hetpipe_compiler.codegen.artifact import write_artifact
from hetpipe_compiler.codegen.build_plan import build_plan
from hetpipe_compiler.frontend.capture import capture
from hetpipe_compiler.frontend.construct import build_real
from hetpipe_compiler.frontend.load import LoadedWorkload, load_workload
from hetpipe_compiler.ir.blocks import BlockChain
from hetpipe_compiler.ir.cluster import Cluster, Device
from hetpipe_compiler.ir.plan import Plan, WorkloadRef
from hetpipe_compiler.options import CompileOptions
from hetpipe_compiler.passes.allocate import Allocation, Group
from hetpipe_compiler.passes.annotate_cost import AnnotateCost
from hetpipe_compiler.passes.base import Compilation, Pipeline
from hetpipe_compiler.passes.coarsen import Coarsen
from hetpipe_compiler.passes.concurrency import PlannedWorker
from hetpipe_compiler.passes.eval_mode import EvalMode
from hetpipe_compiler.passes.fuse_atomic import FuseAtomic
from hetpipe_compiler.passes.normalize import Normalize
from hetpipe_compiler.passes.partition import PlannedStage
from hetpipe_compiler.passes.planning import MakeSchedule
from hetpipe_compiler.verification.original import Original
from hetpipe_compiler.verification.outcome import Difference, Outcome, Reference, largest_difference
from hetpipe_compiler.verification.stages import WrittenStages
from hetpipe_compiler.verification.verify import Verification, Verifier

#: Another batch size for plans that run at any.
OTHER_BATCH = 7


def load(text: str, folder: Path) -> LoadedWorkload:
    """The workload in ``text``, from a file with a name of its own: nothing of an earlier one is found in caches."""
    path = folder / f"model_{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
    path.write_text(text)
    return load_workload(path)


def legal_cut(chain: BlockChain, drawn: DrawnCut) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """An order of the blocks in which each comes after what it reads, and intervals of it: any nested closed sets."""
    count = len(chain)
    order = list(range(count))
    if drawn.order:
        graph = nx.DiGraph()
        graph.add_nodes_from(order)
        graph.add_edges_from((v.producer, reader) for v in chain.values for reader in v.consumers)
        graph.add_edges_from((0, block) for block in order[1:])
        graph.add_edges_from((block, count - 1) for block in order[:-1])
        draw = random.Random(drawn.order)
        rank = {block: draw.random() for block in order}
        order = list(nx.lexicographical_topological_sort(graph, key=rank.__getitem__))
    starts = sorted({0, *(1 + at % (count - 1) for at in drawn.starts if count > 1)})
    return tuple(order), tuple(zip(starts, [*starts[1:], count], strict=True))


def compiled(loaded: LoadedWorkload, cuts: Sequence[DrawnCut], folder: Path) -> Plan:
    """Write a plan with one virtual worker a cut. Raises what the compiler raises."""
    nodes = [{"name": f"n{i}", "devices": {"titan-v": 4}, "link": "pcie3-x16"} for i in range(len(cuts))]
    cluster = Cluster.from_dict({"name": "random", "nodes": nodes, "network": "infiniband-fdr"})
    compilation, pipeline = Compilation(cluster, captured=capture(loaded, evaluation=True)), Pipeline()
    for step in (Normalize(), EvalMode(), AnnotateCost(), FuseAtomic(), Coarsen(model_name="n", optimizer_factor=0.0)):
        pipeline.run(step, compilation)
    captured, costs, chain = compilation.captured, compilation.costs, compilation.chain
    assert captured is not None
    assert costs is not None
    assert chain is not None
    places = [legal_cut(chain, cut) for cut in cuts]
    devices = [cluster.devices[4 * at : 4 * at + len(bounds)] for at, (_, bounds) in enumerate(places)]
    compilation.allocation = Allocation("random", tuple(Group(d, ordered=True) for d in devices), ())
    workers = (_worker(*place, d) for place, d in zip(places, devices, strict=True))
    compilation.workers = tuple(workers)
    pipeline.run(MakeSchedule(), compilation)
    assert compilation.schedule is not None
    reference = WorkloadRef(path="model.py", settings={}, digest="")
    built = build_plan(compilation, CompileOptions(weights=False), reference)
    write_artifact(folder, built, compilation.schedule, loaded, captured, costs, None)
    return built.plan


def _worker(order: tuple[int, ...], bounds: Iterable[tuple[int, int]], devices: Sequence[Device]) -> PlannedWorker:
    """The planner's numbers mean nothing here."""
    stages = tuple(
        PlannedStage(d, blocks, 1.0, 1.0, 0.0, 2.0, 0, {"total": 1, "capacity": 2}, 1)
        for blocks, d in zip(bounds, devices, strict=True)
    )
    return PlannedWorker(stages, 1, 2.0, 2.0, 2.0, 1.0, order=order)


def verified(loaded: LoadedWorkload, folder: Path, plan: Plan) -> Verification:
    """Hold the plan to the model on its example and, if it takes any batch size, on a larger batch."""
    model = build_real(loaded, 0)
    found = Verifier(loaded, model).verify(folder, plan)
    if plan.dynamic_batch:
        difference = _at_other_batch(loaded, folder, plan)
        if difference.relative > found.allowed:
            raise AssertionError(f"at batch size {OTHER_BATCH}: {difference}")
    return found


def _at_other_batch(loaded: LoadedWorkload, folder: Path, plan: Plan) -> Difference:
    original = Original(loaded, build_real(loaded, 0), 0)
    original.widen(True)
    rows = torch.arange(OTHER_BATCH)
    leaves = [v[rows % len(v)] if isinstance(v, torch.Tensor) else v for v in original.leaves]
    expected, differences = original.run(leaves), []
    reference = Reference(expected)
    for worker in range(len(plan.virtual_workers)):
        stages = WrittenStages(folder, plan, worker, original.tensors, True)
        found, met = stages.run(leaves, 0)
        assert met == original.draws
        absent = {n: original.tensors[n.removeprefix("buffer ")] for n in expected.values if n.startswith("buffer ")}
        differences.append(largest_difference(reference, Outcome({**absent, **found.values})))
    return max(differences, key=lambda d: d.relative)
