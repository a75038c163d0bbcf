"""Buffers merged over virtual workers."""

from __future__ import annotations

import pytest
import torch

from hetpipe_compiler.errors import RunError
from hetpipe_compiler.runtime.merge import BufferBook


def book() -> BufferBook:
    return BufferBook(
        {"mean": torch.zeros(2), "count": torch.tensor(7), "mask": torch.tensor([True, False]), "table": torch.zeros(3)}
    )


def test_each_kind_merges_by_its_rule() -> None:
    b = book()
    mask = torch.tensor([False, False])
    b.report(1, {"mean": torch.tensor([3.0, 9.0]), "count": torch.tensor(17), "mask": mask}, samples=10)
    b.report(0, {"mean": torch.tensor([0.0, 0.0]), "count": torch.tensor(8), "mask": mask}, samples=1)
    b.report(0, {"mean": torch.tensor([0.0, 3.0]), "count": torch.tensor(9), "mask": mask}, samples=20)
    merged = b.merged()
    assert torch.equal(merged["mean"], torch.tensor([1.0, 5.0]))
    assert merged["count"].item() == 7 + 10 + 2
    assert torch.equal(merged["mask"], mask)
    assert torch.equal(merged["table"], torch.zeros(3))


def test_others_must_agree() -> None:
    b = book()
    b.report(0, {"mask": torch.tensor([True, True])}, 1)
    b.report(1, {"mask": torch.tensor([True, False])}, 1)
    with pytest.raises(RunError, match=r"HP514.*mask"):
        b.merged()


def test_nothing_seen_leaves_the_initial_value() -> None:
    b = book()
    b.report(0, {"mean": torch.ones(2)}, 0)
    assert torch.equal(b.merged()["mean"], torch.zeros(2))
