"""A stage's own updates, and the start rule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hetpipe_compiler.runtime.channels import PulledWeights
from hetpipe_compiler.runtime.weights import WeightVersions
from hetpipe_compiler.runtime.wsp.client import LocalUpdates, need_after_push, required_clock, wave_of


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(2))
        self.b = nn.Parameter(torch.empty(1))


def make(nm: int = 2) -> LocalUpdates:
    values = {"a": torch.zeros(2), "b": torch.zeros(1)}
    return LocalUpdates(WeightVersions(Part, values, 1, "cpu"), nm)


def step(local: LocalUpdates, minibatch: int, change: float) -> None:
    local.begin_step()
    for view in local._weights.master.views.values():
        view.add_(change)
    local.end_step(minibatch)


def test_the_start_rule_is_that_of_the_specification() -> None:
    assert [required_clock(p, 4, 0) for p in (1, 7, 8, 11, 12, 15)] == [0, 0, 1, 1, 2, 2]
    assert [required_clock(p, 4, 1) for p in (11, 12, 15, 16)] == [0, 1, 1, 2]
    assert [wave_of(p, 4) for p in (1, 4, 5, 8)] == [0, 0, 1, 1]


@pytest.mark.parametrize("nm", range(1, 8))
@pytest.mark.parametrize("staleness", range(6))
def test_only_the_last_minibatch_of_a_wave_waits_for_what_the_push_asked(nm: int, staleness: int) -> None:
    for p in range(2, 60):
        need = required_clock(p, nm, staleness)
        if need > required_clock(p - 1, nm, staleness):
            assert p % nm == 0
            wave = p // nm - 1
            assert need == wave - staleness == need_after_push(wave - 1, staleness)


def test_sums_per_wave_and_pulled_weights_keep_own_updates() -> None:
    local = make()
    for p, change in enumerate([1.0, 2.0, 4.0, 8.0, 16.0], start=1):
        step(local, p, change)
    assert [local.updates(w)["a"].tolist() for w in (0, 1, 2)] == [[3.0, 3.0], [12.0, 12.0], [16.0, 16.0]]
    assert local.apply([PulledWeights({"a": torch.full((2,), 100.0)}, clock=1, contains=1)])
    master = local._weights.master.views
    assert master["a"].tolist() == [128.0, 128.0]  # 100 + waves 1 and 2
    assert master["b"].tolist() == [31.0]
    assert local.oldest_clock == 0
    assert set(local.own) == {0, 1, 2}  # b still needs wave 0
    local.apply([PulledWeights({"b": torch.full((1,), 200.0)}, clock=2, contains=2)])
    assert master["b"].tolist() == [216.0]
    assert set(local.own) == {1, 2}
    assert local.oldest_clock == 1


def test_of_several_replies_the_newest_counts() -> None:
    local = make()
    step(local, 1, 1.0)
    step(local, 2, 1.0)
    both = ("a", "b")
    old = PulledWeights({n: torch.full((2 if n == "a" else 1,), 5.0) for n in both}, clock=0, contains=0)
    new = PulledWeights({n: torch.full((2 if n == "a" else 1,), 50.0) for n in both}, clock=1, contains=1)
    local.apply([old, new])
    assert local._weights.master.views["a"].tolist() == [50.0, 50.0]
    assert local.own == {}
    assert not local.apply([])
    with pytest.raises(AssertionError, match="fewer own waves"):
        local.apply([old])


def test_the_sum_of_a_wave_is_a_difference_of_weights() -> None:
    """u_p = after - before as floating point gives it, not the increment that was meant."""
    local = make()
    local._weights.begin_write().views["b"].fill_(1e8)
    step(local, 1, 1.0)
    assert local.updates(0)["b"].item() == 0.0
