"""Predictions from a profile made here hold on this machine (minutes: one thread)."""

from __future__ import annotations

import statistics

import pytest
from converters import load


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet50", "vit_b_16", "gpt2"])
def test_stage_times_are_predicted_within_15_percent(model, tmp_path):
    pytest.importorskip("torchvision")
    pytest.importorskip("transformers")
    check = load("check_prediction")
    compared = check.check(model, [2, 3, 4], batch_size=check.BATCHES[model], seconds=0.05, runs=3, folder=tmp_path)
    print(check.table(compared))
    assert all(c.measured_share == 1.0 for c in compared)
    assert statistics.median(abs(c.error) for c in compared) <= 0.15
