"""What memory the workload's optimizer needs, measured by stepping the real one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.ir.workload import make_optimizer
from hetpipe_compiler.passes.live_bytes import LiveBytesMode
from hetpipe_compiler.user_code import USER_ERRORS, told, user_place

Make = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes per byte of trainable parameter.

    Attributes:
        state: What it keeps, after one step.
        step: What a step needs for a moment, taking all parameters at once where PyTorch would on a GPU.
        loop: The same per byte of the largest parameter, taking them as PyTorch does on a CPU.
    """

    state: float
    step: float
    loop: float


def optimizer_memory(make: Make, parameters: Mapping[str, torch.Tensor]) -> OptimizerMemory:
    """Memory of the optimizer that ``make`` makes.

    Args:
        make: The workload's optimizer maker.
        parameters: The model's trainable parameters on the meta device; they are not touched.

    Raises:
        WorkloadError: HP109 if the optimizer cannot be made or cannot step.
    """
    copies = {n: torch.nn.Parameter(torch.empty_like(p, device="meta")) for n, p in parameters.items()}
    try:
        return _measured(make, copies)
    except USER_ERRORS:
        # Some optimizers read values. A few of the smallest parameters for real stand for all of them.
        smallest = sorted(parameters.items(), key=lambda item: item[1].numel())[:8]
        copies = {n: torch.nn.Parameter(torch.zeros(p.shape, dtype=p.dtype)) for n, p in smallest}
        try:
            return _measured(make, copies)
        except USER_ERRORS as error:
            raise WorkloadError(
                "HP109",
                f"the optimizer raised {told(error)}",
                where=user_place(error) or "Workload.optimizer",
                hint="it is called with a stage's parameters and must return a torch.optim.Optimizer",
            ) from error


def _measured(make: Make, parameters: Mapping[str, torch.nn.Parameter]) -> OptimizerMemory:
    optimizer = make_optimizer(make, parameters)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    left_open = [g for g in optimizer.param_groups if "foreach" in g and g["foreach"] is None and not g.get("fused")]
    for group in left_open:
        group["foreach"] = True
    optimizer.step()
    # Step counters stay on the host and weigh nothing beside the rest.
    tensors = [
        t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor) and t.dim()
    ]
    at_once = _alive_in_a_step(optimizer)
    for group in left_open:
        group["foreach"] = None
    one_by_one = _alive_in_a_step(optimizer)
    sizes = [p.numel() * p.element_size() for p in parameters.values()]
    state = sum(t.numel() * t.element_size() for t in tensors)
    return OptimizerMemory(state / max(1, sum(sizes)), at_once / max(1, sum(sizes)), one_by_one / max(1, *sizes))


def _alive_in_a_step(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that a step has alive for a moment."""
    mode = LiveBytesMode()
    with mode:
        optimizer.step()
    return mode.live.peak
