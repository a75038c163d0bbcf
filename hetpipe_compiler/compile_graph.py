"""Compile from a profiled graph file in place of a model: a plan to look at, without stages to run. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hetpipe_compiler.codegen.graph_plan import build_graph_plan, write_graph_plan
from hetpipe_compiler.codegen.plan_folder import check_target
from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.profiled_graph import read_profiled_graph
from hetpipe_compiler.garbage import no_cyclic_garbage
from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.options import CompileOptions, CompileResult
from hetpipe_compiler.passes.base import Compilation, Pass, Pipeline
from hetpipe_compiler.passes.multilevel import MOST_BLOCKS, shorten_chain
from hetpipe_compiler.planning_steps import PlanningSteps


def is_graph_file(path: str | Path) -> bool:
    """Whether ``path`` is taken for a profiled graph file: by its suffix."""
    return Path(path).suffix.lower() == ".json"


@dataclass(frozen=True)
class ReadGraph(Pass):
    """Read the file: see `hetpipe_compiler.frontend.profiled_graph`."""

    name: ClassVar[str] = "read_graph"
    ensures: ClassVar[tuple[str, ...]] = ("chain",)

    path: Path

    def run(self, compilation: Compilation) -> None:
        compilation.chain = read_profiled_graph(self.path, [kind.name for kind in compilation.cluster.kinds()])


@dataclass(frozen=True)
class Shorten(Pass):
    """At most ``max_blocks``: see `multilevel`."""

    name: ClassVar[str] = "coarsen"
    requires: ClassVar[tuple[str, ...]] = ("chain",)
    ensures: ClassVar[tuple[str, ...]] = ("chain",)

    max_blocks: int = MOST_BLOCKS

    def run(self, compilation: Compilation) -> None:
        whole = compilation.chain
        assert whole is not None
        most_bytes = max(kind.memory_bytes for kind in compilation.cluster.kinds())
        compilation.chain = shorten_chain(whole, self.max_blocks, most_bytes)
        compilation.whole = whole if len(compilation.chain) < len(whole) else None


@no_cyclic_garbage()
def compile_graph(graph: Path, cluster: Cluster, out: Path, options: CompileOptions) -> CompileResult:
    """Plan ``graph`` for ``cluster`` into the folder ``out``.

    Raises:
        WorkloadError: HP130-HP136 the graph; HP137 an option that needs a model.
        HetpipeError: As the planner does; nothing is written then.
    """
    refuse_options(graph, _needs_model(options))
    check_target(out)
    compilation = Compilation(cluster)
    pipeline = Pipeline(options.dump_after, options.on_dump, options.on_start)
    steps = PlanningSteps(options)
    for step in steps.first:
        pipeline.run(step, compilation)
    pipeline.run(ReadGraph(graph), compilation)
    whole = compilation.chain
    for step in (Shorten(), *steps.planning):
        pipeline.run(step, compilation)
    assert whole is not None
    assert compilation.schedule is not None
    explained = steps.explanation(compilation)
    with pipeline.timed("codegen"):
        plan = build_graph_plan(compilation, options)
        write_graph_plan(out, plan, compilation.schedule, whole, steps.decisions_text(compilation))
    return CompileResult(plan, pipeline.seconds, explanation=explained)


def _needs_model(options: CompileOptions) -> list[str]:
    given = {
        "--seed": options.seed != 0,
        "--no-weights": not options.weights,
        "--verify": options.verify,
        "--opaque": bool(options.opaque),
        "--profile": bool(options.profiles),
        "--export-graph": options.export_graph is not None,
    }
    passes = {"normalize", "eval_mode", "annotate_cost", "apply_profile", "fuse_atomic"} & options.dump_after
    return [name for name, there in given.items() if there] + [f"--dump-after {name}" for name in sorted(passes)]


def refuse_options(graph: Path, names: list[str]) -> None:
    """Raise `WorkloadError` HP137 if there are ``names``: options that mean nothing without a model."""
    if names:
        raise WorkloadError(
            "HP137",
            f"{names[0]} needs a model.py, and this is a profiled graph",
            where=str(graph),
            hint=f"leave out {', '.join(names)}",
        )
