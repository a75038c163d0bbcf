"""A run's stage times as profiles for the next compile (``hetpipe-inspect PLAN --compare RUN --write-profiles DIR``).

A run measures whole stages, a profile has operators. Per device kind:

1. A stage's measured forward time is shared out among its nodes in proportion to their predicted forward times; the
   backward likewise, additions of gradients among its parts. Where the backward runs the forward again, that is taken
   off before.
2. An operator (`hetpipe_compiler.passes.node_key`) has the mean over all its calls, in every stage of the kind. So the
   sum over the stages of a kind is what was measured; and of each stage, where none of its operators is in another.
3. Operators that ran on no device of the kind have their predicted times, times measured / predicted of all the kind's
   stages. They stay estimates: without that, what was not measured would look faster or slower than what was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from hetpipe_compiler.codegen.compare import StageComparison, paced, run_options
from hetpipe_compiler.codegen.graph_file import GraphNode, load_graph
from hetpipe_compiler.errors import ArtifactError
from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.ir.plan import Plan, Stage
from hetpipe_compiler.ir.profile_file import Operator, Profile


def why_no_measurement(plan: Plan, options: Mapping[str, Any]) -> str:
    """Why the times of a run with these options (`run_options`) say nothing of the plan's devices; empty if they do."""
    if paced(plan, options):
        return "the cluster is emulated: the run waited for the predicted times"
    if options.get("backend", "cpu") != "cpu":
        return "on GPUs a run times the launch of its operators, not their end: measure with hetpipe-profile"
    for kind in Cluster.from_dict(plan.cluster).kinds():
        if not kind.is_cpu:
            return f"it ran on CPUs, but {kind.name} is a GPU"
    return ""


def run_profiles(plan: Plan, folder: Path, run: Path, compared: Sequence[StageComparison]) -> tuple[Profile, ...]:
    """A profile for each device kind that stages of ``compared`` ran on.

    Args:
        folder: Of the plan.
        run: What ``compared`` was read from.

    Raises:
        ArtifactError: HP440, the plan's graph is damaged; HP452, the times are no measurement of the plan's devices;
            HP453, the graph does not say which operators its nodes are.
    """
    options, graph = run_options(run), load_graph(folder)
    if why := why_no_measurement(plan, options):
        raise ArtifactError(
            "HP452",
            f"these times are no measurement: {why}",
            where=str(run),
            hint="give a run on the plan's own devices",
        )
    if not any(node.key for node in graph):
        raise ArtifactError(
            "HP453",
            "graph.json does not say which operators its nodes are",
            where=str(folder),
            hint="compile model.py again with this release, and run that plan",
        )
    stages = [(plan.virtual_workers[c.vw].stages[c.stage], c) for c in compared if c.count]
    backend, name = options.get("backend", "cpu"), run.resolve().name
    return tuple(
        Profile(
            kind=kind,
            device=f"stages of {name}",
            backend=backend,
            torch="unknown",
            threads=options.get("threads", 1) if backend == "cpu" else 0,
            run=name,
            operators=_operators(kind, graph, [(s, c) for s, c in stages if s.kind == kind]),
        )
        for kind in dict.fromkeys(stage.kind for stage, _ in stages)
    )


def _operators(
    kind: str, graph: Sequence[GraphNode], stages: Sequence[tuple[Stage, StageComparison]]
) -> dict[str, Operator]:
    """By key: the module's three rules for one kind."""
    by_name = {node.name: node for node in graph}
    ran, others = _Calls(kind), _Calls(kind)
    measured_ms, predicted_ms = [0.0, 0.0], [0.0, 0.0]
    for stage, compared in stages:
        nodes = [by_name[name] for name in stage.nodes if name in by_name]
        stage_ms = _measured_once(stage, compared)
        planned_ms = [sum(n.forward_ms.get(kind, 0.0) for n in nodes), sum(n.backward_ms.get(kind, 0.0) for n in nodes)]
        ran.add(nodes, *map(_ratio, stage_ms, planned_ms))
        measured_ms = [a + b for a, b in zip(measured_ms, stage_ms, strict=True)]
        predicted_ms = [a + b for a, b in zip(predicted_ms, planned_ms, strict=True)]
    others.add(graph, *map(_ratio, measured_ms, predicted_ms))
    runs = sum(compared.count for _, compared in stages)
    return others.operators(estimated=True) | ran.operators(runs=runs)


class _Calls:
    """Milliseconds of every call of each operator on a kind."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._forward_ms: defaultdict[str, list[float]] = defaultdict(list)
        self._backward_ms: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, nodes: Iterable[GraphNode], forward: float, backward: float) -> None:
        """Calls that took ``forward`` and ``backward`` times what was predicted; what costs nothing is left out."""
        for node in nodes:
            forward_ms, backward_ms = (ms.get(self._kind, 0.0) for ms in (node.forward_ms, node.backward_ms))
            sums_ms = [(s.key, s.count, s.ms.get(self._kind, 0.0)) for s in node.sums]
            for key, count, ms in sums_ms:
                self._forward_ms[key] += [ms * backward] * count
            if node.key and forward_ms + backward_ms > 0:
                own_ms = max(0.0, backward_ms - sum(count * ms for _, count, ms in sums_ms))
                self._forward_ms[node.key].append(forward_ms * forward)
                self._backward_ms[node.key].append(own_ms * backward)

    def operators(self, *, estimated: bool = False, runs: int = 0) -> dict[str, Operator]:
        """By key, the mean over the calls; an addition of gradients alone has no backward."""
        return {
            key: Operator(
                forward_ms=fmean(forward_ms),
                backward_ms=fmean(self._backward_ms[key]) if key in self._backward_ms else None,
                runs=runs,
                estimated=estimated,
            )
            for key, forward_ms in self._forward_ms.items()
        }


def _measured_once(stage: Stage, compared: StageComparison) -> tuple[float, float]:
    """Forward and backward, without the forward that a backward runs again."""
    forward_ms, backward_ms = compared.measured_ms
    return forward_ms, max(0.0, backward_ms - forward_ms) if stage.recompute else backward_ms


def _ratio(measured_ms: float, predicted_ms: float) -> float:
    return measured_ms / predicted_ms if predicted_ms > 0 else 0.0
