"""What one training step leaves behind, and how far two such outcomes are apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Gradients are compared relative to their own size, but not finer than to this share of the model's largest gradient:
#: some are zero but for rounding (a bias before a norm).
_FLOOR = 1e-3
#: Large tensors are compared in pieces of so many numbers, to need no memory of their size.
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
    def forward(self) -> Outcome:
        """The same without gradients."""
        return Outcome({name: value for name, value in self.values.items() if not name.startswith("gradient")})

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


def largest_difference(expected: Outcome, found: Outcome) -> Difference:
    """The value that differs most; a value that one side lacks differs infinitely."""
    sizes = {n: _size(v) for n, v in expected.values.items()}
    floor = _FLOOR * max((s for n, s in sizes.items() if n.startswith("gradient")), default=0.0)
    worst = Difference("loss", 0.0)
    for name in dict.fromkeys((*expected.values, *found.values)):
        a, b = expected.values.get(name), found.values.get(name)
        if a is None or b is None:
            return Difference(name, float("inf"), f"only the {'stages have' if a is None else 'model has'} it")
        if a.dtype != b.dtype or a.shape != b.shape:
            return Difference(name, float("inf"), f"{_kind(a)} in the model, {_kind(b)} in the stages")
        # A loss or a buffer of size 1e-9 is compared absolutely: nobody reads it finer.
        size = max(sizes[name], floor if name.startswith("gradient") else 1e-3)
        relative = _distance(a, b) / size if size else _distance(a, b)
        if relative > worst.relative:
            worst = Difference(name, relative)
    return worst


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference; infinite where only one side is finite. NaN equals NaN."""
    if not a.numel() or torch.equal(a, b):
        return 0.0
    pieces = zip(torch.split(_numbers(a).flatten(), _PIECE), torch.split(_numbers(b).flatten(), _PIECE), strict=True)
    return max(_distance_of_pieces(one, other) for one, other in pieces)


def _distance_of_pieces(a: torch.Tensor, b: torch.Tensor) -> float:
    known = torch.isfinite(a)
    strange = ~known
    if not torch.equal(known, torch.isfinite(b)) or not torch.equal(a[strange].nan_to_num(), b[strange].nan_to_num()):
        return float("inf")
    return float((a[known] - b[known]).abs().max()) if bool(known.any()) else 0.0


def _size(tensor: torch.Tensor) -> float:
    """Largest absolute value that is a number."""
    if not tensor.numel():
        return 0.0
    return max(_size_of_piece(piece) for piece in torch.split(_numbers(tensor).flatten(), _PIECE))


def _size_of_piece(numbers: torch.Tensor) -> float:
    finite = numbers[torch.isfinite(numbers)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).double()
    return tensor.to_dense().double() if tensor.layout != torch.strided else tensor.double()
