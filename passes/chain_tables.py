"""Interval tables: what a stage ``[lo, hi)`` of the block chain holds, receives and sends, for every ``lo < hi``.

A stage's cost depends on its two borders alone, so each quantity is a table indexed ``[lo, hi]``, filled once per chain
in O(n * (n + values)): for a fixed ``lo`` an item starts to count at one ``hi`` (and may stop at another), so the row
is a running sum of those changes. A value, parameter or storage counts once per interval, however many of its blocks
use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

from hetpipe_compiler.ir.blocks import BlockChain, FloatArray

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ChainTables:
    """Per-interval bytes of one minibatch, and prefix sums of times.

    The tables are int64 of shape ``(n + 1, n + 1)``; entry ``[lo, hi]`` belongs to the stage ``[lo, hi)``.

    Attributes:
        received: Forward values that the stage reads from outside.
        returned: Gradients that come back for values which the stage makes and a later stage reads.
        sent_back: Gradients that the stage sends for the values it received.
        parameters, frozen, saved: As in `BlockChain`, each entry once.
        resident: The chain's own figure for a stage's memory, or None.
        forward_ms, backward_ms: Per device kind, prefix sums of shape ``(n + 1,)``.
    """

    received: IntArray
    returned: IntArray
    sent_back: IntArray
    parameters: IntArray
    frozen: IntArray
    saved: IntArray
    resident: IntArray | None
    forward_ms: dict[str, FloatArray]
    backward_ms: dict[str, FloatArray]

    @property
    def blocks(self) -> int:
        """Number of blocks, n."""
        return len(self.received) - 1


def chain_tables(chain: BlockChain) -> ChainTables:
    """Fill the tables of ``chain``."""
    n = len(chain)
    producers = np.array([v.producer for v in chain.values], dtype=np.int64)
    starts, consumers = _ragged([v.consumers for v in chain.values])
    forward = np.array([v.forward_bytes for v in chain.values], dtype=np.int64)
    backward = np.array([v.backward_bytes for v in chain.values], dtype=np.int64)
    last = np.array([v.consumers[-1] for v in chain.values], dtype=np.int64)
    resident = None
    if chain.resident is not None:
        owners = np.full(n, -1, dtype=np.int64)
        sizes = np.array(chain.resident, dtype=np.int64)
        resident = _read_once(n, owners, np.arange(n + 1, dtype=np.int64), np.arange(n, dtype=np.int64), sizes)
    return ChainTables(
        received=_read_once(n, producers, starts, consumers, forward),
        returned=_made_and_read_later(n, producers, last, backward),
        sent_back=_read_once(n, producers, starts, consumers, backward),
        parameters=_held_once(n, [(item.bytes, item.blocks) for item in chain.parameters]),
        frozen=_held_once(n, [(item.bytes, item.blocks) for item in chain.frozen]),
        saved=_held_once(n, [(item.bytes, item.blocks) for item in chain.saved]),
        resident=resident,
        forward_ms={kind: _prefix(times) for kind, times in chain.forward_ms.items()},
        backward_ms={kind: _prefix(times) for kind, times in chain.backward_ms.items()},
    )


def _held_once(n: int, items: Sequence[tuple[int, tuple[int, ...]]]) -> IntArray:
    starts, blocks = _ragged([held for _, held in items])
    sizes = np.array([size for size, _ in items], dtype=np.int64)
    return _read_once(n, np.full(len(items), -1, dtype=np.int64), starts, blocks, sizes)


def _prefix(times: FloatArray) -> FloatArray:
    return np.concatenate((np.zeros(1), np.cumsum(np.asarray(times, dtype=np.float64))))


def _ragged(rows: Sequence[tuple[int, ...]]) -> tuple[IntArray, IntArray]:
    """Rows of unlike lengths as (starts, items): row r is ``items[starts[r]:starts[r + 1]]``."""
    starts = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=starts[1:])
    items = np.array([item for row in rows for item in row], dtype=np.int64)
    return starts, items


@numba.njit(cache=True)
def _read_once(n: int, producers: IntArray, starts: IntArray, readers: IntArray, sizes: IntArray) -> IntArray:
    """Entry [lo, hi]: sum of sizes of items with ``producer < lo`` and a reader in [lo, hi). Readers ascend."""
    table = np.zeros((n + 1, n + 1), dtype=np.int64)
    cursor = starts[:-1].copy()
    for lo in range(n):
        for item in range(sizes.shape[0]):
            at = cursor[item]
            while at < starts[item + 1] and readers[at] < lo:
                at += 1
            cursor[item] = at
            if producers[item] < lo and at < starts[item + 1]:
                table[lo, readers[at] + 1] += sizes[item]
        for hi in range(1, n + 1):
            table[lo, hi] += table[lo, hi - 1]
    return table


@numba.njit(cache=True)
def _made_and_read_later(n: int, producers: IntArray, last_readers: IntArray, sizes: IntArray) -> IntArray:
    """Entry [lo, hi]: sum of sizes of items with ``lo <= producer < hi <= last reader``."""
    table = np.zeros((n + 1, n + 1), dtype=np.int64)
    for lo in range(n):
        for item in range(sizes.shape[0]):
            if producers[item] >= lo:
                table[lo, producers[item] + 1] += sizes[item]
                table[lo, last_readers[item] + 1] -= sizes[item]
        for hi in range(1, n + 1):
            table[lo, hi] += table[lo, hi - 1]
    return table
