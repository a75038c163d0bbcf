"""Predicted memory holds on this machine (minutes: every stage in a process of its own)."""

from __future__ import annotations

import pytest
from converters import load


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet50", "vit_b_16", "gpt2"])
def test_peak_memory_is_predicted_within_15_percent(model, tmp_path):
    pytest.importorskip("torchvision")
    pytest.importorskip("transformers")
    check = load("check_memory")
    compared = check.check(model, [2, 3, 4], batch_size=check.BATCHES[model], nm=2, folder=tmp_path)
    print(check.table(compared))
    assert max(abs(c.error) for c in compared) <= 0.15
