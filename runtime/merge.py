"""Buffers that training changes (BatchNorm statistics), merged over the virtual workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hetpipe_compiler.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class BufferReport:
    """A buffer of one virtual worker, and the samples that went into it."""

    value: Tensor
    samples: int


class BufferBook:
    """The newest reports of all virtual workers, and what they merge to.

    Args:
        initial: Buffers by the model's names as training started; those never reported keep this value.
    """

    def __init__(self, initial: Mapping[str, Tensor]) -> None:
        self._initial = dict(initial)
        self._reports: dict[str, dict[int, BufferReport]] = {}

    def report(self, vw: int, values: Mapping[str, Tensor], samples: int) -> None:
        """Take the buffers of one stage of ``vw`` (kept by reference), after ``samples`` samples."""
        for name, value in values.items():
            self._reports.setdefault(name, {})[vw] = BufferReport(value, samples)

    def merged(self) -> dict[str, Tensor]:
        """All buffers; raises `RunError` HP514, see `merge_buffer`."""
        return {
            name: merge_buffer(name, value, self._reports[name]) if name in self._reports else value
            for name, value in self._initial.items()
        }


def merge_buffer(name: str, initial: Tensor, reports: Mapping[int, BufferReport]) -> Tensor:
    """One buffer from the reports of virtual workers.

    Floating point: mean weighted by samples, summed in float64 in order of virtual workers. Integer scalars are
    counters: initial + the sum of increments. Anything else: that of the first virtual worker.

    Raises:
        RunError: HP514 when it is of the last kind and differs between virtual workers.
    """
    workers = sorted(reports)
    values = [reports[vw].value.cpu() for vw in workers]
    if initial.is_floating_point() or initial.is_complex():
        samples = [reports[vw].samples for vw in workers]
        if not sum(samples):
            return initial
        wide = torch.complex128 if initial.is_complex() else torch.float64
        total = torch.zeros(initial.shape, dtype=wide)
        for value, weight in zip(values, samples, strict=True):
            total += value.to(wide) * weight
        return (total / sum(samples)).to(initial.dtype)
    if initial.dtype is not torch.bool and initial.dim() == 0:
        start = initial.cpu()
        return start + sum((value - start for value in values), torch.zeros_like(start))
    for vw, value in zip(workers[1:], values[1:], strict=True):
        if not torch.equal(value, values[0]):
            raise RunError(
                "HP514",
                f"is neither floating point nor a counter and differs between vw{workers[0]} and vw{vw}",
                where=f"buffer {name}",
                hint="make it floating point (then it is averaged), or keep the forward pass from changing it",
            )
    return values[0]
