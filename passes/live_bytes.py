"""How many bytes of storage operators make are alive at once: seen by weak references to storages, on any device.

Storages that are there before, and what a kernel allocates and frees inside, do not count.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hetpipe_compiler.ir.storage import storage_of


class LiveBytes:
    """A count of living storages.

    Attributes:
        now, peak: Bytes alive, and the most that were since `restart`.
        made: Address of each living storage noted since `restart` -> bytes. A dead one's address is given out again.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget all storages noted so far."""
        self.now = self.peak = 0
        self.made: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}

    def note(self, tensors: Iterable[torch.Tensor], known: Iterable[torch.Tensor] = ()) -> None:
        """Count the storages of ``tensors``, those of ``known`` excepted."""
        before = {storage_of(t) for t in known}
        for tensor in tensors:
            key = storage_of(tensor)
            if key in before or key in self._alive:
                continue
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            self._alive[key] = weakref.ref(storage, partial(self._died, self._alive, key, size))
            self.made[key] = size
            self.now += size
        self.peak = max(self.peak, self.now)

    def _died(self, alive: dict[int, weakref.ref[Any]], key: int, size: int, _: object) -> None:
        del alive[key]
        if alive is self._alive:
            self.made.pop(key, None)
            self.now -= size


class LiveBytesMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what every operator makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = LiveBytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.live.note(tensors_in(out), tensors_in((args, kwargs)))
        return out


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of ``tree``."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def storages(tree: Any) -> dict[int, int]:
    """Address -> bytes of the storages in ``tree``."""
    return {storage_of(t): t.untyped_storage().nbytes() for t in tensors_in(tree)}


@dataclass
class NodeLives:
    """What lives while a node runs, and not longer or for another's sake.

    Attributes:
        forward: Most bytes at once that the forward makes; ``made``: its storages that live on; ``read``: the inputs'.
        backward: Bytes at the backward's peak.
    """

    forward: int
    made: dict[int, int]
    read: dict[int, int]
    backward: int = 0

    def workspace(self, saved: Container[int], parameters: Container[int]) -> int:
        """Bytes, when all storages that some node saves are known."""
        kept = sum(size for key, size in self.made.items() if key in saved)
        read = sum(size for key, size in self.read.items() if key not in saved and key not in parameters)
        return max(self.backward, max(0, self.forward - kept) + read)
