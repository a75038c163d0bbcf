"""Random pipelines for the tests of schedules."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from hetpipe_compiler.ir.schedule import StageProgram
from hetpipe_compiler.passes.schedules.wsp import wsp_program
from hetpipe_compiler.passes.simulate.costs import PipelineCosts

#: Quarters are exact in floating point, so that ties are ties.
milliseconds = st.integers(0, 40).map(lambda quarters: quarters / 4)


@st.composite
def pipelines(draw: st.DrawFn) -> PipelineCosts:
    """One to five stages. Neighbours exchange activations; skips and gradients come and go."""
    k = draw(st.integers(1, 5))
    computing = st.lists(milliseconds.map(lambda ms: ms + 0.25), min_size=k, max_size=k)
    costs = PipelineCosts.chain(draw(computing), draw(computing))
    for i in range(k):
        for j in range(i + 1, k):
            if j == i + 1 or draw(st.booleans()):
                costs.activation_ms[i, j] = draw(milliseconds)
                costs.gradient_ms[j, i] = draw(milliseconds) if draw(st.booleans()) else np.nan
    return costs


@dataclass(frozen=True)
class Case:
    costs: PipelineCosts
    in_flight: tuple[int, ...]
    nm: int
    staleness: int

    @property
    def programs(self) -> tuple[StageProgram, ...]:
        return wsp_program(self.in_flight, self.nm, self.staleness)


@st.composite
def cases(draw: st.DrawFn, nm: int | None = None, staleness: int | None = None) -> Case:
    costs = draw(pipelines())
    nm = draw(st.integers(1, 7)) if nm is None else nm
    w = sorted(draw(st.lists(st.integers(1, nm), min_size=len(costs), max_size=len(costs))), reverse=True)
    return Case(costs, tuple(w), nm, draw(st.integers(0, 3)) if staleness is None else staleness)
