"""Wave Synchronous Parallel on the side of a stage: its own updates, and what pulled weights make of the local ones.

A stage adds its own updates to its weights at once and unscaled; only the servers scale. Own sums stay
until the pulled weights of every parameter contain them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from hetpipe_compiler.runtime.channels import PulledWeights
    from hetpipe_compiler.runtime.flat import FlatTensors
    from hetpipe_compiler.runtime.weights import WeightVersions


def wave_of(minibatch: int, nm: int) -> int:
    """The wave (from 0) that a minibatch (from 1) belongs to."""
    return (minibatch - 1) // nm


def required_clock(minibatch: int, nm: int, staleness: int) -> int:
    """R(p): the clock that pulled weights must have reached before minibatch ``p`` starts."""
    return -(-max(0, minibatch - (staleness + 1) * nm - (nm - 1)) // nm)


def need_after_push(wave: int, staleness: int) -> int:
    """The clock to ask for when wave ``wave`` is pushed: what the next gate, the one of wave + 1, will need.

    The forward that ends wave + 1 never runs before this push, as no stage has more than Nm minibatches in flight.
    """
    return max(0, wave + 1 - staleness)


class LocalUpdates:
    """The sums of a stage's own updates per wave, and the rule ``w = w_global + own updates not in it``.

    Float order, for oracles: ``own[c] = u_first + u_next + ...`` in minibatch order; a pulled parameter becomes
    ``((w_global + own[contains]) + own[contains + 1]) + ...``, the wave under way last.

    Args:
        weights: The stage's weights, whose master this writes.
        nm: Minibatches in a wave.

    Attributes:
        own: Wave -> summed updates, for the waves that some parameter's pulled weights do not contain yet.
        clock: Parameter -> clock of the weights pulled last (0: the initial ones).
        contains: Parameter -> number of own waves in them.
    """

    def __init__(self, weights: WeightVersions, nm: int) -> None:
        self._weights = weights
        self._nm = nm
        self._scratch: FlatTensors = weights.master.empty_like()
        self.own: dict[int, FlatTensors] = {}
        self.clock: dict[str, int] = dict.fromkeys(weights.trainable, 0)
        self.contains: dict[str, int] = dict.fromkeys(weights.trainable, 0)

    @property
    def oldest_clock(self) -> int:
        """The smallest clock over the parameters (0 without any)."""
        return min(self.clock.values(), default=0)

    def begin_step(self) -> None:
        """Remember the weights before the optimizer steps; the master may be written from here on."""
        self._scratch.copy_(self._weights.begin_write())

    def end_step(self, minibatch: int) -> None:
        """Take ``u_p`` = weights now - weights at `begin_step` into the sum of the minibatch's wave."""
        self._scratch.becomes_difference(self._weights.master)
        wave = wave_of(minibatch, self._nm)
        if wave in self.own:
            self.own[wave].add_(self._scratch)
        else:
            # The next step overwrites all of its scratch, so this one's can be the sum itself.
            self.own[wave], self._scratch = self._scratch, self._scratch.empty_like()

    def updates(self, wave: int) -> Mapping[str, Tensor]:
        """The summed updates of a wave by parameter name: what a push sends; not written again once it is complete."""
        return self.own[wave].views

    def apply(self, replies: Sequence[PulledWeights]) -> bool:
        """Set the master from pulled weights, oldest reply first; returns whether anything changed."""
        newest = {name: reply for reply in replies for name in reply.weights}
        if not newest:
            return False
        master = self._weights.begin_write()
        for name, reply in newest.items():
            assert reply.contains >= self.contains[name], "pulled weights hold fewer own waves than those before"
            view = master.views[name]
            view.copy_(reply.weights[name])
            for wave in sorted(self.own):
                if wave >= reply.contains:
                    view.add_(self.own[wave].views[name])
            self.clock[name] = reply.clock
            self.contains[name] = reply.contains
        contained = min(self.contains.values())
        for wave in [w for w in self.own if w < contained]:
            del self.own[wave]
        return True
