"""Workspace of nodes against closed forms: what lives only while a node runs forward or backward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetpipe_compiler.frontend.capture import capture
from hetpipe_compiler.frontend.load import LoadedWorkload
from hetpipe_compiler.ir.costs import NodeCost
from hetpipe_compiler.ir.workload import Workload
from hetpipe_compiler.passes.annotate_cost import count_costs
from hetpipe_compiler.passes.live_bytes import LiveBytes, LiveBytesMode
from hetpipe_compiler.passes.normalize import normalize

ROWS, WIDE, NARROW = 16, 64, 8


def workspaces(model: Callable[[], nn.Module], loss: Any = F.mse_loss, given: int = WIDE) -> dict[str, NodeCost]:
    def example() -> tuple[Tensor, Tensor]:
        return torch.randn(ROWS, given), torch.randn(ROWS, NARROW)

    workload = Workload(model, example, lambda p: torch.optim.SGD(p, lr=0.1), loss)
    return count_costs(normalize(capture(LoadedWorkload(workload, Path(__file__), {}))))


def test_a_linear_layer_holds_the_gradients_of_its_value_and_of_its_input() -> None:
    costs = workspaces(lambda: nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, NARROW)))
    wide, narrow = 4 * ROWS * WIDE, 4 * ROWS * NARROW
    # The batch needs no gradient; its forward makes a value that the next layer saves, from an input that it saves.
    assert costs["linear"].workspace == wide
    assert costs["linear_1"].workspace == narrow + wide


def test_a_tied_weights_second_gradient_is_added_to_the_first() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(WIDE, WIDE, bias=False), nn.Linear(WIDE, NARROW)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(self.layer(x)))

    costs = workspaces(Twice)
    wide, weight = 4 * ROWS * WIDE, 4 * WIDE * WIDE
    # Backward meets the second use first: its gradient is the one that stays.
    assert costs["linear"].workspace == wide + weight
    assert costs["linear_1"].workspace == 2 * wide


def test_kernels_of_the_backward_count() -> None:
    """y = x / s with a scalar s that trains: the gradient of s is made from two more values of x's size."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.scale, self.head = nn.Linear(WIDE, WIDE), nn.Parameter(torch.ones(())), nn.Linear(WIDE, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.first(x) / self.scale)

    wide = 4 * ROWS * WIDE
    assert workspaces(Scaled)["div"].workspace >= 3 * wide


def test_a_frozen_part_holds_what_nobody_saves() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDE, WIDE).requires_grad_(False)
            self.head = nn.Linear(WIDE, NARROW)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.first(x)))

    costs = workspaces(Frozen)
    wide = 4 * ROWS * WIDE
    assert costs["linear"].workspace == 2 * wide  # the batch, and a value that tanh does not save: no gradient flows
    assert costs["tanh"].workspace == wide  # its input; its value is saved by the head


def test_living_storages_are_counted_while_they_live() -> None:
    live = LiveBytes()
    first = torch.empty(100, device="meta")
    live.note([first, first.view(10, 10)])
    second = torch.empty(50, device="meta")
    live.note([second])
    assert (live.now, live.peak) == (600, 600)
    view = first[:10]
    del first
    assert live.now == 600
    del view
    assert (live.now, live.peak) == (200, 600)
    live.restart()
    del second
    assert (live.now, live.peak) == (0, 0)


def test_the_mode_sees_temporaries_but_not_results_on_known_storages() -> None:
    x = torch.empty(1000, device="meta")
    with LiveBytesMode() as mode:
        y = ((x + 1) * 2).relu_()
    assert (mode.live.peak, mode.live.now) == (8000, 4000)
    assert y.shape == x.shape
