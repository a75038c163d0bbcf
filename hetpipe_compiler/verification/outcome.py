"""What one training step leaves behind, and how far two such outcomes are apart."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import torch

#: Gradients are compared relative to their own size, but not finer than to this share of the model's largest gradient:
#: some are zero but for rounding (a bias before a norm).
_FLOOR = 1e-3
#: Tensors are kept and compared in pieces of so many numbers, to need no memory of their size.
_PIECE = 1 << 20


@dataclass(frozen=True)
class Outcome:
    """One step: ``{"loss", "gradient of a.weight", "buffer b.running_mean": tensor}``.

    A parameter without a gradient has no entry.
    """

    values: dict[str, torch.Tensor]

    @property
    def loss(self) -> torch.Tensor:
        return self.values["loss"]

    @property
    def finite(self) -> bool:
        """Whether the loss is a number that can be compared."""
        return bool(torch.isfinite(self.loss).all())


@dataclass(frozen=True)
class Difference:
    """The value that differs most.

    Attributes:
        value: ``loss``, ``gradient of NAME`` or ``buffer NAME``.
        relative: Largest absolute difference over the value's size; ``inf`` if only one side has it, or dtype or
            shape differ.
        what: In words, if it is no matter of size.
    """

    value: str
    relative: float
    what: str = ""


def outcome(loss: torch.Tensor, gradients: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> Outcome:
    """Copies nothing."""
    values = {"loss": loss.detach()}
    values |= {f"gradient of {name}": gradient for name, gradient in gradients.items()}
    values |= {f"buffer {name}": buffer for name, buffer in buffers.items()}
    return Outcome(values)


class Reference:
    """An outcome that others are held to. Its numbers are on disk, so that memory holds the gradients of one side only.

    Attributes:
        kinds: Dtype and shape of each value, in words.
        sizes: Largest absolute number of each value.
    """

    def __init__(self, outcome: Outcome) -> None:
        self.kinds = {name: _kind(value) for name, value in outcome.values.items()}
        self.sizes: dict[str, float] = {}
        self._file = tempfile.TemporaryFile(prefix="hetpipe-")  # noqa: SIM115
        self._places: dict[str, tuple[int, int]] = {}
        for name, value in outcome.values.items():
            start = self._file.tell()
            self.sizes[name] = 0.0
            for piece in _pieces(value):
                self._file.write(piece.numpy().tobytes())
                self.sizes[name] = max(self.sizes[name], _size(piece))
            self._places[name] = start, (self._file.tell() - start) // 8

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """A value's numbers."""
        start, count = self._places[name]
        self._file.seek(start)
        for at in range(0, count, _PIECE):
            data = self._file.read(8 * min(_PIECE, count - at))
            yield torch.frombuffer(bytearray(data), dtype=torch.float64)


def largest_difference(expected: Reference, found: Outcome, *, gradients: bool = True) -> Difference:
    """The value (``gradients`` among them or not) that differs most; one that one side lacks differs infinitely."""
    sizes = expected.sizes
    floor = _FLOOR * max((s for n, s in sizes.items() if n.startswith("gradient")), default=0.0)
    worst = Difference("loss", 0.0)
    for name in dict.fromkeys((*expected.kinds, *found.values)):
        if name.startswith("gradient") and not gradients:
            continue
        kind, value = expected.kinds.get(name), found.values.get(name)
        if kind is None or value is None:
            return Difference(name, float("inf"), f"only the {'stages have' if kind is None else 'model has'} it")
        if kind != _kind(value):
            return Difference(name, float("inf"), f"{kind} in the model, {_kind(value)} in the stages")
        # A loss or a buffer of size 1e-9 is compared absolutely: nobody reads it finer.
        size = max(sizes[name], floor if name.startswith("gradient") else 1e-3)
        pairs = zip(expected.pieces(name), _pieces(value), strict=True)
        distance = max((_distance(a, b) for a, b in pairs), default=0.0)
        relative = distance / size if size else distance
        if relative > worst.relative:
            worst = Difference(name, relative)
    return worst


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference; infinite where only one side is finite. NaN equals NaN."""
    far = float((a - b).abs().max())
    if math.isfinite(far):
        return far
    known = torch.isfinite(a)
    strange = ~known
    if not torch.equal(known, torch.isfinite(b)) or not torch.equal(a[strange].nan_to_num(), b[strange].nan_to_num()):
        return float("inf")
    return float((a[known] - b[known]).abs().max()) if bool(known.any()) else 0.0


def _size(numbers: torch.Tensor) -> float:
    """Largest absolute value that is a number."""
    largest = float(numbers.abs().max())
    if math.isfinite(largest):
        return largest
    finite = numbers[torch.isfinite(numbers)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The numbers of a tensor of any kind in double precision, `_PIECE` at a time; two for a complex one."""
    dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    numbers = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return (piece.double() for piece in torch.split(numbers.flatten(), _PIECE) if piece.numel())
