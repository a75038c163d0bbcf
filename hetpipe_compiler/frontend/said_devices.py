"""What code outside torch hears when it asks on which device tensors are."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from hetpipe_compiler.ir.source import is_installed, is_internal

_CPU = torch.device("cpu")
#: Attributes of tensors that say where they are, and what they say on the CPU.
_ON_CPU = {"device": _CPU, "is_meta": False, "is_cpu": True}


@contextlib.contextmanager
def saying_devices(*, as_cpu: bool, to_libraries: bool) -> Iterator[list[str]]:
    """Note what the user's own code asks, and libraries' on demand; with ``as_cpu`` the answer is what it is on the
    CPU. Torch's own code hears the truth."""
    asked: list[str] = []

    def answer(name: str, truth: Any) -> Any:
        file = sys._getframe(2).f_code.co_filename
        if is_internal(file) or (is_installed(file) and not to_libraries):
            return truth
        asked.append(name)
        return _ON_CPU[name] if as_cpu else truth

    def told(name: str) -> property:
        real: Any = getattr(torch.Tensor, name)
        return property(lambda tensor: answer(name, real.__get__(tensor)))

    default_device = torch.get_default_device

    def get_default_device() -> torch.device:
        truth = default_device()
        return _CPU if truth.type == "meta" and answer("device", truth) == _CPU else truth

    with contextlib.ExitStack() as stack:
        for name in _ON_CPU:
            stack.enter_context(mock.patch.object(torch.Tensor, name, told(name), create=True))
        stack.enter_context(mock.patch.object(torch, "get_default_device", get_default_device))
        yield asked
