"""The optimizer and the scheduler of one stage, made by the user's functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from hetpipe_compiler.errors import RunError
from hetpipe_compiler.ir.workload import make_optimizer, positional_parameters
from hetpipe_compiler.user_code import telling

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hetpipe_compiler.frontend.load import LoadedWorkload


def optimizer_and_scheduler(
    workload: LoadedWorkload, parameters: Mapping[str, nn.Parameter]
) -> tuple[torch.optim.Optimizer | None, Any]:
    """The workload's optimizer and scheduler for these parameters; (None, None) when there are none.

    Raises:
        RunError: HP518 one of the two raises, or makes what cannot be stepped without knowing the loss.
    """
    if not parameters:
        return None, None
    make, schedule = workload.workload.optimizer, workload.workload.scheduler
    optimizer = _made(workload, "optimizer", partial(make_optimizer, make), parameters)
    scheduler = _made(workload, "scheduler", schedule, optimizer) if schedule is not None else None
    return optimizer, scheduler


def stepping(workload: LoadedWorkload, what: str) -> AbstractContextManager[None]:
    """Around a step of the optimizer or the scheduler: what it raises is `RunError` HP518."""
    hint = "every stage steps it, with the parameters of that stage alone"
    return telling(RunError, "HP518", f"{what}.step() raised", workload.path, hint=hint)


def _made(workload: LoadedWorkload, what: str, make: Callable[[Any], Any], argument: Any) -> Any:
    """``make(argument)``, whose ``step()`` must take no argument."""
    hint = "it is called once on every stage, with the parameters of that stage alone"
    with telling(RunError, "HP518", f"{what}() raised", workload.path, hint=hint):
        made = make(argument)
    kind = type(made).__name__
    if not callable(getattr(made, "step", None)):
        raise RunError(
            "HP518",
            f"{what}() returned {kind}, which has no step()",
            where=str(workload.path),
            hint=f"return the {what}",
        )
    needed = [name for name, default in positional_parameters(made.step).items() if default is inspect.Parameter.empty]
    if needed:
        raise RunError(
            "HP518",
            f"{kind}.step() needs '{needed[0]}', which a stage of a pipeline cannot give",
            where=str(workload.path),
            hint=f"take a {what} whose step() needs no argument",
        )
    return made
