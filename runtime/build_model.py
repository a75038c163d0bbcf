"""The user's whole model in this process: to make initial weights, and to evaluate the trained ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetpipe_compiler.errors import RunError
from hetpipe_compiler.frontend.load import LoadedWorkload
from hetpipe_compiler.user_code import telling

if TYPE_CHECKING:
    from torch import Tensor, nn


def build_model(loaded: LoadedWorkload, seed: int) -> nn.Module:
    """Build the model on the CPU from ``seed``; one that its author left on meta is initialised.

    Raises:
        RunError: HP555 building it raises; HP556 it is on meta and a module cannot initialise itself.
    """
    with telling(RunError, "HP555", "building the model raised", loaded.path, hint="build it in plain PyTorch first"):
        model: nn.Module = loaded.build(seed)
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        _initialise(model, str(loaded.path))
    return model


def initial_values(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, also non-persistent ones, by the model's names; tied ones once under the first name.

    They are the model's own tensors, not copies.
    """
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach() for name, tensor in named.items()}


def _initialise(model: nn.Module, where: str) -> None:
    """Give a model on meta memory and values: ``reset_parameters`` of every module that has tensors of its own."""
    ties = _ties(model)
    empty: list[nn.Module] = []
    for path, module in model.named_modules():
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        own = [name for name, tensor in tensors if tensor.is_meta]
        if own and not callable(getattr(module, "reset_parameters", None)):
            raise RunError(
                "HP556",
                f"the model is on the meta device and {type(module).__name__} '{path}' cannot initialise '{own[0]}': "
                "it has no reset_parameters()",
                where=where,
                hint="give it one, or build the model on the CPU in workload()",
            )
        if own:
            empty.append(module)
    for module in empty:
        module.to_empty(device="cpu", recurse=False)
    for name, first in ties.items():  # to_empty gives every use of a tied parameter memory of its own
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path)._parameters[leaf] = model.get_parameter(first)
    for module in empty:
        module.reset_parameters()  # type: ignore[operator]


def _ties(model: nn.Module) -> dict[str, str]:
    """Other name -> first name of every parameter that has several."""
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            ties[name] = first[id(parameter)]
    return ties
