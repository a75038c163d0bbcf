"""The paper's FIFO order: its in-flight table, row by row."""

from __future__ import annotations

import pytest

from hetpipe_compiler.passes.simulate.costs import PipelineCosts
from hetpipe_compiler.passes.simulate.fifo import fifo_in_flight, fifo_period_ms, simulate_fifo

TABLE = {
    4: ((4, 4, 3, 1), (4, 4, 4, 1), (4, 4, 4, 1)),
    5: ((5, 5, 4, 1), (5, 5, 4, 1), (5, 5, 5, 1)),
    7: ((7, 6, 4, 1), (7, 7, 6, 1), (7, 7, 6, 1)),
    10: ((10, 8, 5, 1), (10, 9, 7, 1), (10, 9, 7, 1)),
}
TIMES = ((1, 0.0), (2, 0.0), (2, 0.5))  # backward, message; the forward takes 1


@pytest.mark.parametrize("nm", TABLE)
@pytest.mark.parametrize("column", range(3))
def test_minibatches_in_flight(nm: int, column: int) -> None:
    backward, message = TIMES[column]
    costs = PipelineCosts.chain([1] * 4, [backward] * 4, message)
    assert fifo_in_flight(costs, nm) == TABLE[nm][column]


def test_throughput_saturates_as_the_spec_says() -> None:
    near, far = PipelineCosts.chain([1] * 4, [2] * 4), PipelineCosts.chain([1] * 4, [2] * 4, 0.5)
    assert fifo_period_ms(near, 4) == pytest.approx(3, rel=0.02)
    assert fifo_period_ms(far, 4) > 4
    assert fifo_period_ms(far, 7) == pytest.approx(3, rel=0.02)
    assert fifo_period_ms(far, 1) == 15


def test_a_skip_is_waited_for() -> None:
    costs = PipelineCosts.chain([1, 1, 1], [1, 1, 1])
    costs.activation_ms[0, 2] = 9
    assert simulate_fifo(costs, 1, 2).end_ms == (14.0, 28.0)


def test_one_stage() -> None:
    run = simulate_fifo(PipelineCosts.chain([1.0], [2.0]), 3, 4)
    assert run.end_ms == (3.0, 6.0, 9.0, 12.0)
    assert run.in_flight == (1,)
