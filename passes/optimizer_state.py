"""How much state the workload's optimizer keeps, measured by stepping the real one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.ir.workload import make_optimizer


def optimizer_factor(make: Callable[[Any], torch.optim.Optimizer], parameters: Mapping[str, torch.Tensor]) -> float:
    """Bytes of optimizer state per byte of trainable parameter, after one step.

    Args:
        make: The workload's optimizer maker.
        parameters: The model's trainable parameters on the meta device; they are not touched.

    Raises:
        WorkloadError: HP109 if the optimizer cannot be made or cannot step.
    """
    copies = {n: torch.nn.Parameter(torch.empty_like(p, device="meta")) for n, p in parameters.items()}
    try:
        state = _state_bytes(make, copies)
    except Exception:
        # Some optimizers read values. A few of the smallest parameters for real stand for all of them.
        smallest = sorted(parameters.items(), key=lambda item: item[1].numel())[:8]
        copies = {n: torch.nn.Parameter(torch.zeros(p.shape, dtype=p.dtype)) for n, p in smallest}
        try:
            state = _state_bytes(make, copies)
        except Exception as error:
            raise WorkloadError(
                "HP109",
                f"the optimizer raised {type(error).__name__}: {error}",
                where="Workload.optimizer",
                hint="it is called with a stage's parameters and must return a torch.optim.Optimizer",
            ) from error
    return state / max(1, sum(p.numel() * p.element_size() for p in copies.values()))


def _state_bytes(make: Callable[[Any], torch.optim.Optimizer], parameters: Mapping[str, torch.nn.Parameter]) -> int:
    optimizer = make_optimizer(make, parameters)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    # Step counters stay on the host and weigh nothing beside the rest.
    tensors = [
        t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor) and t.dim()
    ]
    return sum(t.numel() * t.element_size() for t in tensors)
