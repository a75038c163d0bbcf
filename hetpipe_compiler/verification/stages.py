"""The stages of a plan folder, imported and chained as the plan says, run once beside the original.

Only what is written counts: plan.json, the emitted Python, constants.safetensors. The weights are the original's own
tensors.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hetpipe_compiler.frontend.regions import autocast_on_cpu
from hetpipe_compiler.ir.plan import Plan, Stage
from hetpipe_compiler.ir.stage_file import import_stage_file
from hetpipe_compiler.verification.controlled import controlled, wider
from hetpipe_compiler.verification.outcome import Outcome, outcome

#: File of a stage, and a line of it.
_Line = tuple[str, int]


@dataclass
class Draws:
    """Which statements draw random numbers, so that each gets the seed that it has in the original.

    The original draws in the program's order; stages may run in another. A first run counts how many random operators
    each statement meets; from then on a statement's first one is known by all that come before it in the program.
    """

    order: Mapping[_Line, int]
    first: int
    met: list[_Line] = field(default_factory=list)
    known: dict[_Line, int] | None = None

    def __post_init__(self) -> None:
        self._files = {name for name, _ in self.order}

    def seed(self) -> int:
        """The seed of the random operator that is being called."""
        self._line = self._statement()
        if self.known is None:
            return self.first + len(self.met)
        return self.first + self.known.get(self._line, 0) + self.met.count(self._line)

    def drew(self) -> None:
        """It has drawn numbers."""
        self.met.append(self._line)

    def in_order(self) -> bool:
        """Whether the run met them in the program's order, so that counting was right."""
        places = [self.order[line] for line in self.met]
        return places == sorted(places)

    def learn(self) -> None:
        """Take the last run's counts for the next run."""
        counts = Counter(self.met)
        self.known, at = {}, 0
        for line in sorted(counts, key=lambda found: self.order[found]):
            self.known[line] = at
            at += counts[line]
        self.met = []

    def _statement(self) -> _Line:
        frame = sys._getframe(1)
        while frame.f_code.co_filename not in self._files:
            assert frame.f_back is not None, "a random operator outside the stages"
            frame = frame.f_back
        assert frame.f_lineno is not None
        return frame.f_code.co_filename, frame.f_lineno


class WrittenStages:
    """The stages of one virtual worker.

    Args:
        folder: The plan folder.
        plan: The plan in it.
        worker: Which virtual worker.
        tensors: The original's parameters and buffers by name; parameters are shared, buffers copied.
        wide: Whether to compute in double precision, as `Original.widen` does.
    """

    def __init__(self, folder: Path, plan: Plan, worker: int, tensors: Mapping[str, torch.Tensor], wide: bool) -> None:
        self._plan = plan
        self._wide = wide
        self._stages = plan.virtual_workers[worker].stages
        constants = load_file(folder / "constants.safetensors")
        values = {**{n: wider(c) if wide else c for n, c in constants.items()}, **tensors}
        paths = [_path(folder, stage) for stage in self._stages]
        self._tensors = values
        self._modules = [_build(path, values) for path in paths]
        self._order = _program_order(folder, paths, self._stages)

    def run(self, leaves: Sequence[Any], seed: int, *, evaluate: bool = False) -> tuple[Outcome, int]:
        """One minibatch forward and backward, or forward in eval mode; with it, how many random operators were met."""
        draws = Draws(self._order, seed)
        found = self._step(leaves, draws, evaluate)
        if not draws.in_order():
            draws.learn()
            found = self._step(leaves, draws, evaluate)
        return found, len(draws.met)

    def _step(self, leaves: Sequence[Any], draws: Draws, evaluate: bool) -> Outcome:
        self._restore_buffers()
        for module in self._modules:
            module.train(not evaluate)
            module.zero_grad(set_to_none=True)
        with controlled(draws, self._wide), autocast_on_cpu(), torch.set_grad_enabled(not evaluate):
            runs = self._forward(leaves)
            loss = runs[-1][1][self._plan.loss or ""]
            if not evaluate:
                self._backward(runs)
        gradients = {n: p.grad for m in self._modules for n, p in m.named_parameters() if p.grad is not None}
        own = {b.name for b in self._plan.buffers}
        buffers = {n: b for m in self._modules for n, b in m.named_buffers() if n in own}
        return outcome(loss, gradients, buffers)

    def _restore_buffers(self) -> None:
        with torch.no_grad():
            for module in self._modules:
                for name, buffer in module.named_buffers():
                    buffer.copy_(self._tensors[name])

    def _forward(self, leaves: Sequence[Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Inputs and outputs of each stage, by name."""
        sent: dict[tuple[int, str], Any] = {}
        runs = []
        for at, (stage, module) in enumerate(zip(self._stages, self._modules, strict=True)):
            inputs: dict[str, Any] = {}
            for port in stage.inputs:
                value = (
                    leaves[port.batch_leaf] if at == 0 and port.batch_leaf is not None else sent.pop((at, port.name))
                )
                if isinstance(value, torch.Tensor):
                    value = value.detach().clone()
                    value = wider(value) if self._wide else value
                    value.requires_grad_(bool(at) and port.requires_grad)
                inputs[port.name] = value
            made = dict(zip((p.name for p in stage.outputs), module(*inputs.values()), strict=True))
            for peer, names in stage.sends.items():
                sent.update({(peer, name): made[name] for name in names})
            runs.append((inputs, made))
        return runs

    def _backward(self, runs: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        """Gradients go back from the last stage to the first, and are summed in that order, as the runtime does."""
        returned: dict[tuple[int, str], torch.Tensor] = {}
        for at in reversed(range(len(self._stages))):
            stage, (inputs, made) = self._stages[at], runs[at]
            roots: list[torch.Tensor] = []
            gradients: list[torch.Tensor | None] = []
            for port in stage.outputs:
                is_loss = at == len(self._stages) - 1 and port.name == self._plan.loss
                value = made[port.name]
                if isinstance(value, torch.Tensor) and value.requires_grad and (is_loss or (at, port.name) in returned):
                    roots.append(value)
                    gradients.append(None if is_loss else returned[at, port.name])
            if roots:
                torch.autograd.backward(roots, gradients)
            for port in stage.inputs:
                value = inputs[port.name]
                if at and port.requires_grad and value.grad is not None:
                    key = (port.source, port.name)
                    returned[key] = returned[key] + value.grad if key in returned else value.grad


def _path(folder: Path, stage: Stage) -> Path:
    assert stage.module is not None
    return (folder / stage.module).absolute()


def _build(path: Path, values: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Import the file and give its ``Stage`` the values."""
    source = import_stage_file(path)
    with torch.device("meta"):
        module: torch.nn.Module = source.Stage()
    for path_of_scope, scope in module.named_modules():
        prefix = f"{path_of_scope}." if path_of_scope else ""
        for name, parameter in scope._parameters.items():
            if parameter is not None:
                value = values[prefix + name].detach()
                assert value.shape == parameter.shape, f"{name} has another shape"
                scope._parameters[name] = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
        for name, buffer in scope._buffers.items():
            if buffer is not None:
                scope._buffers[name] = values[prefix + name].detach().clone()
    return module.train()


def _program_order(folder: Path, paths: Sequence[Path], stages: Sequence[Stage]) -> dict[_Line, int]:
    """Each statement's place in the captured program.

    It is known by the name that is assigned. One that assigns nothing runs the node after the one before it in the
    stage: stages run their nodes in the plan's order, and constants, which are all assigned, in between.
    """
    nodes = json.loads((folder / "graph.json").read_text(encoding="utf-8"))["nodes"]
    place = {node["name"]: at for at, node in enumerate(nodes)}
    order: dict[_Line, int] = {}
    for path, stage in zip(paths, stages, strict=True):
        own, here, at = {name: n for n, name in enumerate(stage.nodes)}, -1, 0
        functions = (f for f in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(f, ast.FunctionDef))
        statements = (s for f in functions if f.name == "forward" for s in ast.walk(f))
        simple = [s for s in statements if isinstance(s, (ast.Assign, ast.Expr))]
        for statement in sorted(simple, key=lambda s: s.lineno):
            if isinstance(statement, ast.Expr):
                here += 1
                at = place[stage.nodes[here]]
            elif isinstance(target := statement.targets[0], ast.Name):
                name = target.id if target.id in place else target.id.removesuffix("_")
                here, at = own.get(name, here), place.get(name, at)
            for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1):
                order[str(path), line] = at
    return order
