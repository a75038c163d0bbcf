"""One stage of a plan in eval mode: dropout off, batch norm on its statistics, no gradients. Knows no transport."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hetpipe_compiler.errors import RunError
from hetpipe_compiler.ir.stage_file import load_stage_class
from hetpipe_compiler.runtime.stage_error import calling_stage
from hetpipe_compiler.runtime.stage_tensors import put_tensors, value_for

if TYPE_CHECKING:
    from torch import Tensor

    from hetpipe_compiler.ir.plan import Plan, Stage


def check_evaluates(plan: Plan, folder: Path) -> None:
    """Refuse a plan that has no form for eval mode: `RunError` HP520."""
    if not plan.evaluation:
        raise RunError(
            "HP520",
            f"this plan does not run in eval mode: {plan.evaluation_note or 'it was made from no model'}",
            where=str(folder),
            hint="evaluate with the model itself and the weights that the run wrote",
        )


class EvalStage:
    """A stage module with its weights.

    Args:
        values: At least this stage's parameters, buffers and constants, by the model's names. What the model changes
            in them even in eval mode changes in copies; the others are used as they are.

    Raises:
        ArtifactError: HP415 the stage module cannot be loaded.
        RunError: HP513 a value is missing or does not fit. Calling it: HP519 the stage raises.
    """

    def __init__(
        self, plan: Plan, folder: Path, stage: Stage, values: Mapping[str, Tensor], device: torch.device | str
    ) -> None:
        self.stage = stage
        self._folder = folder
        with torch.device("meta"):
            module = load_stage_class(folder, stage.module)()
        mutated = {b.name for b in plan.buffers if b.mutated}
        parameters = {
            name: torch.nn.Parameter(value_for(values, name, p).to(device), requires_grad=p.requires_grad)
            for name, p in module.named_parameters()
        }
        buffers = {
            name: value_for(values, name, b).to(device, copy=name in mutated) for name, b in module.named_buffers()
        }
        put_tensors(module, parameters, buffers)
        self._module = module.eval()

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Outputs by name, from inputs by name; contiguous, as a later stage gets them whatever carries them."""
        with torch.no_grad(), calling_stage(self._folder, self.stage):
            outputs = self._module(*(inputs[port.name] for port in self.stage.inputs))
        assert len(outputs) == len(self.stage.outputs), "the stage module returns other values than the plan says"
        return {port.name: _contiguous(value) for port, value in zip(self.stage.outputs, outputs, strict=True)}


def _contiguous(value: Any) -> Any:
    return value.detach().contiguous() if isinstance(value, torch.Tensor) else value


def own_leaf(leaf: Any, device: torch.device | str) -> Any:
    """A leaf of a batch on the stage's device: a copy, because a model may write into its input."""
    return leaf.detach().to(device, copy=True) if isinstance(leaf, torch.Tensor) else leaf
