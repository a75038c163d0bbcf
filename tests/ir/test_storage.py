"""Tensors that share memory have one number, others have not."""

from __future__ import annotations

import pytest
import torch

from hetpipe_compiler.ir.storage import storage_of


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_views_share_their_storage_and_copies_do_not(device: str) -> None:
    tensor = torch.zeros(4, 6, device=device)
    copy = tensor.clone()
    assert storage_of(tensor) == storage_of(tensor[2:, 1]) == storage_of(tensor.t().detach())
    assert storage_of(tensor) != storage_of(copy)
