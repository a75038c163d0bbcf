"""A plan's stages run forward only, in eval mode, in one process: dropout off, batch norm on its statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from hetpipe_compiler.errors import RunError
from hetpipe_compiler.ir.plan import Plan
from hetpipe_compiler.ir.stage_file import load_stage_class
from hetpipe_compiler.runtime.initial import WEIGHTS_FILE
from hetpipe_compiler.runtime.stage_error import calling_stage
from hetpipe_compiler.runtime.weights import WeightVersions

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hetpipe_compiler.ir.plan import Stage


class ForwardOnly:
    """The stages of one virtual worker, chained by the plan's ports.

    Args:
        folder: The plan folder.
        plan: The plan in it, if it has been read already.
        weights: Parameters and buffers by the model's names; default: the folder's initial ones. What the model changes
            in them even in eval mode changes in copies.
        worker: Which virtual worker's stages. All compute the same.
        device: Where to compute.

    Raises:
        ArtifactError: The folder has no readable plan; HP415 a stage module cannot be loaded.
        RunError: HP513 a weight is missing or has another shape; HP520 the plan has no form for eval mode.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan | None = None,
        *,
        weights: Mapping[str, Tensor] | None = None,
        worker: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self._folder = folder
        self._plan = plan or Plan.load(folder)
        if not self._plan.evaluation:
            raise RunError(
                "HP520",
                f"this plan does not run in eval mode: {self._plan.evaluation_note or 'it was made from no model'}",
                where=str(folder),
                hint="evaluate with the model itself and the weights that the run wrote",
            )
        if weights is None and not self._plan.weights:
            raise RunError(
                "HP513",
                "the plan has no weights",
                where=str(folder),
                hint="give those of a run, or compile without --no-weights",
            )
        self._device = torch.device(device)
        values = {
            **(load_file(folder / WEIGHTS_FILE) if weights is None else weights),
            **load_file(folder / "constants.safetensors"),
        }
        self._stages = self._plan.virtual_workers[worker].stages
        self._modules = [self._build(stage, values) for stage in self._stages]

    def _build(self, stage: Stage, values: Mapping[str, Tensor]) -> nn.Module:
        mutated = frozenset(b.name for b in self._plan.buffers if b.mutated)
        weights = WeightVersions(load_stage_class(self._folder, stage.module), values, 1, self._device, mutated)
        return weights.acquire().module.eval()

    def loss(self, leaves: Sequence[Any]) -> Tensor:
        """The loss of one batch, given as all its leaves in ``torch.utils._pytree.tree_flatten`` order.

        Raises:
            RunError: HP519 a stage raises.
        """
        values: dict[tuple[int, str], Any] = {}
        for stage, module in zip(self._stages, self._modules, strict=True):
            inputs = [
                self._own(leaves[port.batch_leaf])
                if stage.index == 0 and port.batch_leaf is not None
                else values[port.source, port.name]
                for port in stage.inputs
            ]
            with torch.no_grad(), calling_stage(self._folder, stage):
                outputs = module(*inputs)
            values.update(((stage.index, port.name), v) for port, v in zip(stage.outputs, outputs, strict=True))
        found: Tensor = values[self._stages[-1].index, self._plan.loss or ""]
        return found

    def _own(self, leaf: Any) -> Any:
        """On the stages' device; a copy, because a model may write into its input."""
        return leaf.detach().to(self._device, copy=True) if isinstance(leaf, torch.Tensor) else leaf


def evaluate(folder: Path | str, leaves: Sequence[Any], *, weights: Mapping[str, Tensor] | None = None) -> float:
    """The loss of a batch in eval mode; see `ForwardOnly`."""
    return float(ForwardOnly(Path(folder), weights=weights).loss(leaves))
