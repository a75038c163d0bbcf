"""Whether the model goes one way for all batch sizes: export with a free one follows the example's way.

Export notes each condition on sizes that held (``size > 3``). One that does not hold at every batch size is a branch
that another batch would take otherwise, or a size that it cannot have: the plan must say that its batch size is fixed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.export import ExportedProgram

#: All small sizes, and others of every kind: even, odd, primes, powers of two.
_SIZES = (*range(2, 65), 97, 100, 127, 128, 255, 256, 1000, 1024, 4096)


def condition_on_batch(program: ExportedProgram, tensors: Sequence[torch.Tensor]) -> str | None:
    """The first condition that some batch size breaks, for people; None if there is none.

    Args:
        program: Exported with a free batch size.
        tensors: The example. Each first dimension that is a multiple of the batch size stays that multiple of it.
    """
    for condition in program._guards_code or ():
        if not all(
            _holds(condition, [_at(size, tensor, tensors[0].shape[0]) for tensor in tensors]) for size in _SIZES
        ):
            return condition.replace("L['tensors'][0].size()[0]", "batch size").replace("L['tensors']", "tensors")
    return None


def _at(size: int, tensor: torch.Tensor, batch: int) -> torch.Tensor:
    shape = list(tensor.shape)
    if shape and shape[0] % batch == 0:
        shape[0] = shape[0] // batch * size
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def _holds(condition: str, tensors: list[torch.Tensor]) -> bool:
    try:
        return bool(eval(condition, {"L": {"tensors": tensors}, "torch": torch}))
    except (NameError, AttributeError):  # of something else than sizes
        return True
