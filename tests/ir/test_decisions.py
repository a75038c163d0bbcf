"""The decisions file: what is written is read back; an edit shows; a mistake is named with its place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetpipe_compiler.errors import ClusterError
from hetpipe_compiler.ir.decisions import DecidedStage, DecidedWorker, Decisions

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1, max_size=8)
STAGES = st.builds(
    DecidedStage,
    device=NAMES | st.sampled_from(["n0:0", "1:30", "yes", "2020-01-01"]),
    in_flight=st.integers(1, 9),
    begins_at=st.none() | st.integers(0, 9) | NAMES,
    blocks=st.none() | st.sampled_from(["0-57 60", "7"]),
)
WORKERS = st.builds(
    DecidedWorker,
    stages=st.lists(STAGES, min_size=1, max_size=3).map(tuple),
    unused=st.lists(NAMES, max_size=2).map(tuple),
    ordered=st.lists(NAMES, max_size=2).map(tuple),
)
DECISIONS = st.builds(
    Decisions,
    policy=NAMES,
    partitioner=NAMES,
    nm=st.integers(1, 9),
    staleness=st.integers(0, 9),
    placement=st.sampled_from(["local", "round-robin"]),
    update_scale=st.none() | st.floats(0.01, 1),
    virtual_workers=st.lists(WORKERS, min_size=1, max_size=3).map(tuple),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(DECISIONS)
def test_written_and_read_back(tmp_path: Path, decisions: Decisions) -> None:
    path = tmp_path / "d.yaml"
    path.write_text(decisions.to_yaml(), encoding="utf-8")
    found = Decisions.load(path)
    assert found.model_copy(update={"digest": None}) == decisions
    assert not found.edited
    assert found.author("ED") == "ED"
    assert found.to_yaml() == decisions.to_yaml()


def test_a_digest_of_digits_alone_is_a_text(tmp_path: Path) -> None:
    several = (SMALL.model_copy(update={"staleness": n}) for n in range(100_000))
    digits = next(d for d in several if re.search(r"digest: '?\d+'?\n", d.to_yaml()))
    path = tmp_path / "d.yaml"
    path.write_text(digits.to_yaml(), encoding="utf-8")
    assert not Decisions.load(path).edited


SMALL = Decisions(
    policy="ED",
    partitioner="search",
    nm=4,
    virtual_workers=(
        DecidedWorker(
            stages=(
                DecidedStage(device="n0:0", in_flight=4, begins_at="conv1"),
                DecidedStage(device="n0:1", in_flight=1, begins_at="fc"),
            ),
            unused=("n0:2",),
        ),
    ),
)


@pytest.mark.parametrize(
    ("old", "new"), [("nm: 4", "nm: 3"), ("begins_at: fc", "begins_at: conv2"), ("unused: ['n0:2']", "unused: []")]
)
def test_an_edit_shows(tmp_path: Path, old: str, new: str) -> None:
    text = SMALL.to_yaml()
    assert old in text
    path = tmp_path / "d.yaml"
    path.write_text("# a comment is no edit\n" + text)
    assert not Decisions.load(path).edited
    path.write_text(text.replace(old, new))
    found = Decisions.load(path)
    assert found.edited
    assert found.author(found.policy) == "ED, edited"
    path.write_text(found.model_copy(update={"policy": found.author("ED")}).to_yaml().replace("nm: 3", "nm: 2"))
    again = Decisions.load(path)
    assert again.author(again.policy) == "ED, edited"


def test_a_file_of_ones_own_needs_little(tmp_path: Path) -> None:
    path = tmp_path / "d.yaml"
    path.write_text("nm: 1\nvirtual_workers:\n- stages: [{device: 'n0:0', in_flight: 1}]\n")
    found = Decisions.load(path)
    assert (found.policy, found.placement, found.edited) == ("by hand", "local", False)


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("- 1", "", "expected a mapping, got a list"),
        ("nm: 4", "virtual_workers", "missing"),
        ("nm: 4\nvirtual_workers: []", "virtual_workers", "at least 1 item"),
        ("nm: 0\nvirtual_workers: [{stages: [{device: a, in_flight: 1}]}]", "nm", "greater than or equal to 1, got 0"),
        ("nm: x\nvirtual_workers: [{stages: [{device: a, in_flight: 1}]}]", "nm", "valid integer, got 'x'"),
        ("nm: 1\nvirtual_workers: [{stages: [{device: a}]}]", "virtual_workers[0].stages[0].in_flight", "missing"),
        ("nm: 1\nvirtual_workers: [{stages: [{device: a, in_fligth: 1}]}]", "virtual_workers[0].stages[0].in_fligth",
         "unknown key 'in_fligth'"),
        ("nm: 1\nplacment: local\nvirtual_workers: [{stages: [{device: a, in_flight: 1}]}]", "placment", "unknown key"),
        ("a: &a [*a]\nnm: 1", "", "an anchor that holds itself"),
        ("2020-01-01: 3\nnm: 1", "", "a key that is no text"),
        (f"nm: {10**30}\nvirtual_workers: [{{stages: [{{device: a, in_flight: 1}}]}}]", "nm",
         "less than or equal to 1000"),
        ("nm: 1\nstaleness: 1001\nvirtual_workers: [{stages: [{device: a, in_flight: 1}]}]", "staleness",
         "less than or equal to 1000"),
        ("nm: 1\nupdate_scale: 0\nvirtual_workers: [{stages: [{device: a, in_flight: 1}]}]", "update_scale",
         "greater than 0, got 0"),
        ("nm: 1\nplacement: here\nvirtual_workers: [{stages: [{device: a, in_flight: 1}]}]", "placement",
         "should be 'local' or 'round-robin', got 'here'"),
        ("nm: 1\nvirtual_workers: [{stages: [{device: 2020-01-01, in_flight: 1, begins_at: [2]}]}]",
         "virtual_workers[0].stages[0].begins_at", "got a list"),
    ],
)  # fmt: skip
def test_mistakes_are_named(tmp_path: Path, text: str, place: str, message: str) -> None:
    path = tmp_path / "d.yaml"
    path.write_text(text)
    with pytest.raises(ClusterError) as caught:
        Decisions.load(path)
    assert caught.value.code == "HP240"
    assert caught.value.where == (f"{path}: {place}" if place else str(path))
    assert message in caught.value.message
    assert caught.value.hint
    if "in_fligth" in text:
        assert caught.value.hint == "did you mean 'in_flight'?"
