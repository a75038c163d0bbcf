"""The user's model, constructed: on the meta device to be looked at, or with real weights.

A constructor of the user's that asks where its tensors are may make another model on meta. So one that asks is called
again, and hears that they are on the CPU; if that makes something else, a real model must be looked at. Libraries know
of meta: what they ask for it they ask to be quicker there.
"""

from __future__ import annotations

from typing import Any

import torch

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.load import LoadedWorkload
from hetpipe_compiler.frontend.python_state import PythonState
from hetpipe_compiler.frontend.said_devices import saying_devices
from hetpipe_compiler.user_code import USER_ERRORS, telling


def build_on_meta(loaded: LoadedWorkload, seed: int) -> torch.nn.Module | None:
    """The model on the meta device, in train mode; None if its constructor needs values or a real device."""
    try:
        with torch.device("meta"), saying_devices(as_cpu=False, to_libraries=False) as asked:
            model = loaded.build(seed)
    except USER_ERRORS:
        return None
    if not isinstance(model, torch.nn.Module):
        raise WorkloadError(
            "HP105", f"Workload.model() returned {type(model).__name__}, not a torch.nn.Module", where=str(loaded.path)
        )
    # A constructor that names its device explicitly may have left something real.
    if not all(t.is_meta for t in (*model.parameters(), *model.buffers())):
        return None
    if asked and _is_another_on_cpu(loaded, seed, model):
        return None
    return model.train()


def build_real(loaded: LoadedWorkload, seed: int) -> torch.nn.Module:
    """The user's model with real weights (unless its author builds it on meta), in train mode, from ``seed``."""
    hint = "build it in plain PyTorch first"
    with telling(WorkloadError, "HP110", "Workload.model() raised", loaded.path, hint=hint):
        model: torch.nn.Module = loaded.build(seed)
        return model.train()


def _is_another_on_cpu(loaded: LoadedWorkload, seed: int, model: torch.nn.Module) -> bool:
    before = _made(model)
    try:
        with torch.device("meta"), saying_devices(as_cpu=True, to_libraries=False):
            return _made(loaded.build(seed)) != before
    except USER_ERRORS:  # it goes on with a tensor that is where it was told it is
        return False


def _made(model: torch.nn.Module) -> dict[Any, Any]:
    """What tells a model from another: its tensors' shapes, and what lies in its modules in Python."""
    holder = torch.nn.Module()
    holder.model = model
    state = PythonState.of(holder).values
    # What lies in classes and files counts calls of the constructor, for one; a device that is kept
    # decides nothing yet.
    plain = {
        place: value
        for place, value in state.items()
        if not isinstance(value, (torch.Tensor, torch.device)) and "(" not in place[1]
    }
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {**plain, **{name: (tuple(t.shape), t.dtype) for name, t in tensors}}
