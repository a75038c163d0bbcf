"""A branch on the batch size fixes it: another batch would take the other way."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_net import captured, factors

BRANCHES = {
    "x.shape[0] > 3": "batch size > 3",
    "x.shape[0] != 3": "batch size != 3",
    "x.shape[0] % 2 == 0": "(batch size % 2) == 0",
    "h.numel() < 4096": "8*batch size < 4096",
}


@pytest.mark.parametrize("condition", BRANCHES)
def test_a_branch_fixes_the_batch_size(condition: str, tmp_path: Path) -> None:
    found = captured(tmp_path, f"h = h * 3 if {condition} else h * 2")
    assert factors(found) == [3]
    assert found.dynamic_batch_note == f"the model goes this way only where {BRANCHES[condition]}"


@pytest.mark.parametrize(
    "condition", ["x.shape[0] > 0", "x.shape[0] == h.shape[0]", "x.shape[1] == 8", "2 * x.shape[0] > h.shape[0]"]
)
def test_one_that_all_batches_take_does_not(condition: str, tmp_path: Path) -> None:
    found = captured(tmp_path, f"h = h * 3 if {condition} else h * 2")
    assert factors(found) == [3]
    assert found.dynamic_batch
