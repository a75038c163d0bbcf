"""The topological order that changes least: of what could come next, the first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from typing import Any


def topological_order(readers: Sequence[Collection[int]], rank: Callable[[int], Any] = lambda _: 0) -> list[int]:
    """All indices, each before its ``readers``; of those that could come next, the least by ``rank``, then by index.

    What lies on a cycle, or reads something that does, is left out.
    """
    waits_for = [0] * len(readers)
    for targets in readers:
        for target in targets:
            waits_for[target] += 1
    ready = [(rank(at), at) for at, count in enumerate(waits_for) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, at = heapq.heappop(ready)
        order.append(at)
        for reader in readers[at]:
            waits_for[reader] -= 1
            if not waits_for[reader]:
                heapq.heappush(ready, (rank(reader), reader))
    return order
