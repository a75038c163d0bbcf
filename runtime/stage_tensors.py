"""Give a stage module, made on the meta device, its tensors by the model's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hetpipe_compiler.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor, nn


def value_for(values: Mapping[str, Tensor], name: str, declared: Tensor) -> Tensor:
    """The value of one parameter, buffer or constant of a stage.

    Raises:
        RunError: HP513 when it is missing, or its shape or dtype is not the module's.
    """
    value = values.get(name)
    if value is None:
        raise RunError("HP513", "has no value", where=name, hint="compile again: the plan folder is incomplete")
    if value.shape != declared.shape or value.dtype != declared.dtype:
        raise RunError(
            "HP513",
            f"is {value.dtype} {tuple(value.shape)}, the stage wants {declared.dtype} {tuple(declared.shape)}",
            where=name,
            hint="compile again, or give weights of the same model",
        )
    return value.detach()


def put_tensors(module: nn.Module, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Put tensors, not copies of them, in the places that the module has for them."""
    for name, tensor in parameters.items():
        owner, leaf = _owner(module, name)
        owner._parameters[leaf] = tensor  # type: ignore[assignment]
    for name, tensor in buffers.items():
        owner, leaf = _owner(module, name)
        owner._buffers[leaf] = tensor


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf
