"""Compile: from a model.py and a cluster to a plan folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hetpipe_compiler.codegen.artifact import model_weights, write_artifact
from hetpipe_compiler.codegen.build_plan import build_plan
from hetpipe_compiler.codegen.explain import explain as explanation
from hetpipe_compiler.codegen.plan_folder import check_target
from hetpipe_compiler.compile_graph import compile_graph, is_graph_file, refuse_options
from hetpipe_compiler.files import check_file, write_text
from hetpipe_compiler.frontend.capture import capture
from hetpipe_compiler.frontend.construct import build_real
from hetpipe_compiler.frontend.load import LoadedWorkload, load_workload
from hetpipe_compiler.frontend.profiled_graph import chain_graph
from hetpipe_compiler.garbage import seldom_cyclic_garbage
from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.ir.plan import Plan, WorkloadRef
from hetpipe_compiler.ir.profile_file import Profile
from hetpipe_compiler.options import CompileOptions, CompileResult
from hetpipe_compiler.passes.annotate_cost import AnnotateCost
from hetpipe_compiler.passes.apply_profile import ApplyProfile, load_profiles
from hetpipe_compiler.passes.base import Compilation, Pass, Pipeline
from hetpipe_compiler.passes.coarsen import Coarsen, node_chain
from hetpipe_compiler.passes.eval_mode import EvalMode, compare_with_eval
from hetpipe_compiler.passes.fuse_atomic import FuseAtomic, fuse_atomic
from hetpipe_compiler.passes.normalize import Normalize, normalize
from hetpipe_compiler.passes.optimizer_state import optimizer_memory
from hetpipe_compiler.planning_steps import PlanningSteps
from hetpipe_compiler.verification.verify import Verification, Verifier


@seldom_cyclic_garbage()
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
        model: Path of a model.py that defines ``workload()``, or of a profiled graph file (``.json``).
        cluster: A cluster, or the path of a cluster file.
        out: The plan folder; an earlier plan there is replaced.
        settings: Arguments for ``workload()``.

    Raises:
        HetpipeError: Of the kind and with the code that `hetpipe_compiler.errors` explains; nothing is written then.
    """
    options = options or CompileOptions()
    out = Path(out)
    check_target(out)
    if options.export_graph is not None:
        check_file(options.export_graph)
    cluster = cluster if isinstance(cluster, Cluster) else Cluster.load(cluster)
    if is_graph_file(model):
        refuse_options(Path(model), ["settings"] if settings else [])
        return compile_graph(Path(model), cluster, out, options)
    pipeline = Pipeline(options.dump_after, options.on_dump, options.on_start)
    with pipeline.timed("load"):
        loaded = load_workload(Path(model), settings)
    compilation = Compilation(cluster)
    # What is wrong with a partitioner, a policy or a profile is told before the model is traced.
    steps = PlanningSteps(options)
    for step in steps.first:
        pipeline.run(step, compilation)
    profiles = load_profiles(options.profiles, [kind.name for kind in cluster.kinds()])
    with pipeline.timed("capture"):
        compilation.captured = capture(loaded, evaluation=True, opaque=options.opaque, seed=options.seed)
    for step in (*_model_passes(loaded, compilation, options, profiles), *steps.planning):
        pipeline.run(step, compilation)
    explained = steps.explanation(compilation)
    with pipeline.timed("weights"):
        model_built, weights = _initial_weights(loaded, compilation, options)
    with pipeline.timed("codegen"):
        plan, verification = _write_plan(out, loaded, model_built, weights, compilation, steps, pipeline)
    return CompileResult(plan, pipeline.seconds, verification, explained)


def _initial_weights(
    loaded: LoadedWorkload, compilation: Compilation, options: CompileOptions
) -> tuple[torch.nn.Module | None, dict[str, torch.Tensor] | None]:
    """The real model and its values; None without ``options.weights``, and no values where it is on meta itself."""
    assert compilation.captured is not None
    if not options.weights:
        return None, None
    model = build_real(loaded, options.seed)
    on_meta = any(p.is_meta for p in model.parameters())
    return model, None if on_meta else model_weights(model, compilation.captured)


def _write_plan(
    out: Path,
    loaded: LoadedWorkload,
    model: torch.nn.Module | None,
    weights: dict[str, torch.Tensor] | None,
    compilation: Compilation,
    steps: PlanningSteps,
    pipeline: Pipeline,
) -> tuple[Plan, Verification | None]:
    """Write the plan folder; what ``--verify`` found, if it is asked for."""
    captured, costs, schedule, options = compilation.captured, compilation.costs, compilation.schedule, steps.options
    assert captured is not None
    assert costs is not None
    assert schedule is not None
    reference = WorkloadRef(path="model.py", settings=loaded.settings, digest=loaded.digest)
    built = build_plan(compilation, replace(options, weights=weights is not None), reference)
    found: list[Verification] = []

    def before_it_counts(folder: Path) -> None:
        if options.verify:
            with pipeline.timed("verify"):
                held = Verifier(loaded, model or build_real(loaded, options.seed), options.seed)
                found.append(held.verify(folder))
        if options.export_graph is not None:
            _export(options.export_graph, compilation)

    write_artifact(
        out,
        built,
        schedule,
        loaded,
        captured,
        costs,
        weights,
        before_it_counts,
        decisions=steps.decisions_text(compilation),
    )
    return built.plan, found[0] if found else None


def explain(model: str | Path, settings: dict[str, Any] | None = None, opaque: Sequence[str] = ()) -> str:
    """What is captured of ``model``, as text for people; no cluster is needed.

    Raises:
        WorkloadError: The model cannot be loaded or captured.
    """
    loaded = load_workload(Path(model), settings)
    captured = compare_with_eval(normalize(capture(loaded, evaluation=True, opaque=opaque)))
    return explanation(captured, fuse_atomic(captured), _name(loaded))


def _name(loaded: LoadedWorkload) -> str:
    return loaded.path.resolve().parent.name if loaded.path.stem == "model" else loaded.path.stem


def _export(path: Path, compilation: Compilation) -> None:
    """Write the graph before it was coarsened, a node an operator. Raises `ArtifactError` HP411."""
    captured, costs, components, chain = (
        compilation.captured,
        compilation.costs,
        compilation.components,
        compilation.chain,
    )
    assert captured is not None
    assert costs is not None
    assert components is not None
    assert chain is not None
    kinds = compilation.cluster.kinds()
    whole = node_chain(captured, costs, components, kinds, name=chain.name, optimizer_factor=chain.optimizer_factor)
    whole = replace(whole, step_factor=chain.step_factor, loop_factor=chain.loop_factor)
    graph = chain_graph(whole, {name: cost.output_bytes for name, cost in costs.items()})
    write_text(path, graph.to_json())


def _model_passes(
    loaded: LoadedWorkload, compilation: Compilation, options: CompileOptions, profiles: Sequence[Profile]
) -> tuple[Pass, ...]:
    assert compilation.captured is not None
    trainable = {t.name for t in compilation.captured.parameters if t.trainable}
    optimizer = optimizer_memory(
        loaded.workload.optimizer, {n: t for n, t in compilation.captured.meta.items() if n in trainable}
    )
    return (
        Normalize(),
        EvalMode(),
        AnnotateCost(),
        ApplyProfile(options.profiles, tuple(profiles)),
        FuseAtomic(),
        Coarsen(
            model_name=_name(loaded),
            optimizer_factor=optimizer.state,
            step_factor=optimizer.step,
            loop_factor=optimizer.loop,
        ),
    )
