"""The parameter shard as a state machine: push protocol, clocks, and sums whose bits do not depend on arrival."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe_compiler.errors import RunError
from hetpipe_compiler.runtime.wsp.server import ParameterShard, Reply


def shard(workers: int = 2, *, reproducible: bool = False, staleness: int = 0, scale: float = 0.5) -> Any:
    events: list[dict[str, Any]] = []
    made = ParameterShard(
        {"a": torch.zeros(2), "b": torch.zeros(1)},
        workers,
        scale=scale,
        staleness=staleness,
        reproducible=reproducible,
        on_event=events.append,
    )
    return made, events


def ones(*names: str) -> dict[str, torch.Tensor]:
    return {n: torch.ones(2 if n == "a" else 1) for n in names}


def test_free_running_applies_at_once_and_scales() -> None:
    s, events = shard()
    assert s.push(0, 0, 0, ones("a", "b")) == []
    assert s.snapshot()["a"].tolist() == [0.5, 0.5]
    (reply,) = s.pull(0, 0, ("a", "b"), 0)
    assert (reply.clock, reply.contains, reply.weights["b"].item()) == (0, 1, 0.5)
    assert [e["event"] for e in events] == ["push", "pull"]


def test_a_pull_waits_for_the_slowest_and_names_what_it_contains() -> None:
    s, _ = shard()
    s.push(0, 1, 0, ones("a"))
    assert s.pull(0, 1, ("a",), 1) == []
    # The other virtual worker is cut elsewhere: its stages push the parameters apart.
    assert s.push(1, 0, 0, ones("b")) == []
    (reply,) = s.push(1, 2, 0, ones("a"))
    assert isinstance(reply, Reply)
    assert (reply.vw, reply.stage, reply.need, reply.clock, reply.contains) == (0, 1, 1, 1, 1)
    assert reply.weights["a"].tolist() == [1.0, 1.0]
    assert s.push(1, 2, 1, ones("a")) == []


def test_replies_are_never_written_later() -> None:
    s, _ = shard()
    (reply,) = s.pull(0, 0, ("a",), 0)
    s.push(0, 0, 0, ones("a"))
    assert reply.weights["a"].tolist() == [0.0, 0.0]


def test_push_protocol() -> None:
    s, events = shard()
    s.push(0, 0, 0, ones("a"))
    s.push(0, 0, 0, ones("a"))  # a retry
    assert s.snapshot()["a"].tolist() == [0.5, 0.5]
    assert [e["accepted"] for e in events] == [True, False]
    with pytest.raises(RunError, match=r"HP511.*wave 2.*expected wave 1"):
        s.push(0, 0, 2, ones("a"))
    with pytest.raises(RunError, match=r"HP510.*'c'"):
        s.push(0, 0, 1, {"c": torch.ones(1)})
    with pytest.raises(RunError, match="HP510"):
        s.push(0, 0, 1, {"a": torch.ones(3)})
    assert s.waves(0) == {"a": 1, "b": 0}


@pytest.mark.parametrize("reproducible", [False, True])
def test_the_finished_hold_nobody_back(reproducible: bool) -> None:
    s, _ = shard(reproducible=reproducible)
    s.push(0, 0, 0, ones("a", "b"))
    s.push(0, 0, 1, ones("a", "b"))
    assert s.pull(0, 0, ("a", "b"), 2) == []
    s.push(1, 0, 0, ones("a", "b"))
    (reply,) = s.finish(1, 0, ("a", "b"))
    assert reply.clock == 2
    assert reply.weights["a"].tolist() == [1.5, 1.5]
    assert not s.finished
    with pytest.raises(RunError, match=r"HP511.*finished"):
        s.push(1, 0, 1, ones("a"))
    s.push(1, 0, 0, ones("a"))  # still only a retry
    s.finish(0, 0, ("a", "b"))
    assert s.finished


def test_finishing_drops_own_pulls() -> None:
    s, _ = shard()
    s.push(0, 0, 0, ones("a"))
    assert s.pull(0, 0, ("a",), 1) == []
    assert s.finish(0, 0, ("a",)) == []
    assert s.push(1, 0, 0, ones("a")) == []


def test_reproducible_replies_hold_exactly_the_clock_asked_for() -> None:
    s, _ = shard(reproducible=True, staleness=1)
    for wave in range(2):
        for vw in (1, 0):
            s.push(vw, 0, wave, ones("a", "b"))
    assert s.pull(0, 0, ("a",), 0) == []
    (reply,) = s.pull(0, 0, ("a",), 1)
    assert (reply.clock, reply.contains, reply.weights["a"].tolist()) == (1, 1, [1.0, 1.0])
    s.push(0, 0, 2, ones("a", "b"))  # incomplete: not in the snapshot
    assert s.snapshot()["a"].tolist() == [2.0, 2.0]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), workers=st.integers(2, 4), staleness=st.integers(0, 3))
def test_reproducible_bits_do_not_depend_on_arrival(data: st.DataObject, workers: int, staleness: int) -> None:
    """Any order of pushes that the bound allows gives S + scale * (U0 + U1 + ...), wave by wave."""
    waves = 5
    generator = torch.Generator().manual_seed(workers)
    updates = torch.randn(workers, waves, 2, generator=generator)
    s = ParameterShard({"a": torch.full((2,), 0.1)}, workers, scale=1 / workers, staleness=staleness, reproducible=True)
    expected = [torch.full((2,), 0.1)]
    for wave in range(waves):
        total = updates[0, wave]
        for vw in range(1, workers):
            total = total + updates[vw, wave]
        expected.append(expected[-1] + (1 / workers) * total)
    done = [0] * workers
    replies: list[Reply] = []
    asked = 0
    while min(done) < waves:
        ready = [vw for vw in range(workers) if done[vw] < waves and done[vw] - min(done) <= staleness]
        vw = data.draw(st.sampled_from(ready))
        replies += s.push(vw, 0, done[vw], {"a": updates[vw, done[vw]]})
        need = max(0, done[vw] + 1 - staleness)
        asked += need > 0
        replies += s.pull(vw, 0, ("a",), need)
        done[vw] += 1
        assert s.clock() == min(done)
    assert len(replies) == asked
    for reply in replies:
        assert torch.equal(reply.weights["a"], expected[reply.need])
    assert torch.equal(s.snapshot()["a"], expected[waves])
    assert len(s._entries["a"].history) <= staleness + 1
    assert not s._entries["a"].waiting
