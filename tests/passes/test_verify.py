"""Valid schedules pass; each kind of mutation is refused, with the whole message golden.

After a wanted change: ``UPDATE_GOLDEN=1 pytest tests/passes/test_verify.py`` and read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import Case, cases

from hetpipe_compiler.errors import ArtifactError
from hetpipe_compiler.ir.schedule import Instruction, Op, Schedule, StageProgram
from hetpipe_compiler.passes.schedules.wsp import wsp_program
from hetpipe_compiler.passes.simulate.costs import PipelineCosts
from hetpipe_compiler.passes.verify import proof_lengths, required_clock, verify_schedule

GOLDEN = Path(__file__).parent.parent / "golden" / "schedule_errors.txt"

NM, STALENESS = 4, 0
IN_FLIGHT = ((4, 2, 1), (4, 1))
COSTS = (PipelineCosts.chain([1, 2, 1], [2, 3, 2], 0.5), PipelineCosts.chain([1, 1], [3, 2], 0.5))
BASE = Schedule(NM, STALENESS, tuple(wsp_program(w, NM, STALENESS) for w in IN_FLIGHT))

# What it is -> edits of (virtual worker, stage, text in "prologue | period", what stands there instead).
# vw0/stage0: F1 F2 F3 F4 | B1 U1 F5 B2 U2 F6 B3 U3 F7 B4 U4 ^0 v0 F8
# vw0/stage1: F1 F2 | B1 U1 F3 B2 U2 v-1 F4 B3 U3 F5 B4 U4 ^0 F6
# vw0/stage2: F1 | B1 U1 F2 B2 U2 F3 B3 U3 v-1 F4 B4 U4 ^0 F5
MUTATIONS: dict[str, list[tuple[int, int, str, str]]] = {
    "a forward left out of the prologue": [(0, 0, "F1 F2 F3", "F1 F3")],
    "the last forward left out of the prologue": [(0, 0, "F3 F4 |", "F3 |")],
    "a forward left out of the period": [(0, 1, " F5", "")],
    "a forward twice": [(0, 0, "F5", "F5 F5")],
    "two forwards exchanged": [(0, 0, "F2 F3", "F3 F2")],
    "a backward left out": [(1, 0, " B2", "")],
    "a backward twice": [(0, 2, "B2 U2", "B2 B2 U2")],
    "two backwards exchanged": [(0, 0, "B2 U2 F6 B3 U3", "B3 U3 F6 B2 U2")],
    "an update left out": [(0, 2, " U3", "")],
    "an update twice": [(0, 2, "U3", "U3 U3")],
    "a backward before its forward": [(0, 2, "F1 | B1 U1 F2", "| B1 U1 F1 F2")],
    "an update before its backward": [(1, 1, "B3 U3", "U3 B3")],
    "an update after the next backward": [(0, 1, "B1 U1 F3 B2 U2", "B1 F3 B2 U1 U2")],
    "an empty period": [(1, 1, "| B1 U1 F2 B2 U2 F3 B3 U3 v-1 F4 B4 U4 ^0 F5", "|")],
    "an update later than Nm minibatches": [(0, 0, "B1 U1 F5", "B1 F5 U1")],
    "one more in flight than planned": [(0, 1, "B1 U1 F3", "F3 B1 U1")],
    "no push": [(0, 1, " ^0", "")],
    "a push before the last update": [(0, 2, "B4 U4 ^0", "B4 ^0 U4")],
    "a push twice": [(0, 2, "^0", "^0 ^0")],
    "a push of the wrong wave": [(0, 2, "^0", "^1")],
    "a push that skips the first wave": [(0, 2, "B1 U1 F2", "^1 B1 U1 F2"), (0, 2, "U4 ^0", "U4")],
    "no pull": [(0, 0, " v0", "")],
    "a pull of an older wave": [(0, 0, "v0", "v-1")],
    "a pull after its forward": [(0, 0, "v0 F8", "F8 v0")],
    "a pull before its own push": [(0, 0, "F7 B4 U4 ^0 v0", "v0 F7 B4 U4 ^0")],
    "a pull of a wave that nobody has pushed": [(0, 2, "v-1", "v0")],
    "messages written by hand": [(0, 0, "F1 F2", "F1 a1>1 F2")],
    "an earlier stage that runs fewer ahead": [
        (
            0,
            0,
            "F1 F2 F3 F4 | B1 U1 F5 B2 U2 F6 B3 U3 F7 B4 U4 ^0 v0 F8",
            "F1 | B1 U1 F2 B2 U2 F3 B3 U3 F4 B4 U4 ^0 v0 F5",
        )
    ],
}


def text(program: StageProgram) -> str:
    return " ".join(map(str, program.prologue)) + " | " + " ".join(map(str, program.period))


def parse(edited: str) -> StageProgram:
    prologue, period = (tuple(map(Instruction.parse, part.split())) for part in edited.split("|"))
    return StageProgram(NM, prologue, period)


def mutated(edits: list[tuple[int, int, str, str]]) -> Schedule:
    programs = [list(stages) for stages in BASE.programs]
    for vw, stage, old, new in edits:
        before = text(programs[vw][stage])
        assert before.count(old) == 1, (before, old)
        programs[vw][stage] = parse(before.replace(old, new))
    return Schedule(NM, STALENESS, tuple(map(tuple, programs)))


def refusal(schedule: Schedule) -> str:
    with pytest.raises(ArtifactError) as error:
        verify_schedule(schedule, COSTS, IN_FLIGHT)
    assert error.value.code in {f"HP43{i}" for i in range(9)}
    assert error.value.where
    assert error.value.hint
    return str(error.value)


def test_the_default_schedule_passes() -> None:
    verify_schedule(BASE, COSTS, IN_FLIGHT)
    verify_schedule(Schedule.from_csv(BASE.to_csv(), nm=NM, staleness=STALENESS), COSTS, IN_FLIGHT)


def test_a_pull_counts_for_the_forward_after_it() -> None:
    """``v0 ^0 F8`` is ``^0 v0 F8``: no place between two forwards changes what a pull means."""
    verify_schedule(mutated([(0, 0, "^0 v0", "v0 ^0")]), COSTS, IN_FLIGHT)


def test_mutations_are_refused() -> None:
    report = "\n\n".join(f"# {title}\n{refusal(mutated(edits))}" for title, edits in MUTATIONS.items())
    missing_stage = Schedule(NM, STALENESS, (BASE.programs[0], BASE.programs[1][:1]))
    report += f"\n\n# a stage without a column\n{refusal(missing_stage)}\n"
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(report)
    assert report == GOLDEN.read_text()


@settings(deadline=None, max_examples=60)
@given(cases())
def test_default_schedules_of_random_pipelines_pass(case: Case) -> None:
    schedule = Schedule(case.nm, case.staleness, (case.programs,) * 2)
    verify_schedule(schedule, [case.costs] * 2, [case.in_flight] * 2)


@settings(deadline=None, max_examples=150)
@given(cases(), st.data())
def test_one_instruction_less_is_never_accepted(case: Case, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, len(case.costs) - 1))
    program = case.programs[stage]
    in_period = data.draw(st.booleans())
    part = program.period if in_period else program.prologue
    at = data.draw(st.integers(0, len(part) - 1))
    less = part[:at] + part[at + 1 :]
    changed = (
        StageProgram(case.nm, program.prologue, less) if in_period else StageProgram(case.nm, less, program.period)
    )
    programs = (*case.programs[:stage], changed, *case.programs[stage + 1 :])
    with pytest.raises(ArtifactError) as error:
        verify_schedule(Schedule(case.nm, case.staleness, (programs,)), [case.costs], [case.in_flight])
    assert error.value.code in {"HP430", "HP431", "HP432", "HP433", "HP434", "HP435"}


@settings(deadline=None, max_examples=60)
@given(cases(), st.data())
def test_less_memory_or_staleness_than_the_schedule_needs_is_refused(case: Case, data: st.DataObject) -> None:
    schedule = Schedule(case.nm, case.staleness, (case.programs,))
    less = list(case.in_flight)
    less[data.draw(st.integers(0, len(less) - 1))] -= 1
    with pytest.raises(ArtifactError, match="planned memory holds") as error:
        verify_schedule(schedule, [case.costs], [less])
    assert error.value.code == "HP433"
    if case.staleness > 0:
        stricter = Schedule(case.nm, case.staleness - 1, (case.programs,))
        with pytest.raises(ArtifactError) as error:
            verify_schedule(stricter, [case.costs], [case.in_flight])
        assert error.value.code == "HP435"


def test_the_required_clock_is_the_specs() -> None:
    """Nm = 4: D = 0: 1-7 free, 8-11 need wave 0 of all, 12-15 wave 1; D = 1: 1-11 free, 12-15 wave 0."""
    assert [required_clock(p, 4, 0) for p in range(1, 16)] == [0] * 7 + [1] * 4 + [2] * 4
    assert [required_clock(p, 4, 1) for p in range(1, 16)] == [0] * 11 + [1] * 4
    # Nm = 1 is SSP: minibatch p may miss the last D waves of the others. D = 0 is BSP.
    assert [required_clock(p, 1, 0) for p in range(1, 5)] == [0, 1, 2, 3]
    assert [required_clock(p, 1, 2) for p in range(1, 6)] == [0, 0, 0, 1, 2]


@given(st.integers(1, 7), st.integers(0, 5))
def test_the_gates_are_exactly_the_required_clock(nm: int, staleness: int) -> None:
    """The start rule in its second form: the pulls of the default program give R(p), no more and no less."""
    (program,) = wsp_program((nm,), nm, staleness)
    clock = 0
    for instruction in program.unroll(nm * (staleness + 6)):
        if instruction.op is Op.PULL:
            clock = instruction.index + 1
        elif instruction.op is Op.FORWARD:
            assert clock == required_clock(instruction.index, nm, staleness)


def test_proof_lengths_hold_short_waves_and_all_gates() -> None:
    assert proof_lengths(4, 0) == (19, 17, 16, 5, 4, 1)
    assert proof_lengths(1, 2) == (7, 6, 2, 1)


def test_pipelines_without_gradients_or_neighbours() -> None:
    """A frozen first stage gets no gradients; a stage may hear from a far one only."""
    costs = PipelineCosts.chain([1, 1, 1], [0, 2, 2], 0.5)
    costs.gradient_ms[1, 0] = np.nan
    costs.activation_ms[0, 2], costs.activation_ms[1, 2] = 1.0, np.nan
    costs.gradient_ms[2, 1], costs.gradient_ms[2, 0] = np.nan, 1.0
    verify_schedule(Schedule(4, 1, (wsp_program((4, 2, 1), 4, 1),)), [costs], [(4, 2, 1)])
