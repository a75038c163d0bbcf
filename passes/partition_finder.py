"""Optimal partitions under each in-flight rule, with and without recomputation, each searched once.

Where stages recompute only if they must, the search without comes first: with one minibatch in flight there is nothing
to recompute and the most memory, so no plan is better than the optimum there. Where the optimum for more in flight is
as good, memory does not bind, and the search with recomputation is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from hetpipe_compiler.errors import PlanningError
from hetpipe_compiler.passes.cut_space import ROUNDING
from hetpipe_compiler.passes.in_flight import LEANEST, RULES, InFlightRule
from hetpipe_compiler.passes.partition import slowest_ms
from hetpipe_compiler.passes.partition_search import Found, Search
from hetpipe_compiler.passes.stage_memory import Recompute


@dataclass(frozen=True)
class Finder:
    """Searches partitions for virtual workers of one structure; remembers what it found.

    Attributes:
        plain: The same without recomputation, where stages recompute only if they must; else None.
    """

    space: Search
    plain: Finder | None = None
    _found: dict[tuple[int, InFlightRule], Found | None] = field(default_factory=dict)

    def fastest(self, nm: int, rule: InFlightRule, leaner: Found | None = None) -> Found | None:
        """The optimum under a rule: an optimum with fewer minibatches in flight stays one where it is as fast."""
        if (nm, rule) not in self._found:
            known = [f for f in (leaner, self._found.get((nm - 1, rule))) if f is not None]
            fitting = (f for f in known if self._stays(f, rule.vector(nm, len(f.stages)), nm))
            held = next(fitting, None) or self._without(nm, rule)
            self._found[nm, rule] = held or self.space.fastest(nm, rule)
        return self._found[nm, rule]

    def under_each_rule(self, nm: int) -> Iterator[Found]:
        """The optima, leanest first; those without recomputation before those with it."""
        if self.plain is not None:
            with suppress(PlanningError):  # nothing found where not everything could be searched
                yield from self.plain.under_each_rule(nm)
        leaner: Found | None = None
        for rule in RULES:
            leaner = self.fastest(nm, rule, leaner)
            if leaner is None:
                return
            yield leaner

    def _without(self, nm: int, rule: InFlightRule) -> Found | None:
        """The optimum without recomputation, if no other can be better.

        That is where it equals the one with one minibatch in flight: that has the most memory, and nothing to
        recompute.
        """
        if self.plain is None:
            return None
        with suppress(PlanningError):  # nothing found where not everything could be searched
            most, found = self.plain.fastest(1, LEANEST), self.plain.fastest(nm, rule)
            if most is not None and found is not None and found.objective <= most.objective * (1 + ROUNDING):
                return replace(found, lower_bound=min(found.lower_bound, most.lower_bound))
        return None

    def _stays(self, found: Found, in_flight: tuple[int, ...], nm: int) -> bool:
        fits = self.space.fits(found, in_flight, nm)
        if not fits or self.space.memory_rule.recompute is Recompute.NEVER:
            return fits
        return slowest_ms(self.space, found, in_flight, nm) <= found.objective * (1 + ROUNDING)

    def lower_bound_ms(self, nm: int) -> float:
        """For every plan with ``nm`` in flight: the leanest rule's vector is the least of all."""
        try:
            leanest = self.fastest(nm, LEANEST)
        except PlanningError:  # nothing found where not everything could be searched
            leanest = None
        return self.space.lower_bound_ms if leanest is None else leanest.lower_bound


def finder_of(space: Search) -> Finder:
    """For the recomputation that ``space`` allows."""
    recompute = space.memory_rule.recompute
    if recompute is Recompute.NEVER or space.chain.resident is not None:
        return Finder(space.recomputing(Recompute.NEVER))
    return Finder(space, Finder(space.recomputing(Recompute.NEVER)) if recompute is Recompute.WHERE_NEEDED else None)
