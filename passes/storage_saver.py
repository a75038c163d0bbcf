"""Which storages autograd keeps from forward to backward, seen through ``saved_tensors_hooks``."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hetpipe_compiler.ir.storage import storage_of


@dataclass
class StorageSaver:
    """Which storages autograd keeps, each once in the whole graph.

    Autocast casts a parameter that trains once in a region and keeps the cast for all nodes that read it.

    Attributes:
        excluded: Storages of parameters and buffers; ``trainable``: of those that train.
        owners: Storage -> node whose value it is; ``seen``: all that were kept, held so that no address is used again.
        current: (storage, bytes) of those that the node under way is the first to keep.
        region: Number of the region under way; ``cast``: (region, parameter, dtype) of the casts kept.
        stands_for: Storage of a real tensor -> that of the one that stands for it in the graph.
        casts: Storages that autocast cast in the node under way -> what was cast, and to which dtype.
    """

    excluded: set[int]
    trainable: set[int]
    region: int = 0
    cast: set[tuple[int, int, torch.dtype]] = field(default_factory=set)
    casts: dict[int, tuple[int, torch.dtype]] = field(default_factory=dict)
    owners: dict[int, str] = field(default_factory=dict)
    seen: dict[int, torch.Tensor] = field(default_factory=dict)
    current: list[tuple[int, int]] = field(default_factory=list)
    stands_for: dict[int, int] = field(default_factory=dict)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = storage_of(tensor)
        key = self.stands_for.get(key, key)
        if key not in self.excluded and key not in self.seen:
            # Kept alive: a freed storage's identity would be given out again.
            self.seen[key] = tensor
            if self._is_kept_cast(key):
                return tensor
            self.current.append((key, tensor.untyped_storage().nbytes()))
        return tensor

    def _is_kept_cast(self, key: int) -> bool:
        """Whether this storage stands for one that autocast made before, in the same region."""
        parameter, dtype = self.casts.get(key, (0, torch.float32))
        if parameter not in self.trainable:
            return False
        cast = (self.region, parameter, dtype)
        seen = cast in self.cast
        self.cast.add(cast)
        return seen
