"""What a stage computes, holds, receives and sends, for any set of blocks between two closed sets."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from hetpipe_compiler.ir.blocks import BlockChain, SharedBytes


@dataclass(frozen=True)
class StageSums:
    """Of one minibatch; a value, parameter or storage counts once, however many of the stage's blocks use it.

    Attributes:
        received: Bytes of forward values that the stage reads from outside.
        returned: Bytes of gradients that come back for values which the stage makes and a later stage reads.
        sent_back: Bytes of gradients that the stage sends for the values it received.
        parameters, frozen, saved: Bytes, as in `BlockChain`.
        largest_parameter: Bytes of the largest that trains.
        workspace: Of the block that needs most.
        replay: Bytes, as in `BlockChain`.
        resident: The chain's own figure for the stage's memory, or None.
        forward_ms, backward_ms: Per device kind.
    """

    received: int
    returned: int
    sent_back: int
    parameters: int
    frozen: int
    saved: int
    largest_parameter: int
    workspace: int
    replay: int
    resident: int | None
    forward_ms: dict[str, float]
    backward_ms: dict[str, float]


def stage_sums(chain: BlockChain, blocks: Collection[int]) -> StageSums:
    """Sums over the stage made of ``blocks``."""
    mine = frozenset(blocks)
    received = returned = sent_back = 0
    for value in chain.values:
        if value.producer in mine:
            if not mine.issuperset(value.consumers):
                returned += value.backward_bytes
        elif not mine.isdisjoint(value.consumers):
            received += value.forward_bytes
            sent_back += value.backward_bytes
    pick = np.array(sorted(mine))
    return StageSums(
        received=received,
        returned=returned,
        sent_back=sent_back,
        parameters=_held(chain.parameters, mine),
        frozen=_held(chain.frozen, mine),
        saved=_held(chain.saved, mine),
        largest_parameter=max((p.bytes for p in chain.parameters if not mine.isdisjoint(p.blocks)), default=0),
        workspace=max((chain.workspace[b] for b in mine), default=0) if chain.workspace else 0,
        replay=sum(chain.replay[b] for b in mine) if chain.replay else 0,
        resident=None if chain.resident is None else sum(chain.resident[b] for b in mine),
        forward_ms={kind: float(times[pick].sum()) for kind, times in chain.forward_ms.items()},
        backward_ms={kind: float(times[pick].sum()) for kind, times in chain.backward_ms.items()},
    )


def _held(items: tuple[SharedBytes, ...], blocks: frozenset[int]) -> int:
    return sum(item.bytes for item in items if not blocks.isdisjoint(item.blocks))
