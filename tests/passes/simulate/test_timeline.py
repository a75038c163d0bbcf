"""The timeline of complete programs: numbers by hand, and agreement with the pipeline simulator."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import Case, cases

from hetpipe_compiler.ir.schedule import Schedule
from hetpipe_compiler.passes.schedules.wsp import wsp_program
from hetpipe_compiler.passes.simulate.costs import PipelineCosts
from hetpipe_compiler.passes.simulate.pipeline import simulate_pipeline
from hetpipe_compiler.passes.simulate.timeline import TimelineEvent, idle_shares, peak_in_flight, simulate_run


def text(events: list[TimelineEvent], vw: int, stage: int) -> list[str]:
    return [
        f"{e.op}{e.index} {e.start_ms:g}-{e.end_ms:g}"
        if e.op != "wait"
        else f"wait {e.instruction} {e.start_ms:g}-{e.end_ms:g}"
        for e in events
        if (e.vw, e.stage) == (vw, stage)
    ]


def test_two_stages_by_hand() -> None:
    costs = PipelineCosts.chain([1, 1], [2, 2], 0.5)
    schedule = Schedule(2, 0, (wsp_program((2, 1), 2, 0),))
    events = simulate_run([costs], schedule, 2, [[4.0, 4.0]], [[1.0, 1.0]])
    assert text(events, 0, 0) == [
        "F1 0-1",
        "a>1 1-1.5",
        "F2 1-2",
        "a>2 2-2.5",
        "wait g1<1 2-5",
        "B1 5-7",
        "wait g2<1 7-8",
        "B2 8-10",
        "^0 10-14",
    ]
    # a2 is taken before g1 is sent, so that blocking sends could not hang; it is there long since.
    assert text(events, 0, 1) == [
        "wait a1<0 0-1.5",
        "F1 1.5-2.5",
        "B1 2.5-4.5",
        "g>1 4.5-5",
        "F2 4.5-5.5",
        "B2 5.5-7.5",
        "g>2 7.5-8",
        "^0 7.5-11.5",
    ]
    assert peak_in_flight(events) == {(0, 0): 2, (0, 1): 1}
    assert idle_shares(events, 0, 10) == pytest.approx({(0, 0): 0.4, (0, 1): 0.4})
    assert idle_shares(events, 2.5, 7.5) == pytest.approx({(0, 0): 0.6, (0, 1): 0.0})


def test_a_fast_virtual_worker_waits_for_a_slow_one() -> None:
    fast, slow = PipelineCosts.chain([1.0], [1.0]), PipelineCosts.chain([2.0], [3.0])
    schedule = Schedule(1, 0, (wsp_program((1,), 1, 0),) * 2)
    events = simulate_run([fast, slow], schedule, 2, [[0.5], [0.5]], [[0.25], [0.25]])
    # The slow one's wave 0 is pushed at 5.5, and the weights are back at 5.75.
    assert text(events, 0, 0) == [
        "F1 0-1",
        "B1 1-2",
        "^0 2-2.5",
        "wait v0 2-5.75",
        "F2 5.75-6.75",
        "B2 6.75-7.75",
        "^1 7.75-8.25",
    ]
    assert text(events, 1, 0)[3:5] == ["wait v0 5-5.75", "F2 5.75-7.75"]
    ahead = Schedule(1, 1, (wsp_program((1,), 1, 1),) * 2)
    assert "wait" not in {e.op for e in simulate_run([fast, slow], ahead, 2, [[0.5], [0.5]], [[0.25], [0.25]])}


def test_only_stages_that_share_parameters_wait_for_each_other() -> None:
    costs = PipelineCosts.chain([1, 1], [2, 2])
    schedule = Schedule(1, 0, (wsp_program((1, 1), 1, 0),))
    zero = [[0.0, 0.0]]
    shares = {(0, s): frozenset({(0, s)}) for s in range(2)}
    waits = [e for e in simulate_run([costs], schedule, 3, zero, [[9.0, 9.0]], shares) if str(e.instruction)[0] == "v"]
    # Stage 1 has its update at 4, stage 0 at 6; each waits 9 ms for its own weights.
    assert [(e.stage, e.start_ms, e.end_ms) for e in waits[:2]] == [(1, 4, 13), (0, 6, 15)]


@settings(deadline=None, max_examples=60)
@given(cases(), st.integers(1, 30))
def test_events_follow_the_pipeline_simulator(case: Case, minibatches: int) -> None:
    """No computation starts before the pure pipeline allows, none overlaps, and at most w_s are in flight."""
    k = len(case.costs)
    schedule = Schedule(case.nm, case.staleness, (case.programs,))
    zero = [[0.0] * k]
    alone = {(0, s): frozenset({(0, s)}) for s in range(k)}
    events = simulate_run([case.costs], schedule, minibatches, zero, zero, alone)
    forward, backward = simulate_pipeline(case.costs, case.in_flight, minibatches)
    clock = np.zeros(k)
    for event in events:
        if event.op in ("F", "B", "wait"):
            assert event.start_ms >= clock[event.stage]
            clock[event.stage] = event.end_ms
        if event.op in ("F", "B"):
            ends = forward if event.op == "F" else backward
            assert event.end_ms >= ends[event.stage, event.index - 1]
    assert sum(e.op in ("F", "B") for e in events) == 2 * k * minibatches
    assert peak_in_flight(events) == {(0, s): min(w, minibatches) for s, w in enumerate(case.in_flight)}
