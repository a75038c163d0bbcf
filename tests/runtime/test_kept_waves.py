"""Weights that wait to be saved: as they were at their clock, and never many."""

from __future__ import annotations

import torch

from hetpipe_compiler.runtime.kept_waves import KeptWaves


def test_each_parameter_is_kept_as_it_was_at_its_clock() -> None:
    kept = KeptWaves(("a", "b"), 2)
    values = {(name, clock): torch.full((1,), float(clock)) for name in "ab" for clock in range(6)}
    for clock in (1, 2, 3, 4):
        kept.note("a", clock, values["a", clock])
    assert kept.completed() == []
    kept.note("b", 1, values["b", 1])
    kept.note("b", 5, values["b", 5])  # past two of them at once
    assert kept.completed() == [
        (2, {"a": values["a", 2], "b": values["b", 5]}),
        (4, {"a": values["a", 4], "b": values["b", 5]}),
    ]
    assert kept.completed() == []


def test_two_sets_are_all_that_wait() -> None:
    kept = KeptWaves(("a",), 1)
    assert (kept.wanted, kept.full, kept.waiting) == (True, False, ())
    for clock in (1, 2):
        kept.put(clock, {"clock": clock}, {})
    assert (kept.full, kept.waiting) == (True, (1, 2))
    assert kept.take(1) == ({"clock": 1}, {})
    assert kept.take(1) is None
    assert (kept.full, kept.waiting) == (False, (2,))


def test_nothing_is_kept_without_a_number() -> None:
    kept = KeptWaves(("a",), None)
    kept.note("a", 4, torch.zeros(1))
    assert not kept.wanted
    assert kept.completed() == []
