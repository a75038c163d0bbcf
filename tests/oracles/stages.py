"""The stages of a plan folder chained in one process, by the letter of the plan, beside the original model.

Imports nothing of ours: it reads plan.json and the emitted Python, so it also shows that those are enough.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


class StageChain:
    """The stages of one virtual worker, with the folder's weights in ``dtype``."""

    def __init__(self, folder: Path, dtype: torch.dtype | None, vw: int = 0) -> None:
        plan = json.loads((folder / "plan.json").read_text())
        self.loss_name = plan["loss"]
        self.constants = {constant["name"] for constant in plan["constants"]}
        self.stages = plan["virtual_workers"][vw]["stages"]
        values = {**load_file(folder / "weights.safetensors"), **load_file(folder / "constants.safetensors")}
        self.modules = [_load(folder / s["module"], values, dtype) for s in self.stages]

    def loss_and_gradients(self, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """One minibatch forward and backward: the loss, and the gradient of every parameter by name."""
        sent: dict[tuple[int, str], Any] = {}
        runs = []
        for at, (stage, module) in enumerate(zip(self.stages, self.modules, strict=True)):
            inputs = {}
            for port in stage["inputs"]:
                if at == 0:
                    value = leaves[port["batch_leaf"]]
                else:
                    value = sent.pop((at, port["name"]))
                    if isinstance(value, torch.Tensor):
                        value = value.detach().clone().requires_grad_(port["requires_grad"])
                inputs[port["name"]] = value
            outputs = dict(zip((p["name"] for p in stage["outputs"]), module(*inputs.values()), strict=True))
            for peer, names in stage["sends"].items():
                sent.update({(int(peer), n): outputs[n] for n in names})
            runs.append((inputs, outputs))
        assert not sent, f"nobody read {list(sent)}"
        loss = runs[-1][1][self.loss_name]
        self._backward(runs)
        gradients = {n: p.grad for m in self.modules for n, p in m.named_parameters() if p.grad is not None}
        return loss.detach(), gradients

    def _backward(self, runs: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        returned: dict[tuple[int, str], torch.Tensor] = {}
        for at in reversed(range(len(self.stages))):
            inputs, outputs = runs[at]
            roots, gradients = [], []
            for port in self.stages[at]["outputs"]:
                value = outputs[port["name"]]
                if port["name"] == self.loss_name and at == len(self.stages) - 1:
                    roots.append(value)
                    gradients.append(torch.ones_like(value))
                elif (at, port["name"]) in returned:
                    roots.append(value)
                    gradients.append(returned[at, port["name"]])
            torch.autograd.backward(roots, gradients)
            for port in self.stages[at]["inputs"]:
                value = inputs[port["name"]]
                if at and port["requires_grad"] and value.grad is not None:
                    key = (port["source"], port["name"])
                    returned[key] = returned[key] + value.grad if key in returned else value.grad

    def buffers(self) -> dict[str, torch.Tensor]:
        """All buffers of the model's own by name."""
        return {n: b for m in self.modules for n, b in m.named_buffers() if n not in self.constants}


def _load(path: Path, values: dict[str, torch.Tensor], dtype: torch.dtype | None) -> torch.nn.Module:
    spec = importlib.util.spec_from_file_location(f"emitted_{path.parent.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    source = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(source)
    module: torch.nn.Module = source.Stage()
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            tensor.copy_(values[name])
    return module.to(dtype) if dtype is not None else module
