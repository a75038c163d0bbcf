"""Model and loss as one module over the batch's tensors: the thing that is captured, and the oracle that plans are held
to."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.ir.workload import Workload

#: How deep objects of the batch are looked into.
_DEPTH = 3


class TrainingStep(torch.nn.Module):
    """``forward(*tensor_leaves) -> loss``, with leaves in ``tree_flatten`` order of the batch.

    Leaves that are no tensors (None, flags, sizes) are taken from the example and stay what they were there.

    Args:
        workload: Says how the batch is shared out between model and loss.
        model: The model, on any device.
        batch: The example, for its structure.
    """

    def __init__(self, workload: Workload, model: torch.nn.Module, batch: Any) -> None:
        super().__init__()
        self.model = model
        self.loss = workload.loss
        self._targets = workload.targets
        leaves, self._structure = pytree.tree_flatten(batch)
        self._others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.tensor_leaves = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        leaves = list(self._others)
        for at, tensor in zip(self.tensor_leaves, tensors, strict=True):
            leaves[at] = tensor
        batch = pytree.tree_unflatten(leaves, self._structure)
        inputs, keywords, targets = split_batch(batch, self._targets if self.loss is not None else 0)
        output = self.model(*inputs, **keywords)
        return self.loss(output, *targets) if self.loss is not None else own_loss(output)


def refuse_hidden_values(batch: Any) -> None:
    """What is no tensor stays what it is in the example, so no tensor and no array may hide in it.

    Raises:
        WorkloadError: HP106 with the item's place.
    """
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        if not isinstance(leaf, torch.Tensor) and _hides_values(leaf, _DEPTH):
            what = "a NumPy array" if isinstance(leaf, np.ndarray) else f"a {type(leaf).__name__} that holds tensors"
            raise WorkloadError(
                "HP106",
                f"item {pytree.keystr(path)} of the example is {what}; every batch would get the example's",
                where="Workload.example",
                hint="give tensors, in tuples, lists, dicts or a class that torch.export.register_dataclass knows",
            )


def _hides_values(value: Any, depth: int) -> bool:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return True
    if depth == 0 or isinstance(value, type):
        return False
    parts = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    parts += vars(value).values() if hasattr(value, "__dict__") else ()
    return any(_hides_values(leaf, depth - 1) for leaf in pytree.tree_leaves(parts))


def split_batch(batch: Any, targets: int | Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """Positional inputs, keyword inputs and targets of a batch.

    Raises:
        WorkloadError: HP106 if the batch is neither tuple nor dict, or ``targets`` does not fit it.
    """
    if isinstance(batch, Mapping):
        keys = () if isinstance(targets, int) else tuple(targets)
        missing = [k for k in keys if k not in batch]
        if missing or (isinstance(targets, int) and targets):
            what = f"targets={targets!r}" if isinstance(targets, int) else f"target '{missing[0]}'"
            raise WorkloadError(
                "HP106",
                f"{what} does not fit a batch with keys {sorted(batch)}",
                where="Workload.targets",
                hint="name the keys that go to the loss, for example targets=['labels']",
            )
        return (), {k: v for k, v in batch.items() if k not in keys}, tuple(batch[k] for k in keys)
    if isinstance(batch, (tuple, list)) and isinstance(targets, int) and 0 <= targets < len(batch):
        cut = len(batch) - targets
        return tuple(batch[:cut]), {}, tuple(batch[cut:])
    size = f"of {len(batch)} items" if isinstance(batch, (tuple, list)) else type(batch).__name__
    raise WorkloadError(
        "HP106",
        f"targets={targets!r} does not fit an example {size}",
        where="Workload.example",
        hint="the example is a tuple (inputs..., targets...) or a dict of keyword inputs",
    )


def own_loss(output: Any) -> torch.Tensor:
    """The loss in a model's own output: the output itself, ``.loss`` or ``["loss"]``; `WorkloadError` HP107
    otherwise."""
    loss = output
    if not isinstance(output, torch.Tensor):
        loss = getattr(output, "loss", None)
        if loss is None and isinstance(output, Mapping):
            loss = output.get("loss")
    if not isinstance(loss, torch.Tensor):
        raise WorkloadError(
            "HP107",
            f"the model returned {type(output).__name__} without a loss",
            where="Workload.loss",
            hint="give Workload a loss, or have the model return its loss (transformers: pass labels)",
        )
    return loss


def loss_for(workload: Workload, device: str) -> Any:
    """The workload's loss with its own tensors on ``device`` (the user's object stays as it is)."""
    if isinstance(workload.loss, torch.nn.Module):
        return copy.deepcopy(workload.loss).to(device)
    return workload.loss
