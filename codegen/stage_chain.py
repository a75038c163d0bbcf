"""The whole model again, from a plan folder's stage modules: all stages of one virtual worker chained in one module.

Values are handed on by their names, as the runtime sends them; skips and shared parameters included. Nothing here needs
weights: under a `FakeTensorMode` a model of any size costs no memory.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hetpipe_compiler.codegen.graph_file import GraphNode
from hetpipe_compiler.errors import ArtifactError
from hetpipe_compiler.ir.plan import Plan, Port, Stage, VirtualWorker
from hetpipe_compiler.ir.stage_file import import_stage_file, load_stage_class


class StageChain(torch.nn.Module):
    """Stages as submodules ``stage0``, ``stage1``...; called with the batch, returns what the last stage returns."""

    def __init__(self, worker: VirtualWorker, folder: Path) -> None:
        super().__init__()
        self.worker = worker
        for stage in worker.stages:
            self.add_module(f"stage{stage.index}", load_stage(stage_path(stage, folder)))

    def forward(self, *batch: Any) -> tuple[Any, ...]:
        """``batch``: values of stage 0's inputs, in their order."""
        values: dict[str, Any] = dict(zip((p.name for p in self.worker.stages[0].inputs), batch, strict=True))
        made: tuple[Any, ...] = ()
        for stage in self.worker.stages:
            made = self.get_submodule(f"stage{stage.index}")(*(values[port.name] for port in stage.inputs))
            values.update(zip((port.name for port in stage.outputs), made, strict=True))
        return made


def stage_path(stage: Stage, folder: Path) -> Path:
    """The stage's Python file.

    Raises:
        ArtifactError: HP445, the plan has no stage modules (it comes from a profiled graph), or the file is missing.
    """
    if stage.module is None:
        raise ArtifactError(
            "HP445",
            "the plan has no stage modules: it was made from a profiled graph, not from a model",
            where=str(folder),
            hint="compile model.py instead",
        )
    # Absolute: stack traces name files so, whatever path the module was imported by.
    path = (folder / stage.module).absolute()
    if not path.is_file():
        raise ArtifactError("HP445", f"stage {stage.index}'s module is missing", where=str(path), hint="compile again")
    load_stage_class(folder, stage.module)  # refuses what cannot be imported, with its line
    return path


def load_stage(path: Path) -> torch.nn.Module:
    """Import the file under a name of its own and build its ``Stage``."""
    stage: torch.nn.Module = import_stage_file(path).Stage()
    return stage.train()


def node_lines(path: Path) -> dict[int, str]:
    """Line of ``forward`` -> name of the fx node that the statement on it computes (the variable that it assigns).

    Methods that hold regions are left out: a region is one node of the plan, and its call stands in ``forward``.
    """
    lines: dict[int, str] = {}
    functions = (
        f
        for f in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(f, ast.FunctionDef) and f.name == "forward"
    )
    for statement in (s for function in functions for s in ast.walk(function)):
        if not isinstance(statement, ast.Assign) or isinstance(statement.value, ast.Constant):
            continue
        target = statement.targets[0]
        if isinstance(target, ast.Name):
            for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1):
                lines.setdefault(line, target.id)
    return lines


def example_values(plan: Plan, worker: VirtualWorker, graph: Sequence[GraphNode]) -> tuple[torch.Tensor, ...]:
    """Uninitialised tensors of the example batch's shapes, for stage 0's inputs.

    Raises:
        ArtifactError: HP446, an input is no tensor.
    """
    shapes = {node.name: node.shape for node in graph if node.shape is not None}
    return tuple(_example(port, plan.batch_size, shapes.get(port.name)) for port in worker.stages[0].inputs)


def _example(port: Port, batch_size: int, shape: tuple[int | str, ...] | None) -> torch.Tensor:
    if port.kind != "tensor":
        raise ArtifactError(
            "HP446", f"the batch's '{port.name}' is a {port.dtype}, not a tensor", hint="pass it as a tensor"
        )
    # A size that may differ from batch to batch is the batch size unless the graph's example says otherwise.
    sizes = [a if isinstance(a, int) else b for a, b in zip(port.shape, shape or port.shape, strict=True)]
    known = [size if isinstance(size, int) else batch_size for size in sizes]
    return torch.empty(known, dtype=getattr(torch, port.dtype))
