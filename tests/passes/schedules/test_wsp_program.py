"""The default schedule is the static program with its gates."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpipe_compiler.ir.schedule import Op, Schedule, StageProgram
from hetpipe_compiler.passes.schedules.wsp import wsp_program


def text(program: StageProgram) -> str:
    return " ".join(map(str, program.prologue)) + " | " + " ".join(map(str, program.period))


def test_the_text_of_three_stages() -> None:
    assert [text(program) for program in wsp_program((4, 2, 1), nm=4, staleness=0)] == [
        "F1 F2 F3 F4 | B1 U1 F5 B2 U2 F6 B3 U3 F7 B4 U4 ^0 v0 F8",
        "F1 F2 | B1 U1 F3 B2 U2 v-1 F4 B3 U3 F5 B4 U4 ^0 F6",
        "F1 | B1 U1 F2 B2 U2 F3 B3 U3 v-1 F4 B4 U4 ^0 F5",
    ]


def test_one_minibatch_in_flight() -> None:
    assert [text(program) for program in wsp_program((1, 1), nm=1, staleness=2)] == ["F1 | B1 U1 ^0 v-2 F2"] * 2
    bsp = wsp_program((1,), nm=1, staleness=0)[0]
    assert " ".join(map(str, bsp.unroll(3))) == "F1 B1 U1 ^0 v0 F2 B2 U2 ^1 v1 F3 B3 U3 ^2"


@st.composite
def shapes(draw: st.DrawFn) -> tuple[list[int], int, int]:
    nm = draw(st.integers(1, 7))
    in_flight = sorted(draw(st.lists(st.integers(1, nm), min_size=1, max_size=5)), reverse=True)
    return in_flight, nm, draw(st.integers(0, 5))


@given(shapes(), st.integers(1, 60))
def test_only_the_last_minibatch_of_a_wave_waits(shape: tuple[list[int], int, int], minibatches: int) -> None:
    in_flight, nm, staleness = shape
    for program in wsp_program(in_flight, nm, staleness):
        run = list(program.unroll(minibatches))
        gates = {f.index: v.index for v, f in pairwise(run) if v.op is Op.PULL}
        lasts = range(nm, minibatches + 1, nm)
        # p = (c+1)*Nm needs clock >= c - D, that is wave c - D - 1
        assert gates == {p: p // nm - 1 - staleness - 1 for p in lasts if p // nm - 1 - staleness >= 1}
        assert [i.index for i in run if i.op is Op.PUSH] == list(range(-(-minibatches // nm)))


@given(shapes())
def test_csv_round_trips(shape: tuple[list[int], int, int]) -> None:
    in_flight, nm, staleness = shape
    schedule = Schedule(nm, staleness, (wsp_program(in_flight, nm, staleness),) * 2)
    assert Schedule.from_csv(schedule.to_csv(), nm=nm, staleness=staleness) == schedule


@pytest.mark.parametrize("in_flight", [(), (5, 1), (2, 3), (2, 0)])
def test_impossible_in_flight_counts(in_flight: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at most Nm = 4"):
        wsp_program(in_flight, nm=4, staleness=0)
