"""A captured model: one fx graph of model and loss in train mode, and what its parameters and buffers are called."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from hetpipe_compiler.ir.plan import Tensor


@dataclass
class Captured:
    """What the frontend hands to the passes.

    Attributes:
        graph_module: ATen operators before autograd and functionalisation; parameters, buffers and constants are
            ``get_attr`` nodes whose targets are keys of ``tensors``; placeholders are the batch's tensors; the output
            is the loss.
        example: The example batch's tensor leaves on the meta device, in placeholder order.
        batch_leaves: For each placeholder, its index among all leaves of the batch.
        batch_size: Size of dimension 0 of the first leaf.
        dynamic_batch: Whether that size is free; ``dynamic_batch_note`` says why not.
        parameters, buffers: The model's own, under its first name for each; in registration order.
        constants: Tensors made in ``forward`` or held by the loss; they are no part of the model's state.
        constant_values: Their values (on the CPU).
        meta: Every tensor of ``tensors`` on the meta device.
        root: Folder of model.py: source places are shown relative to it.
        in_eval: The same of the model in eval mode, until `passes.eval_mode` has compared the two.
        evaluation: Whether the graph can also stand for the model in eval mode; ``evaluation_note`` says why not.
    """

    graph_module: fx.GraphModule
    example: tuple[torch.Tensor, ...]
    batch_leaves: tuple[int, ...]
    batch_size: int
    dynamic_batch: bool
    dynamic_batch_note: str | None
    parameters: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]
    constant_values: dict[str, torch.Tensor]
    meta: dict[str, torch.Tensor]
    root: Path = Path()
    in_eval: Captured | None = None
    evaluation: bool = False
    evaluation_note: str | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Parameters, buffers and constants by name."""
        return {t.name: t for t in (*self.parameters, *self.buffers, *self.constants)}

    def loss_node(self) -> fx.Node:
        """The node whose value is the loss."""
        output = next(n for n in reversed(self.graph_module.graph.nodes) if n.op == "output")
        loss: Any = output.args[0]
        while isinstance(loss, (tuple, list)):
            loss = loss[0]
        assert isinstance(loss, fx.Node)
        return loss
