"""Weight versions: distinct tensors, one for each version that a pending backward needs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hetpipe_compiler.errors import RunError
from hetpipe_compiler.runtime.flat import ALIGNMENT_BYTES, FlatTensors
from hetpipe_compiler.runtime.weights import Slot, VersionError, WeightVersions

torch.set_num_threads(1)


class Part(nn.Module):
    """A weight, a bias that odd sizes follow, a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.weight = nn.Parameter(torch.empty(3))
        self.bias = nn.Parameter(torch.empty(3))
        self.fixed = nn.Parameter(torch.empty(2), requires_grad=False)
        self.register_buffer("seen", torch.empty(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return (x * self.inner.weight * self.inner.weight + self.bias).sum() * self.fixed.sum()


VALUES = {
    "inner.weight": torch.tensor([1.0, 2.0, 3.0]),
    "bias": torch.zeros(3),
    "fixed": torch.ones(2),
    "seen": torch.tensor(0.0),
    "unrelated": torch.zeros(1),
}


def make(slots: int) -> WeightVersions:
    return WeightVersions(Part, VALUES, slots, "cpu", frozenset({"seen"}))


def forward(weights: WeightVersions) -> tuple[Slot, torch.Tensor]:
    slot = weights.acquire()
    return slot, slot.module(torch.ones(3))


def test_backward_uses_the_weights_of_its_forward() -> None:
    weights = make(2)
    first, loss_1 = forward(weights)
    weights.begin_write().views["inner.weight"].fill_(10.0)
    second, loss_2 = forward(weights)
    assert first is not second
    loss_1.backward()
    weights.release(first)
    # d/dw of 2 * w^2 with the old weights; the gradient is where the optimizer looks.
    assert torch.equal(weights.parameters["inner.weight"].grad, torch.tensor([4.0, 8.0, 12.0]))
    weights.parameters["inner.weight"].grad = None
    loss_2.backward()
    weights.release(second)
    assert torch.equal(weights.parameters["inner.weight"].grad, torch.tensor([40.0, 40.0, 40.0]))


def test_writing_a_slot_that_a_backward_needs_is_caught() -> None:
    weights = make(2)
    slot, loss = forward(weights)
    weights.begin_write().views["bias"].fill_(1.0)
    with pytest.raises(VersionError, match="pending backward"):
        weights.fill(slot)
    # Autograd notices an in-place write by itself, since views and flat buffer share a version counter.
    with torch.no_grad():
        slot.values.flats[torch.float32].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_ring_of_one_is_the_master_itself() -> None:
    weights = make(1)
    slot, loss = forward(weights)
    assert slot.values is weights.master
    with pytest.raises(VersionError):
        weights.begin_write()
    loss.backward()
    weights.release(slot)
    assert weights.parameters["inner.weight"].grad is not None
    weights.begin_write().views["inner.weight"].fill_(5.0)
    slot, _ = forward(weights)
    assert torch.equal(slot.module.get_parameter("inner.weight"), torch.full((3,), 5.0))


def test_copies_only_what_changed_and_shares_a_version() -> None:
    weights = make(3)
    first, _ = forward(weights)
    second, _ = forward(weights)
    assert first is second
    assert first.pending == 2
    assert sum(slot.version >= 0 for slot in weights.slots) == 1
    for _ in range(2):
        weights.begin_write()
        forward(weights)
    weights.begin_write()
    with pytest.raises(VersionError, match="all 3"):
        weights.acquire()
    weights.release(first)
    with pytest.raises(VersionError):
        weights.acquire()
    weights.release(first)
    assert weights.acquire() is first


def test_gradients_of_a_shared_version_accumulate_until_the_step() -> None:
    weights = make(2)
    slots = [forward(weights) for _ in range(2)]
    for slot, loss in slots:
        loss.backward()
        weights.release(slot)
    assert torch.equal(weights.parameters["bias"].grad, torch.full((3,), 4.0))


def test_buffers_and_frozen_parameters_are_the_same_tensors_everywhere() -> None:
    weights = make(2)
    first, _ = forward(weights)
    weights.begin_write()
    second, _ = forward(weights)
    for name in ("seen", "fixed"):
        here = [dict([*s.module.named_parameters(), *s.module.named_buffers()])[name] for s in (first, second)]
        assert here[0] is here[1]
    assert weights.buffers["seen"].item() == 2
    assert VALUES["seen"].item() == 0, "the caller's tensor is not written"
    assert weights.trainable == ("bias", "inner.weight") or weights.trainable == ("inner.weight", "bias")


def test_values_that_do_not_fit_are_named() -> None:
    for values in ({**VALUES, "bias": torch.zeros(4)}, {**VALUES, "bias": torch.zeros(3).double()}):
        with pytest.raises(RunError, match=r"HP513.*bias"):
            WeightVersions(Part, values, 1, "cpu")
    with pytest.raises(RunError, match="HP513"):
        WeightVersions(Part, {}, 1, "cpu")


def test_flat_views_are_aligned_and_apart() -> None:
    flat = FlatTensors({"a": torch.zeros(3), "b": torch.zeros(()), "c": torch.zeros(2, 2).double()}, "cpu")
    assert set(flat.flats) == {torch.float32, torch.float64}
    assert all(view.data_ptr() % ALIGNMENT_BYTES == 0 for view in flat.views.values())
    flat.views["a"].fill_(1)
    assert flat.views["b"].item() == 0
    other = flat.empty_like()
    other.copy_(flat)
    flat.views["a"].fill_(5)
    other.becomes_difference(flat)
    assert torch.equal(other.views["a"], torch.full((3,), 4.0))
    assert flat.views["c"].shape == (2, 2)
