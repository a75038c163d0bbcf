"""Weights on disk: safetensors files under the names that the user's ``model.load_state_dict(strict=True)`` expects."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetpipe_compiler.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor

    from hetpipe_compiler.frontend.load import LoadedWorkload
    from hetpipe_compiler.ir.plan import Plan


def state_dict(plan: Plan, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values by the plan's names as a state dict: a tied tensor under each of its names, persistent buffers only.

    Args:
        values: All parameters and buffers of the plan, each under its first name.
    """
    kept = (*plan.parameters, *(b for b in plan.buffers if b.persistent))
    return {name: values[t.name] for t in kept for name in (t.name, *t.aliases)}


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, clones of those that share memory with one before (tied ones do): the format refuses
    them. The others are not copied: a model may take half of the memory."""
    memory: set[int] = set()
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        apart[name] = value.clone() if value.untyped_storage().data_ptr() in memory else value
        memory.add(apart[name].untyped_storage().data_ptr())
    return apart


def save(path: Path, tensors: Mapping[str, Tensor], **facts: Any) -> None:
    """Write a safetensors file: complete under ``path``, or not there at all. ``facts`` go into its metadata as JSON.

    Raises:
        RunError: HP557 the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    metadata = {"format": "pt", **{key: json.dumps(value) for key, value in facts.items()}}
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file(_apart(tensors), temporary, metadata)
        temporary.chmod(mode)  # safetensors makes files that nobody else may read
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        raise RunError(
            "HP557",
            f"cannot write the weights: {getattr(error, 'strerror', None) or error}",
            where=str(path),
            hint="make room, or choose another -o",
        ) from error
    finally:  # Ctrl-C comes here too
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def evaluate(loaded: LoadedWorkload, weights: Path, seed: int) -> dict[str, float] | None:
    """What the workload's ``evaluate`` says of the user's own model with these weights; None without one.

    Raises:
        RunError: HP558 it raises, or the weights do not load strictly.
    """
    import torch
    from safetensors.torch import load_file

    from hetpipe_compiler.runtime.build_model import build_model
    from hetpipe_compiler.user_code import telling

    if loaded.workload.evaluate is None:
        return None
    model = build_model(loaded, seed)
    hint = f"training itself is done: the weights are in {weights}"
    with telling(RunError, "HP558", "evaluation failed:", loaded.path, hint=hint):
        model.load_state_dict(load_file(weights), strict=True)
        model.eval()
        with torch.no_grad():
            numbers = loaded.workload.evaluate(model)
            if not isinstance(numbers, Mapping):
                raise TypeError(f"evaluate() returned {type(numbers).__name__}, not a dict of named numbers")
            return {str(name): float(value) for name, value in numbers.items()}
