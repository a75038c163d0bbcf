"""The text forms of schedules round-trip, runs unroll as documented, and mistakes in schedule.csv are named.

After a wanted change: ``UPDATE_GOLDEN=1 pytest tests/ir/test_schedule.py`` and read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe_compiler.errors import ArtifactError
from hetpipe_compiler.ir.schedule import Instruction, Op, Schedule, StageProgram

GOLDEN = Path(__file__).parent.parent / "golden" / "schedule_csv_errors.txt"

computations = st.builds(
    Instruction, st.sampled_from([Op.FORWARD, Op.BACKWARD, Op.UPDATE]), st.integers(1, 999_999_999)
)
exchanges = st.builds(Instruction, st.sampled_from([Op.PUSH, Op.PULL]), st.integers(-999, 999_999))
messages = st.builds(
    Instruction,
    st.sampled_from([Op.SEND_ACTIVATIONS, Op.RECEIVE_ACTIVATIONS, Op.SEND_GRADIENTS, Op.RECEIVE_GRADIENTS]),
    st.integers(1, 999_999),
    st.integers(0, 99),
)
instructions = st.one_of(computations, exchanges, messages)


def program(text: str, nm: int) -> StageProgram:
    prologue, period = (tuple(map(Instruction.parse, part.split())) for part in text.split("|"))
    return StageProgram(nm, prologue, period)


def unrolled(text: str, nm: int, minibatches: int) -> str:
    return " ".join(map(str, program(text, nm).unroll(minibatches)))


@given(instructions)
def test_instructions_round_trip(instruction: Instruction) -> None:
    assert Instruction.parse(str(instruction)) == instruction


@pytest.mark.parametrize(
    "token",
    ["", "F", "F0", "F-1", "B03", "f3", "F3 ", "v", "^1.0", "a3", "a3>", "a0>1", "g3>-1", "F٣", "3F", "F" + "9" * 5000],
)
def test_what_is_no_instruction(token: str) -> None:
    with pytest.raises(ArtifactError) as error:
        Instruction.parse(token)
    assert error.value.code == "HP420"


parts = st.lists(instructions, max_size=8).map(tuple)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.tuples(parts, parts), min_size=1, max_size=3), min_size=1, max_size=2))
def test_csv_round_trips(workers: list[list[tuple[tuple[Instruction, ...], tuple[Instruction, ...]]]]) -> None:
    programs = tuple(tuple(StageProgram(3, *stage) for stage in stages) for stages in workers)
    schedule = Schedule(3, 1, programs)
    assert Schedule.from_csv(schedule.to_csv(), nm=3, staleness=1) == schedule


def test_csv_that_a_spreadsheet_saved() -> None:
    text = (
        "\ufeffsection,vw0/stage0 ,vw0/stage1,\r\nP,F1,F1,\r\nP,F2\r\n,,\r\n\r\nR, B1  U1 ^0,B1 U1 ^0,\r\nR,F3,F2,\r\n"
    )
    schedule = Schedule.from_csv(text, nm=1, staleness=3)
    assert schedule.programs == ((program("F1 F2 | B1 U1 ^0 F3", 1), program("F1 | B1 U1 ^0 F2", 1)),)


def test_a_row_is_a_step_of_each_stage() -> None:
    text = Schedule(
        2, 0, ((program("F1 F2 | B1 U1 F3 B2 U2 ^0 v0 F4", 2), program("F1 | B1 U1 v-1 F2 B2 U2 ^0 F3", 2)),)
    )
    assert text.to_csv().splitlines() == [
        "section,vw0/stage0,vw0/stage1",
        "P,F1,F1",
        "P,F2,",
        "R,B1 U1,B1 U1",
        "R,F3,v-1 F2",
        "R,B2 U2 ^0,B2 U2 ^0",
        "R,v0 F4,F3",
    ]


WSP = "F1 F2 | B1 U1 F3 B2 U2 ^0 v0 F4"


@pytest.mark.parametrize(
    ("text", "minibatches", "expected"),
    [
        (WSP, 4, "F1 F2 B1 U1 F3 B2 U2 ^0 v0 F4 B3 U3 B4 U4 ^1"),
        (WSP, 3, "F1 F2 B1 U1 F3 B2 U2 ^0 B3 U3 ^1"),  # a short last wave; no pull without its forward
        (WSP, 1, "F1 B1 U1 ^0"),
        (WSP, 0, ""),
        ("F1 | B1 U1 v-1 F2 B2 U2 ^0 F3", 4, "F1 B1 U1 F2 B2 U2 ^0 F3 B3 U3 v0 F4 B4 U4 ^1"),  # v-1 asks for nothing
        ("F1 F2 | B1 U1 F3 B2 ^-1 U2 F4", 4, "F1 F2 B1 U1 F3 B2 U2 F4 B3 U3 B4 ^0 U4 ^1"),  # pushes a wave later
        ("F1 F2 B1 U1 F3 | B2 U2 F4 B3 U3 F5", 4, "F1 F2 B1 U1 F3 B2 U2 F4 B3 U3 B4 U4"),  # work in the prologue
        ("F1 F2 | v1 v0 B1 U1 F3 B2 U2 F4", 4, "F1 F2 B1 U1 v1 F3 B2 U2 F4 B3 U3 B4 U4"),  # the later wave counts
        ("F1 |", 3, "F1"),
    ],
)
def test_unrolling(text: str, minibatches: int, expected: str) -> None:
    assert unrolled(text, 2, minibatches) == expected


@given(st.integers(1, 30), st.integers(0, 12))
def test_a_longer_run_starts_like_a_shorter_one(minibatches: int, more: int) -> None:
    """Up to minibatch M, except that only the shorter run pushes a short wave early."""
    stage = program("F1 F2 F3 | B1 U1 F4 B2 U2 F5 B3 U3 ^0 v0 F6", 3)
    shorter, longer = (
        [i for i in stage.unroll(m) if i.op not in (Op.PUSH, Op.PULL) and i.index <= minibatches]
        for m in (minibatches, minibatches + more)
    )
    assert shorter == longer


CSV_CASES = {
    "an empty file": "",
    "semicolons": "section;vw0/stage0\nP;F1\n",
    "no stages": "section\nP\n",
    "a column that is no stage": "section,vw0/stage0,stage1\n",
    "a stage left out": "section,vw0/stage0,vw0/stage2\n",
    "a virtual worker left out": "section,vw0/stage0,vw2/stage0\n",
    "a column twice": "section,vw0/stage0,vw0/stage0\n",
    "columns from stage 1": "section,vw0/stage1\n",
    "an unknown section": "section,vw0/stage0\nP,F1\nQ,B1 U1 F2\n",
    "an unknown instruction": "section,vw0/stage0,vw0/stage1\nP,F1,F1\nR,B1 U1 F2,B1 W1 F2\n",
    "minibatch 0": "section,vw0/stage0\nP,F0 F1\n",
    "a cell too many": "section,vw0/stage0\nP,F1,F1\n",
    "an unclosed quote and a huge cell": 'section,vw0/stage0\nP,"' + "F1 " * 60_000,
}


def csv_error(text: str) -> str:
    with pytest.raises(ArtifactError) as error:
        Schedule.from_csv(text, nm=1, staleness=0)
    return str(error.value)


def test_mistakes_in_schedule_csv() -> None:
    report = "\n\n".join(f"# {title}\n{csv_error(text)}" for title, text in CSV_CASES.items()) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(report)
    assert report == GOLDEN.read_text()


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "schedule.csv").write_bytes(b"\xff\xfesection")
    with pytest.raises(ArtifactError, match="'utf-8' codec") as caught:
        Schedule.read(tmp_path / "schedule.csv", nm=1, staleness=0)
    assert caught.value.code == "HP421"
