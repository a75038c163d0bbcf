"""Compile a kind of `models` at several cuts, and run it whole and in stages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import models
import torch
from oracles.stages import StageChain
from torch.utils import _pytree as pytree

from hetpipe_compiler.codegen.artifact import model_weights, write_artifact
from hetpipe_compiler.codegen.build_plan import build_plan
from hetpipe_compiler.frontend.capture import capture
from hetpipe_compiler.frontend.construct import build_real
from hetpipe_compiler.frontend.load import LoadedWorkload, load_workload
from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.ir.plan import Plan, WorkloadRef
from hetpipe_compiler.ir.workload import Workload
from hetpipe_compiler.options import CompileOptions
from hetpipe_compiler.passes.allocate import Allocation, Group
from hetpipe_compiler.passes.annotate_cost import AnnotateCost
from hetpipe_compiler.passes.base import Compilation, Pipeline
from hetpipe_compiler.passes.coarsen import Coarsen
from hetpipe_compiler.passes.eval_mode import EvalMode
from hetpipe_compiler.passes.fuse_atomic import FuseAtomic
from hetpipe_compiler.passes.normalize import Normalize
from hetpipe_compiler.passes.planning import MakeSchedule, Partition, PlannerOptions
from hetpipe_compiler.runtime.forward_only import ForwardOnly

MODELS = Path(models.__file__)


def cluster_of(workers: int) -> Cluster:
    """One node with three equal devices for each virtual worker."""
    nodes = [{"name": f"n{i}", "devices": {"titan-v": 3}, "link": "pcie3-x16"} for i in range(workers)]
    return Cluster.from_dict({"name": "kinds", "nodes": nodes, "network": "infiniband-fdr"})


def compile_kind(
    name: str, folder: Path, most: int = 4, nm: int = 1, staleness: int = 0
) -> tuple[Path, LoadedWorkload, Plan]:
    """A plan whose virtual workers cut the model at different places: in two stages at up to ``most``, in three at
    one."""
    loaded = load_workload(MODELS, {"name": name})
    captured = capture(loaded, evaluation=True, opaque=models.OPAQUE.get(name, ()))
    compilation = Compilation(cluster_of(1), captured=captured)
    pipeline = Pipeline()
    for step in (Normalize(), EvalMode(), AnnotateCost(), FuseAtomic(), Coarsen(model_name=name, optimizer_factor=1.0)):
        pipeline.run(step, compilation)
    assert compilation.chain is not None
    blocks = len(compilation.chain)
    cuts: list[tuple[int, ...]] = [(1 + i * max(1, (blocks - 1) // most),) for i in range(min(most, blocks - 1))]
    cuts += [(blocks // 3, 2 * blocks // 3)] if blocks >= 3 else []
    cuts = cuts or [()]
    compilation.cluster = cluster_of(len(cuts))
    devices = compilation.cluster.devices
    groups = tuple(Group(devices[3 * i : 3 * i + len(cut) + 1], ordered=True) for i, cut in enumerate(cuts))
    compilation.allocation = Allocation("kinds", groups, ())
    for step in (Partition(PlannerOptions(nm, staleness, splits=tuple(cuts))), MakeSchedule(staleness)):
        pipeline.run(step, compilation)
    captured, costs, schedule = compilation.captured, compilation.costs, compilation.schedule
    assert captured is not None
    assert costs is not None
    assert schedule is not None
    reference = WorkloadRef(path="model.py", settings=loaded.settings, digest=loaded.digest)
    built = build_plan(compilation, CompileOptions(staleness=staleness), reference)
    weights = model_weights(build_real(loaded, 0), captured)
    write_artifact(folder, built, schedule, loaded, captured, costs, weights)
    return folder, loaded, built.plan


def loss_of(workload: Workload, model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Model and loss called as people call them; nothing of the compiler's is used."""
    if isinstance(batch, dict):
        targets = [batch[key] for key in workload.targets] if isinstance(workload.targets, (list, tuple)) else []
        inputs = {k: v for k, v in batch.items() if isinstance(workload.targets, int) or k not in workload.targets}
        output = model(**inputs)
    else:
        count = len(batch) - (
            workload.targets if workload.loss is not None and isinstance(workload.targets, int) else 0
        )
        output, targets = model(*batch[:count]), list(batch[count:])
    loss = workload.loss(output, *targets) if workload.loss is not None else output
    found: torch.Tensor = loss["loss"] if isinstance(loss, dict) else loss
    return found


def eager(loaded: LoadedWorkload) -> dict[str, torch.Tensor]:
    """Loss, gradients and buffers of the user's model itself."""
    torch.manual_seed(0)
    model = loaded.workload.model().train()
    batch = loaded.workload.example_batch()
    torch.manual_seed(11)
    loss = loss_of(loaded.workload, model, batch)
    loss.backward()
    found = {"loss": loss.detach()}
    found |= {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found | {f"buffer {n}": b for n, b in model.named_buffers()}


def eager_in_eval(loaded: LoadedWorkload) -> torch.Tensor:
    """Loss of the user's model itself in eval mode."""
    torch.manual_seed(0)
    model = loaded.workload.model().eval()
    batch = loaded.workload.example_batch()
    torch.manual_seed(11)
    return loss_of(loaded.workload, model, batch).detach()


def chained_in_eval(folder: Path, loaded: LoadedWorkload, vw: int) -> torch.Tensor:
    """The same of the emitted stages."""
    stages = ForwardOnly(folder, worker=vw)
    torch.manual_seed(11)
    return stages.loss(pytree.tree_leaves(loaded.workload.example_batch()))


def chained(folder: Path, loaded: LoadedWorkload, vw: int) -> dict[str, torch.Tensor]:
    """The same of the emitted stages; buffers that no stage needs are left out."""
    chain = StageChain(folder, None, vw)
    torch.manual_seed(11)
    loss, gradients = chain.loss_and_gradients(pytree.tree_leaves(loaded.workload.example_batch()))
    return {"loss": loss, **gradients, **{f"buffer {n}": b for n, b in chain.buffers().items()}}


def load_stage(folder: Path, module: str) -> torch.nn.Module:
    """A fresh instance of an emitted stage, importable by its name so that it pickles."""
    path = folder / module
    spec = importlib.util.spec_from_file_location(f"emitted_{abs(hash(path))}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    source = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = source
    spec.loader.exec_module(source)
    stage: torch.nn.Module = source.Stage()
    return stage
