"""In-flight vectors: how many minibatches each stage may hold between F and B.

A vector is ``w_0 = Nm >= w_1 >= ... >= w_{K-1} = 1``; a pipeline of one stage has ``w_0 = 1`` whatever Nm. The
partitioner needs the vector before it knows the number of stages, so it takes a *rule*: the count as a function of the
distance to the last stage. The best vector of a finished partition is then searched among all of them (or among many
rules' if too many).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement

#: More vectors than this are not enumerated.
MAX_VECTORS = 1000


@dataclass(frozen=True, order=True)
class InFlightRule:
    """``growth`` minibatches more for each stage further from the last, at most Nm; the first stage always holds Nm.

    0 is the leanest vector there is for a given Nm, 1 is 1F1B's, infinity the richest.
    """

    growth: float

    def at_distance(self, distance: int, nm: int) -> int:
        """Minibatches in flight, ``distance`` stages before the last, on a stage that is not the first."""
        if distance == 0:
            return 1
        return min(nm, 1 + math.ceil(self.growth * distance)) if math.isfinite(self.growth) else nm

    def vector(self, nm: int, stages: int) -> tuple[int, ...]:
        """The whole vector of a pipeline of ``stages``."""
        later = tuple(self.at_distance(stages - 1 - stage, nm) for stage in range(1, stages))
        return (nm, *later) if stages > 1 else (1,)


LEANEST = InFlightRule(0.0)
RICHEST = InFlightRule(math.inf)
#: From lean in memory to rich; a partition is searched under each.
RULES = (LEANEST, InFlightRule(0.5), InFlightRule(1.0), InFlightRule(1.5), InFlightRule(2.0), RICHEST)


def vectors(nm: int, limits: tuple[int, ...]) -> list[tuple[int, ...]]:
    """In-flight vectors with ``w_s <= limits[s]``, fewest minibatches in flight first.

    All of them if at most `MAX_VECTORS` exist, else those of a fine family of rules.
    """
    stages = len(limits)
    if stages == 1:
        candidates: Iterator[tuple[int, ...]] = iter([(1,)])
    elif math.comb(nm + stages - 3, stages - 2) <= MAX_VECTORS:
        middles = combinations_with_replacement(range(nm, 0, -1), stages - 2)
        candidates = ((nm, *middle, 1) for middle in middles)
    else:
        growths = [step / 4 for step in range(13)] + [math.inf]
        candidates = (InFlightRule(growth).vector(nm, stages) for growth in growths)
    fitting = {vector for vector in candidates if all(w <= limit for w, limit in zip(vector, limits, strict=True))}
    return sorted(fitting, key=lambda vector: (sum(vector), vector))
