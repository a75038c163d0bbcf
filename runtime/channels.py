"""What a stage needs from the world, as two small interfaces.

The interpreter implements them in memory and virtual time; a distributed worker with torch.distributed and ZeroMQ. The
engine in between (`hetpipe_compiler.runtime.stage`) cannot tell which it has, so both train the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class MessageKind(str, Enum):
    """What a message between stages carries."""

    ACTIVATIONS = "a"
    GRADIENTS = "g"


class Mailbox(Protocol):
    """Messages between the stages of one virtual worker. One message per kind, minibatch and pair of stages."""

    def send(self, kind: MessageKind, minibatch: int, peer: int, values: Mapping[str, Any]) -> None:
        """Hand over named values (tensors, None, int, float, bool), in order; may return before they are delivered."""

    def receive(self, kind: MessageKind, minibatch: int, peer: int, names: tuple[str, ...]) -> dict[str, Any]:
        """Wait for the values of that message; tensors are the receiver's own (never shared with the sender)."""


@dataclass(frozen=True)
class PulledWeights:
    """Global weights as one server sent them.

    Attributes:
        weights: Parameter name -> value; the receiver's own.
        clock: Smallest number of waves that any virtual worker has pushed of these parameters.
        contains: How many waves of the receiving virtual worker itself they contain.
    """

    weights: Mapping[str, Tensor]
    clock: int
    contains: int


class ParameterLink(Protocol):
    """A stage's way to the parameter servers that hold its parameters."""

    def push(self, wave: int, updates: Mapping[str, Tensor], need: int) -> None:
        """Send the summed updates of ``wave``, ask for weights at clock >= ``need`` (exactly ``need`` if reproducible).

        ``updates`` are copied or sent before this returns as far as the caller can tell: it may reuse the tensors.
        """

    def poll(self) -> list[PulledWeights]:
        """Replies that have arrived, oldest first, without waiting."""

    def wait(self, clock: int) -> list[PulledWeights]:
        """Wait until every server has sent weights at ``clock`` or later; replies not handed out yet, oldest first."""

    def buffers(self, values: Mapping[str, Tensor], samples: int) -> None:
        """Report the buffers that training changes, with the number of samples seen so far."""

    def finish(self) -> None:
        """Say that this stage will push no more."""
