"""Merge neighbouring blocks of a chain, so that long chains become shorter.

`smallest_merged` is RaNNC's compaction: while there are too many, the block with the least time joins the neighbour
with which it makes the smaller merged time; equal times: the neighbour across the larger cut. (`multilevel` does what
comes before.)
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from hetpipe_compiler.ir.blocks import Block, BlockChain, BoolArray, CrossingValue, SharedBytes

#: Half-open intervals that cover a chain, in order.
Bounds = tuple[tuple[int, int], ...]


def smallest_merged(time_ms: Sequence[float], cut_bytes: Sequence[int], max_blocks: int) -> Bounds:
    """Intervals of blocks to merge until at most ``max_blocks`` (1 at least) are left.

    Args:
        time_ms: Of each block.
        cut_bytes: Bytes that cross between each block and the next.
    """
    n = len(time_ms)
    time_ms = list(time_ms)
    end = [at + 1 for at in range(n)]
    left = list(range(-1, n - 1))
    right = [*range(1, n), -1]
    heap = [(t, at) for at, t in enumerate(time_ms)]
    heapq.heapify(heap)
    alive = [True] * n
    count = n
    while count > max(1, max_blocks):
        least_ms, at = heapq.heappop(heap)
        if not alive[at] or least_ms != time_ms[at]:
            continue
        neighbours = [b for b in (left[at], right[at]) if b >= 0]
        into = min(neighbours, key=lambda b, at=at: (time_ms[b], -cut_bytes[end[min(at, b)] - 1]))  # type: ignore[misc]
        first, second = sorted((at, into))
        time_ms[first] += time_ms[second]
        end[first] = end[second]
        alive[second] = False
        right[first] = right[second]
        if right[second] >= 0:
            left[right[second]] = first
        heapq.heappush(heap, (time_ms[first], first))
        count -= 1
    return tuple((at, end[at]) for at in range(n) if alive[at])


def merge_blocks(chain: BlockChain, bounds: Bounds) -> BlockChain:
    """The chain whose blocks are the intervals ``bounds`` of this one.

    Costs add up, of workspaces the largest counts; what is read inside its own block only no longer crosses.
    """
    if len(bounds) == len(chain):
        return chain
    home = [at for at, (lo, hi) in enumerate(bounds) for _ in range(lo, hi)]
    starts = [lo for lo, _ in bounds]
    return replace(
        chain,
        blocks=tuple(_merged(chain, bounds)),
        forward_ms={kind: np.add.reduceat(times, starts) for kind, times in chain.forward_ms.items()},
        backward_ms={kind: np.add.reduceat(times, starts) for kind, times in chain.backward_ms.items()},
        measured=_measured(chain, bounds),
        values=tuple(_crossing(chain.values, home)),
        parameters=_moved(chain.parameters, home),
        frozen=_moved(chain.frozen, home),
        saved=_moved(chain.saved, home),
        workspace=tuple(max(chain.workspace[lo:hi]) for lo, hi in bounds) if chain.workspace else (),
        replay=tuple(sum(chain.replay[lo:hi]) for lo, hi in bounds) if chain.replay else (),
        resident=tuple(sum(chain.resident[lo:hi]) for lo, hi in bounds) if chain.resident is not None else None,
        colocate=tuple(g for g in (tuple(sorted({home[b] for b in group})) for group in chain.colocate) if len(g) > 1),
    )


def _merged(chain: BlockChain, bounds: Bounds) -> Iterator[Block]:
    """Merged blocks have the name of the longest in them."""
    longest_ms = np.add.reduce([chain.forward_ms[kind] + chain.backward_ms[kind] for kind in chain.forward_ms])
    for lo, hi in bounds:
        name = chain.blocks[lo + int(np.argmax(longest_ms[lo:hi]))].name
        yield Block(name, tuple(node for block in chain.blocks[lo:hi] for node in block.nodes))


def _measured(chain: BlockChain, bounds: Bounds) -> bool | dict[str, BoolArray]:
    if isinstance(chain.measured, bool):
        return chain.measured
    return {kind: np.array([known[lo:hi].all() for lo, hi in bounds]) for kind, known in chain.measured.items()}


def _crossing(values: Iterable[CrossingValue], home: Sequence[int]) -> Iterable[CrossingValue]:
    for value in values:
        producer = home[value.producer]
        consumers = tuple(sorted({home[b] for b in value.consumers} - {producer}))
        if consumers:
            yield CrossingValue(value.name, producer, consumers, value.forward_bytes, value.backward_bytes)


def _moved(items: Iterable[SharedBytes], home: Sequence[int]) -> tuple[SharedBytes, ...]:
    return tuple(SharedBytes(item.name, item.bytes, tuple(sorted({home[b] for b in item.blocks}))) for item in items)
