"""Compile: from a model.py and a cluster to a plan folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetpipe_compiler.codegen.artifact import check_target, model_weights, write_artifact
from hetpipe_compiler.codegen.build_plan import PlanRequest, build_plan
from hetpipe_compiler.frontend.capture import build_real, capture
from hetpipe_compiler.frontend.load import LoadedWorkload, load_workload
from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.ir.plan import Plan, WorkloadRef
from hetpipe_compiler.passes.annotate_cost import AnnotateCost
from hetpipe_compiler.passes.base import Compilation, Pass, Pipeline
from hetpipe_compiler.passes.coarsen import Coarsen
from hetpipe_compiler.passes.fuse_atomic import FuseAtomic
from hetpipe_compiler.passes.normalize import Normalize
from hetpipe_compiler.passes.optimizer_state import optimizer_factor
from hetpipe_compiler.passes.planning import Allocate, MakeSchedule, Partition, Verify


@dataclass(frozen=True)
class CompileOptions:
    """How to plan.

    Attributes:
        policy: ``NP``, ``ED``, ``HD`` or the path of a groups file.
        nm: Minibatches in flight; None: the smallest within 1 % of the best.
        staleness: D, in clocks.
        placement: ``local`` or ``round-robin``: where parameters live.
        update_scale: Factor that the servers put on a pushed update; None: 1/N.
        splits: Cuts by hand, one for each virtual worker or one for all.
        seed: Makes the initial weights.
        weights: Whether to write them.
        dump_after: Names of passes whose result goes to ``on_dump``.
    """

    policy: str = "ED"
    nm: int | None = None
    staleness: int = 0
    placement: str = "local"
    update_scale: float | None = None
    splits: tuple[tuple[str | int, ...], ...] | None = None
    seed: int = 0
    weights: bool = True
    dump_after: frozenset[str] = frozenset()
    on_dump: Callable[[str, str], Any] = field(default=lambda _name, _text: None)
    on_start: Callable[[str], Any] = field(default=lambda _name: None)


@dataclass(frozen=True)
class CompileResult:
    """The plan and the seconds that each step took."""

    plan: Plan
    seconds: dict[str, float]


def compile(
    model: str | Path,
    cluster: str | Path | Cluster,
    out: str | Path,
    *,
    settings: dict[str, Any] | None = None,
    options: CompileOptions | None = None,
) -> CompileResult:
    """Compile ``model`` for ``cluster`` into the folder ``out``.

    Args:
        model: Path of a model.py that defines ``workload()``.
        cluster: A cluster, or the path of a cluster file.
        out: The plan folder; an earlier plan there is replaced.
        settings: Arguments for ``workload()``.

    Raises:
        HetpipeError: Of the kind and with the code that `hetpipe_compiler.errors` explains; nothing is written then.
    """
    options = options or CompileOptions()
    out = Path(out)
    check_target(out)
    cluster = cluster if isinstance(cluster, Cluster) else Cluster.load(cluster)
    options.on_start("load")
    loaded = load_workload(Path(model), settings)
    compilation = Compilation(cluster)
    pipeline = Pipeline(options.dump_after, options.on_dump, options.on_start)
    # The groups cost nothing to make: a wrong policy is told before the model is traced.
    pipeline.run(Allocate(options.policy), compilation)
    with pipeline.timed("capture"):
        compilation.captured = capture(loaded)
    for step in _passes(loaded, compilation, options):
        pipeline.run(step, compilation)
    captured, costs, schedule = compilation.captured, compilation.costs, compilation.schedule
    assert captured is not None
    assert costs is not None
    assert schedule is not None
    with pipeline.timed("weights"):
        model_built = build_real(loaded, options.seed) if options.weights else None
        on_meta = model_built is not None and any(p.is_meta for p in model_built.parameters())
        weights = model_weights(model_built, captured) if model_built is not None and not on_meta else None
    request = PlanRequest(
        options.staleness, options.placement, options.update_scale, options.seed, weights=weights is not None
    )
    reference = WorkloadRef(path="model.py", settings=loaded.settings, digest=loaded.digest)
    with pipeline.timed("codegen"):
        built = build_plan(compilation, request, reference)
        write_artifact(out, built, schedule, loaded, captured, costs, weights)
    return CompileResult(built.plan, pipeline.seconds)


def _passes(loaded: LoadedWorkload, compilation: Compilation, options: CompileOptions) -> tuple[Pass, ...]:
    assert compilation.captured is not None
    trainable = {t.name for t in compilation.captured.parameters if t.trainable}
    factor = optimizer_factor(
        loaded.workload.optimizer, {n: t for n, t in compilation.captured.meta.items() if n in trainable}
    )
    name = loaded.path.resolve().parent.name if loaded.path.stem == "model" else loaded.path.stem
    return (
        Normalize(),
        AnnotateCost(),
        FuseAtomic(),
        Coarsen(model_name=name, optimizer_factor=factor),
        Partition(options.nm, options.staleness, options.placement, options.splits),
        MakeSchedule(options.staleness),
        Verify(),
    )
