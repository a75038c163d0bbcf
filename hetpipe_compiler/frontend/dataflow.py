"""What a run computes, down to its operators: a number for each value, equal where values are made alike.

Two runs that share a `Numbers` give one value the same number if they make it with the same operators and arguments
from the same inputs, whatever Python led there. A value is what lies in memory and the shape that it is read in, so
views need no operators of their own, and a copy has the number of what it copies.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hetpipe_compiler.frontend.meta_results import MetaResults
from hetpipe_compiler.frontend.remembered_numbers import draws
from hetpipe_compiler.frontend.said_devices import saying_devices
from hetpipe_compiler.ir.storage import storage_of

#: Size, strides, offset, dtype, conjugate or negative view: how a memory is read.
_Shape: TypeAlias = tuple[Any, ...]

_aten = torch.ops.aten
#: Operators whose result has its input's numbers, if it has its dtype.
_COPIES = {_aten.clone.default, _aten._to_copy.default, _aten.lift_fresh.default, _aten.lift_fresh_copy.default}
#: Operators whose result is a number of Python's.
_ASKS = {_aten._local_scalar_dense.default, _aten.equal.default}
#: Operators that write another tensor, or a number, into one.
_FILLS = {_aten.copy_.default, _aten.fill_.Tensor, _aten.fill_.Scalar}
#: Unlike ``tensor.is_meta`` it says the truth also while `saying_devices`.
_is_meta: Callable[[torch.Tensor], bool] = vars(torch._C.TensorBase)["is_meta"].__get__
_META, _CPU = torch.device("meta"), torch.device("cpu")


class Numbers:
    """Numbers of values, the same for two runs.

    Args:
        gradients: Whether it is part of what an operator computes through which of its arguments gradients flow.
    """

    def __init__(self, *, gradients: bool = True) -> None:
        self.gradients = gradients
        self._numbers: dict[Any, int] = {}

    def of(self, *key: Any) -> int:
        """The number of what is made of these parts."""
        return self._numbers.setdefault(key, len(self._numbers))


@dataclass
class _Memory:
    """What lies in one tensor storage.

    Attributes:
        reference: Keeps its address from being used again.
        content: Number of what lies there.
        shape: The one in which reading it gives ``content`` itself.
        constant: Whether nothing else than constants has a part in it.
        derived: Whether gradients flow through it to what the run starts with.
        stand_in: A tensor on the meta device that stands for it there.
    """

    reference: StorageWeakRef
    content: int
    shape: _Shape
    constant: bool
    derived: bool = False
    stand_in: torch.Tensor | None = None


@dataclass(frozen=True)
class Call:
    """An operator that was called, and the numbers of what lay in the memories that it was given."""

    at: int
    operator: str
    reads: tuple[int, ...]


@dataclass
class Dataflow:
    """Numbers the values of one run.

    Args:
        numbers: Shared by the runs that are compared.
        on_meta: Whether all tensors are on the meta device; constants are brought there.
        watch: The operator (by its place in the run) at which ``on_watched`` is called.

    Attributes:
        made_by: By number: the call that made it.
        asks_values: Whether the way that the code goes may depend on values of the batch or of the model's state.
    """

    numbers: Numbers
    on_meta: bool
    watch: int | None = None
    on_watched: Any = None
    made_by: dict[int, Call] = field(default_factory=dict)
    asks_values: bool = False
    _results: MetaResults = field(default_factory=MetaResults)
    _drawn: Counter[int] = field(default_factory=Counter)
    _memories: dict[int, _Memory] = field(default_factory=dict)
    _leaves: set[int] = field(default_factory=set)
    _count: int = 0

    def name(self, title: str, tensor: torch.Tensor) -> None:
        """Give what the run starts with its number; a memory keeps the first."""
        self._remember(tensor, False, "named", title)
        self._memory(tensor).derived |= tensor.requires_grad
        self._leaves.add(id(tensor))

    def value(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's value now."""
        memory = self._memory(tensor)
        shape = _shape(tensor)
        return memory.content if shape == memory.shape else self.numbers.of("read", memory.content, memory.shape, shape)

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow what is computed; on the meta device the model's own code is told that tensors are on the CPU, as
        when it is exported."""
        with (
            _Follow(self),
            saying_devices(as_cpu=True, to_libraries=True) if self.on_meta else contextlib.nullcontext(),
        ):
            yield

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator and number what it makes and writes."""
        if self._count == self.watch:
            self.on_watched()
        tensors = [*_tensors_in(args), *_tensors_in(kwargs.values())]
        memories = [self._memory(t) for t in tensors]
        derived = {id(t) for t in tensors if self._is_derived(t)}
        key = self._key(func, args, kwargs, derived)
        constant = all(memory.constant for memory in memories) and not draws(func)
        self.asks_values |= func in _ASKS and not constant
        call = Call(self._count, str(func), tuple(memory.content for memory in memories))
        self._count += 1
        written = _written(func, args, kwargs)
        copied = self.value(tensors[0]) if func in _COPIES else None
        if self.on_meta:
            args, kwargs = self._brought_to_meta(func, args, kwargs, tensors)
            given = [*_tensors_in(args), *_tensors_in(kwargs.values())]
            on_meta = all(_is_meta(t) for t in given)
            out = self._results.of(func, args, kwargs, given) if on_meta else func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        for n, tensor in enumerate(written):
            source = args[1] if func in _FILLS else None
            self._write(tensor, source, self.numbers.of("written", key, n), constant, call)
            self._memory(tensor).derived |= bool(derived)
        for n, tensor in enumerate(_tensors_in((out,))):
            if storage_of(tensor) not in self._memories:
                if self.on_meta and not _is_meta(tensor):
                    self._memory(tensor)  # of constants
                    continue
                content = self.numbers.of("made", key, n)
                if copied is not None and tensor.dtype == tensors[0].dtype:
                    content = copied
                self._memories[storage_of(tensor)] = _Memory(
                    _reference(tensor), content, _shape(tensor), constant, bool(derived)
                )
                self.made_by.setdefault(content, call)
        return out

    def _key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], derived: set[int]) -> int:
        """``derived``: the arguments, by id, through which gradients flow."""
        # Whether a copy has a gradient is told where the copy is read.
        told = derived if self.numbers.gradients and func not in _COPIES else set()
        if func in _FILLS and (number := self._number(args[1], told)) is not None:
            # ``tensor[...] = 1`` is one or the other, by the device.
            return self.numbers.of("filled", self._told(args[0], told), number)
        key = self.numbers.of(func, self._told(args, told), self._told(tuple(sorted(kwargs.items())), told))
        if draws(func):
            self._drawn[key] += 1
            key = self.numbers.of("drawn", key, self._drawn[key])
        return key

    def _write(self, tensor: torch.Tensor, source: Any, content: int, constant: bool, call: Call) -> None:
        """``content``: what the operator writes, unless that is all of ``source``."""
        memory, shape = self._memory(tensor), _shape(tensor)
        if tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes():
            content = self.numbers.of("within", content, memory.content, shape)
        else:
            memory.shape = shape
            if isinstance(source, torch.Tensor) and (source.dtype, source.shape) == (tensor.dtype, tensor.shape):
                content = self.value(source)
        memory.content, memory.constant = content, constant
        self.made_by.setdefault(content, call)

    def _number(self, value: Any, derived: set[int]) -> Any:
        """What tells one number, or the same one for all elements, of whatever type; None for other values."""
        if not isinstance(value, torch.Tensor):
            return repr(complex(value))
        if value.untyped_storage().nbytes() != value.element_size():
            return self._told(value, derived) if value.dim() == 0 else None
        memory = self._memory(value)
        known = memory.constant and memory.stand_in is None and not _is_meta(value)
        return repr(complex(value.reshape(-1)[0].item())) if known else self._told(value, derived)

    def _told(self, value: Any, derived: set[int]) -> Any:
        """An argument, as part of a number: where it is computed is no part of what is computed, and NaN is NaN."""
        if isinstance(value, torch.Tensor):
            return "value", self.value(value), id(value) in derived
        if isinstance(value, (tuple, list)):
            return tuple(self._told(part, derived) for part in value)
        return "" if isinstance(value, torch.device) else repr(value)

    def _is_derived(self, tensor: torch.Tensor) -> bool:
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return False
        root = tensor if tensor._base is None else tensor._base
        # A leaf that the model makes is a constant: nobody reads its gradient.
        return self._memory(tensor).derived and (not root.is_leaf or id(root) in self._leaves)

    def _memory(self, tensor: torch.Tensor) -> _Memory:
        known = self._memories.get(storage_of(tensor))
        return known if known is not None else self._remember(tensor, True, "constant", *_bits(tensor))

    def _remember(self, tensor: torch.Tensor, constant: bool, *key: Any) -> _Memory:
        new = _Memory(_reference(tensor), self.numbers.of(*key), _shape(tensor), constant)
        return self._memories.setdefault(storage_of(tensor), new)

    def _brought_to_meta(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments on the meta device, unless all are constants that have values."""
        real = [t for t in tensors if not _is_meta(t) and self._memory(t).stand_in is None]
        if tensors and len(real) == len(tensors):
            return args, kwargs
        if not all(_is_meta(t) for t in tensors):
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._on_meta, (args, kwargs))
        if func is _aten.scalar_tensor.default:
            return args, {**kwargs, "device": _CPU}
        if _takes_device(func):
            kwargs = {**kwargs, "device": _META}
        return args, kwargs

    def _on_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        if _is_meta(tensor):
            return tensor
        memory = self._memory(tensor)
        if memory.stand_in is None:
            memory.stand_in = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device=_META)
            self._memories[storage_of(memory.stand_in)] = memory
        found = torch.empty(0, dtype=tensor.dtype, device=_META)
        return found.set_(memory.stand_in.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


class _Follow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, dataflow: Dataflow) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dataflow = dataflow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # where autograd has not taken the operator apart
            with self:
                if (out := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return out
        return self._dataflow.call(func, args, kwargs)


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among an operator's arguments or results, also in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors_in(value)


@cache
def _takes_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def _reference(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _shape(tensor: torch.Tensor) -> _Shape:
    return (
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What tells a constant from others: its shape, and its values where it has some."""
    values = b""
    if not _is_meta(tensor):
        with torch._C._DisableTorchDispatch():
            bits = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
            values = hashlib.sha256(bits.numpy().tobytes()).digest()
    return tuple(tensor.shape), tensor.dtype, values


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operator writes into."""
    if not func._schema.is_mutable:
        return []
    arguments = func._schema.arguments
    given = [*zip(arguments, args, strict=False), *((a, kwargs[a.name]) for a in arguments if a.name in kwargs)]
    written = [value for a, value in given if a.alias_info is not None and a.alias_info.is_write]
    return list(_tensors_in(written))
