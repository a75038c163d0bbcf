"""The exact period of the static program against the simulated run, brute force over cycles, and numbers by hand."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import Case, cases

from hetpipe_compiler.passes.simulate.pipeline import (
    PipelineCosts,
    WaveExchange,
    simulate_pipeline,
    steady_period_ms,
)


def longest_cycle_by_hand(costs: PipelineCosts, w: tuple[int, ...]) -> float:
    """Every cycle of the dependency graph, listed by networkx: the largest (ms) / (minibatches)."""
    graph = nx.DiGraph()
    for s in range(len(costs)):
        graph.add_edge(("B", s), ("F", s), ms=costs.forward_ms[s], earlier=w[s])
        graph.add_edge(("F", s), ("B", s), ms=costs.backward_ms[s], earlier=1 - w[s])
        for i in range(s):
            if not np.isnan(costs.activation_ms[i, s]):
                graph.add_edge(("F", i), ("F", s), ms=costs.activation_ms[i, s] + costs.forward_ms[s], earlier=0)
            if not np.isnan(costs.gradient_ms[s, i]):
                graph.add_edge(("B", s), ("B", i), ms=costs.gradient_ms[s, i] + costs.backward_ms[i], earlier=0)
    ratios = []
    for cycle in nx.simple_cycles(graph):
        edges = [graph.edges[a, b] for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True)]
        ratios.append(sum(e["ms"] for e in edges) / sum(e["earlier"] for e in edges))
    return max(ratios)


@settings(deadline=None, max_examples=60)
@given(cases())
def test_the_period_is_the_longest_cycle(case: Case) -> None:
    period = steady_period_ms(case.costs, case.in_flight)
    assert period == pytest.approx(longest_cycle_by_hand(case.costs, case.in_flight), rel=1e-9)


@settings(deadline=None, max_examples=60)
@given(cases(), st.booleans(), st.integers(0, 40))
def test_a_long_run_reaches_the_period(case: Case, exchanging: bool, exchange_ms: int) -> None:
    exchange = (
        WaveExchange(case.nm, case.staleness, np.full(len(case.costs), float(exchange_ms))) if exchanging else None
    )
    period = steady_period_ms(case.costs, case.in_flight, exchange)
    shown = steady_period_ms(case.costs, case.in_flight, exchange, minibatches=2520)
    assert shown == pytest.approx(period, rel=0.02)
    assert shown <= period * (1 + 1e-9)


@settings(deadline=None, max_examples=60)
@given(cases())
def test_the_simulated_run_keeps_the_rules(case: Case) -> None:
    """Each end is exactly the latest thing waited for plus its own time, and stages run their program's order."""
    costs, w, minibatches = case.costs, case.in_flight, 25
    forward, backward = simulate_pipeline(costs, w, minibatches)
    for s in range(len(costs)):
        order = [("F", p) for p in range(min(w[s], minibatches))]
        for p in range(minibatches):
            order += [("B", p)] + [("F", p + w[s])] * (p + w[s] < minibatches)
        before = 0.0
        for kind, p in order:
            message_ms = costs.activation_ms[:, s] if kind == "F" else costs.gradient_ms[:, s]
            ends = forward if kind == "F" else backward
            arrivals = [ends[i, p] + message_ms[i] for i in range(len(costs)) if not np.isnan(message_ms[i])]
            ms = costs.forward_ms[s] if kind == "F" else costs.backward_ms[s]
            assert ends[s, p] == max([before, *arrivals]) + ms
            before = ends[s, p]


def test_numbers_by_hand() -> None:
    costs = PipelineCosts.chain([1, 1, 1, 1], [2, 2, 2, 2], 0.5)
    # One at a time: 4 forwards, 4 backwards, 6 messages.
    assert steady_period_ms(costs, (1, 1, 1, 1)) == 4 + 8 + 3
    # Enough in flight: every stage is always busy.
    assert steady_period_ms(costs, (7, 5, 3, 1)) == 3
    # One less than the messages need: a round trip of stages 2 and 3 (1+.5+1+2+.5+2 = 7 ms) for two minibatches.
    assert steady_period_ms(costs, (7, 5, 2, 1)) == 3.5
    assert steady_period_ms(PipelineCosts.chain([2.0], [3.0]), (1,)) == 5
    # A skip that is slower than the way through the middle: 1 + 9 + 1 + 1 + 1 there, 1 back, and B.
    skip = PipelineCosts.chain([1, 1, 1], [1, 1, 1])
    skip.activation_ms[0, 2] = 9
    assert steady_period_ms(skip, (1, 1, 1)) == 1 + 9 + 1 + 3


def test_waiting_for_waves() -> None:
    costs = PipelineCosts.chain([1.0], [2.0])
    # Nm = 1, D = 0: every minibatch waits for its exchange. One wave more of staleness hides 3 ms of it.
    assert steady_period_ms(costs, (1,), WaveExchange(1, 0, np.array([5.0]))) == 8
    assert steady_period_ms(costs, (1,), WaveExchange(1, 1, np.array([5.0]))) == 4
    assert steady_period_ms(costs, (1,), WaveExchange(1, 2, np.array([5.0]))) == 3
    # Nm = 4: the wait is shared by the wave's four minibatches.
    assert steady_period_ms(costs, (1,), WaveExchange(4, 0, np.array([5.0]))) == 3
    assert steady_period_ms(costs, (4,), WaveExchange(4, 0, np.array([8.0]))) == 3 + 8 / 4


@pytest.mark.parametrize("in_flight", [(4, 4), (4, 3, 2), (1, 2, 1, 1), (1, 1, 1, 0)])
def test_impossible_in_flight_counts(in_flight: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="never increasing"):
        steady_period_ms(PipelineCosts.chain([1] * 4, [1] * 4), in_flight)


def test_a_run_too_short_to_measure() -> None:
    with pytest.raises(ValueError, match="too few"):
        steady_period_ms(PipelineCosts.chain([1.0], [1.0]), (4,), WaveExchange(4, 0, np.array([1.0])), minibatches=4)
