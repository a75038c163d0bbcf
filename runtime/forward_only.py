"""A plan's stages run forward only, in eval mode, in one process. With a process a stage: `run_evaluation`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from hetpipe_compiler.errors import RunError
from hetpipe_compiler.ir.plan import Plan
from hetpipe_compiler.runtime.eval_stage import EvalStage, check_evaluates, own_leaf
from hetpipe_compiler.runtime.initial import WEIGHTS_FILE, load_constants, load_weights

if TYPE_CHECKING:
    from torch import Tensor


class ForwardOnly:
    """The stages of one virtual worker, chained by the plan's ports.

    Args:
        folder: The plan folder.
        plan: The plan in it, if it has been read already.
        weights: Parameters and buffers by the model's names; default: the folder's initial ones, from which
            also come buffers that models do not save. What the model changes in them even in eval mode changes in
            copies.
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
        self._plan = plan or Plan.load(folder)
        check_evaluates(self._plan, folder)
        if weights is None and not self._plan.weights:
            raise RunError(
                "HP513",
                "the plan has no weights",
                where=str(folder),
                hint="give those of a run, or compile without --no-weights",
            )
        self._device = device
        values = {**self._values(folder, weights), **load_constants(self._plan, folder)}
        stages = self._plan.virtual_workers[worker].stages
        self._stages = [EvalStage(self._plan, folder, stage, values, device) for stage in stages]

    def _values(self, folder: Path, weights: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
        if weights is None:
            return load_file(folder / WEIGHTS_FILE)
        unsaved = [b.name for b in self._plan.buffers if not b.persistent and b.name not in weights]
        if unsaved and self._plan.weights:
            return {**weights, **load_weights(self._plan, folder / WEIGHTS_FILE, unsaved)}
        return weights

    def loss(self, leaves: Sequence[Any]) -> Tensor:
        """The loss of one batch, given as all its leaves in ``torch.utils._pytree.tree_flatten`` order.

        Raises:
            RunError: HP519 a stage raises.
        """
        values: dict[tuple[int, str], Any] = {}
        for run in self._stages:
            inputs = {
                port.name: own_leaf(leaves[port.batch_leaf], self._device)
                if run.stage.index == 0 and port.batch_leaf is not None
                else values[port.source, port.name]
                for port in run.stage.inputs
            }
            values.update(((run.stage.index, name), value) for name, value in run(inputs).items())
        found: Tensor = values[self._stages[-1].stage.index, self._plan.loss or ""]
        return found


def evaluate(folder: Path | str, leaves: Sequence[Any], *, weights: Mapping[str, Tensor] | None = None) -> float:
    """The loss of a batch in eval mode; see `ForwardOnly`."""
    return float(ForwardOnly(Path(folder), weights=weights).loss(leaves))
