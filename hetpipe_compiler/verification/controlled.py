"""Run something with chosen random numbers and, where asked, in double precision, whatever dtypes it names itself.

Both sides of a comparison run under `Controlled`. It sits below autograd, where a model and the stages made from it
call the same operators, however differently they are written above.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

#: What becomes what in double precision. Half precisions stay: who names them wants them.
_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class Seeds(Protocol):
    """Gives each random operator its seed."""

    def seed(self) -> int:
        """The seed of the random operator that is being called."""

    def drew(self) -> None:
        """It has drawn numbers. Many do not: attention without dropout, for one, whose kernels differ in what they are
        tagged as."""


class Controlled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Seeds every random operator on its own, and widens float32.

    Args:
        seeds: For operators that draw random numbers.
        wide: Whether float32 becomes float64: in dtypes that operators are asked for, and in tensors that are made as
            float32. A tensor made as float32 is rounded to it first, so a constant in a graph and one made in
            ``forward`` are equal.
    """

    def __init__(self, seeds: Seeds, wide: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seeds = seeds
        self._wide = wide

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._wide:
            args, kwargs = pytree.tree_map(_wider_dtype, (args, kwargs))
            if not func._schema.is_mutable:
                args, kwargs = pytree.tree_map_only(torch.Tensor, wider, (args, kwargs))
        out = (
            self._seeded(func, args, kwargs)
            if torch.Tag.nondeterministic_seeded in func.tags
            else func(*args, **kwargs)
        )
        return pytree.tree_map_only(torch.Tensor, wider, out) if self._wide and not func._schema.is_mutable else out

    def _seeded(self, func: Any, args: Any, kwargs: Any) -> Any:
        generator = torch.default_generator.manual_seed(self._seeds.seed())
        before = generator.get_state()
        out = func(*args, **kwargs)
        if not torch.equal(before, generator.get_state()):
            self._seeds.drew()
        return out


def wider(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or its copy in double precision if it is float32 or complex64."""
    return tensor.to(_WIDER[tensor.dtype]) if tensor.dtype in _WIDER else tensor


def _wider_dtype(value: Any) -> Any:
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value


@contextlib.contextmanager
def controlled(seeds: Seeds, wide: bool) -> Iterator[None]:
    """`Controlled`, and in double precision ``torch.finfo`` of float64 that speaks of float32.

    Models take their mask values from it; the captured graph has float32's.
    """
    finfo = torch.finfo
    patch = mock.patch.object(torch, "finfo", lambda dtype=torch.float32: finfo(_narrower(dtype)))
    with patch if wide else contextlib.nullcontext(), torch.random.fork_rng(devices=[]), Controlled(seeds, wide):
        yield


@contextlib.contextmanager
def noting_autocast() -> Iterator[list[torch.dtype]]:
    """Lists the dtypes of the autocast regions that are entered and do something."""
    entered: list[torch.dtype] = []
    autocast = torch.amp.autocast_mode.autocast
    enter: Any = autocast.__enter__

    def noted(self: Any) -> Any:
        if self._enabled:
            entered.append(self.fast_dtype)
        return enter(self)

    with mock.patch.object(autocast, "__enter__", noted):
        yield entered


def _narrower(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype is torch.float64 else dtype
