"""What operators make of tensors on the meta device, remembered: a deep model asks the same of each of its layers.

Many operators find the shapes of their results in Python there, at a hundred times the cost of an empty tensor.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import torch

from hetpipe_compiler.ir.storage import storage_of

#: Size, strides, dtype.
_Form: TypeAlias = tuple[torch.Size, tuple[int, ...], torch.dtype]


class MetaResults:
    """Calls operators on the meta device, and makes empty tensors where it has called the same before."""

    def __init__(self) -> None:
        self._forms: dict[Any, list[_Form]] = {}

    def of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        """What ``func`` returns; ``tensors``: the arguments, on the meta device, that are tensors."""
        if not tensors or not _only_makes(func):
            return func(*args, **kwargs)
        key = (func, _told(args), _told(tuple(kwargs.items())), torch.get_default_dtype())
        if (forms := self._forms.get(key)) is not None:
            made = [torch.empty_strided(size, strides, dtype=dtype, device="meta") for size, strides, dtype in forms]
            return made[0] if len(made) == 1 else tuple(made)
        out = func(*args, **kwargs)
        results = out if isinstance(out, tuple) else (out,)
        if _are_new(results, tensors):
            self._forms[key] = [(t.size(), t.stride(), t.dtype) for t in results]
        return out


@cache
def _only_makes(func: Any) -> bool:
    """Whether an operator of torch's returns new tensors and writes none, as far as its schema tells."""
    schema = func._schema
    return (
        func.namespace == "aten"
        and all(argument.alias_info is None for argument in schema.arguments)
        and all(str(result.type) == "Tensor" for result in schema.returns)
    )


def _told(value: Any) -> Any:
    """What an argument has to do with the shapes of the results."""
    if isinstance(value, torch.Tensor):
        return value.size(), value.stride(), value.storage_offset(), value.dtype, value.is_conj(), value.is_neg()
    if isinstance(value, (tuple, list)):
        return tuple(_told(part) for part in value)
    return repr(value)


def _are_new(results: tuple[Any, ...], tensors: list[torch.Tensor]) -> bool:
    """Whether results share no memory, with each other or with the arguments (``_unsafe_view`` does), and fill it."""
    if not all(isinstance(t, torch.Tensor) and t.layout == torch.strided for t in results):
        return False
    memories = {storage_of(t) for t in (*results, *tensors)}
    before = {storage_of(t) for t in tensors}
    return len(memories) == len(before) + len(results) and all(_fills(t) for t in results)


def _fills(tensor: torch.Tensor) -> bool:
    plain = not (tensor.storage_offset() or tensor.is_conj() or tensor.is_neg())
    return plain and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
