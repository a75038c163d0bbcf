"""What a process reports of itself."""

from __future__ import annotations

import time

import pytest

from hetpipe_compiler.runtime.waits import Activity


def test_pacing_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow device on an emulated cluster must not look like one that hangs."""
    monkeypatch.setattr("hetpipe_compiler.runtime.waits._PACE_S", 0.01)
    activity = Activity()
    start = time.monotonic()
    activity.pace(0.05)
    assert time.monotonic() - start >= 0.05
    assert activity.steps >= 4
    activity.pace(-1.0)
    assert time.monotonic() - start < 5
