"""Hooks on gradients, which export would lose and no stage would run: HP119."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from hetpipe_compiler.frontend.own_gradients import refusal
from hetpipe_compiler.ir.source import is_internal
from hetpipe_compiler.user_code import line_of

_OF_MODULES = ("register_backward_hook", "register_full_backward_hook", "register_full_backward_pre_hook")
_OF_NODES = ("register_hook", "register_prehook")


def refuse_hooks(model: torch.nn.Module, where: str, kept: Collection[str] = ()) -> None:
    """Raises `WorkloadError` HP119 where a parameter has a hook on its gradient, or a module outside those ``kept``
    whole."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise refusal(f"parameter '{name}' has a hook on its gradient", where)
    if torch.nn.modules.module._global_backward_hooks or torch.nn.modules.module._global_backward_pre_hooks:
        raise refusal("all modules have a backward hook (register_module_full_backward_hook)", where)
    for name, module in model.named_modules():
        if any(f"{name}.".startswith(f"{path}.") for path in kept):
            continue
        if module._backward_hooks or module._backward_pre_hooks:
            raise refusal(f"module '{name or '(model)'}' has a backward hook", where)


@contextlib.contextmanager
def refusing_hooks(path: Path) -> Iterator[None]:
    """Raises `WorkloadError` HP119 where ``forward`` hangs a hook on a gradient. ``path``: the user's file."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise refusal("forward hangs a hook on a gradient", line_of(path))

    grad_fn = vars(torch._C.TensorBase)["grad_fn"]

    def read_grad_fn(tensor: torch.Tensor) -> Any:
        return _told(grad_fn.__get__(tensor), refuse)

    edge = torch.autograd.graph.get_gradient_edge

    def gradient_edge(tensor: torch.Tensor) -> Any:
        found = edge(tensor)
        return found._replace(node=_told(found.node, refuse))

    saved = torch.autograd.graph.saved_tensors_hooks
    enter = saved.__enter__

    def enter_saved(hooks: Any) -> None:
        # Torch's own, for checkpointing and saving on the CPU, give back what was saved.
        own = isinstance(hooks, torch.autograd.graph.save_on_cpu) or is_internal(sys._getframe(1).f_code.co_filename)
        if not own:
            raise refusal("forward hooks what is saved for its gradient", line_of(path))
        enter(hooks)

    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in (
            (torch.Tensor, "register_hook", refuse),
            (torch.Tensor, "register_post_accumulate_grad_hook", refuse),
            (torch.Tensor, "grad_fn", property(read_grad_fn)),
            (torch.autograd.graph, "get_gradient_edge", gradient_edge),
            (saved, "__enter__", enter_saved),
            *((torch.nn.Module, name, refuse) for name in _OF_MODULES),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


class SeenNode:
    """A node of autograd's graph, as the model's code sees it: all but its hooks."""

    def __init__(self, node: Any, refuse: Callable[..., Any]) -> None:
        self._node, self._refuse = node, refuse

    def __getattr__(self, name: str) -> Any:
        if name in _OF_NODES:
            return self._refuse
        value = getattr(self._node, name)
        if name == "next_functions":
            return tuple((node and SeenNode(node, self._refuse), at) for node, at in value)
        return value

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._node)

    def __eq__(self, other: object) -> bool:
        return bool(self._node == (other._node if type(other) is SeenNode else other))

    def __hash__(self) -> int:
        return hash(self._node)


def _told(node: Any, refuse: Callable[..., Any]) -> Any:
    """What a caller sees of a node: torch's own code sees itself."""
    return node if node is None or is_internal(sys._getframe(2).f_code.co_filename) else SeenNode(node, refuse)
