"""Weights of the waves that are to be saved, in a server until the launcher takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

#: Whole sets that may wait to be taken; each is as large as all the server's parameters.
_MOST = 2


class KeptWaves:
    """Keeps each parameter as it was when its clock reached a multiple of ``every``.

    Args:
        names: All parameters of the server.
        every: Waves between two sets; None: nothing is kept.
    """

    def __init__(self, names: Sequence[str], every: int | None) -> None:
        self._every = every
        self._clocks = dict.fromkeys(names, 0)
        self._begun: dict[int, dict[str, Tensor]] = {}
        self._whole: dict[int, tuple[dict[str, Any], Mapping[str, Tensor]]] = {}

    @property
    def wanted(self) -> bool:
        """Whether anything is ever kept."""
        return self._every is not None

    @property
    def waiting(self) -> tuple[int, ...]:
        """Clocks whose whole sets have not been taken."""
        return tuple(self._whole)

    @property
    def full(self) -> bool:
        """Whether so many wait that no more may be begun."""
        return len(self._whole) >= _MOST

    def note(self, name: str, clock: int, value: Tensor) -> None:
        """A parameter has reached a clock, with this value: kept by reference."""
        before, self._clocks[name] = self._clocks[name], clock
        for wave in range(before + 1, clock + 1):
            if self._every is not None and wave % self._every == 0:
                self._begun.setdefault(wave, {})[name] = value

    def completed(self) -> list[tuple[int, dict[str, Tensor]]]:
        """Clocks that all parameters have reached since the last call, with the values: hand each to `put`."""
        whole = [wave for wave, kept in self._begun.items() if len(kept) == len(self._clocks)]
        return [(wave, self._begun.pop(wave)) for wave in whole]

    def put(self, clock: int, header: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Keep a whole set, as it will be sent."""
        self._whole[clock] = header, tensors

    def take(self, clock: int) -> tuple[dict[str, Any], Mapping[str, Tensor]] | None:
        """A whole set, which is then no longer kept; None if there is none."""
        return self._whole.pop(clock, None)
