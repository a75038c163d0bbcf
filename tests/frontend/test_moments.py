"""Clocks and other values of the moment in ``forward``: refused where they are computed with, let be where not."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import pytest
import torch
from small_net import captured, line_of

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.moments import Moments

_TOP = """
import contextlib
import datetime
import logging
import os
import random
import secrets
import time
import timeit
import uuid
from datetime import datetime as moment
from time import perf_counter, time_ns as nanoseconds

import numpy as np


@contextlib.contextmanager
def timed(name):
    start = perf_counter()
    yield
    logging.getLogger("model").info("%s took %s s", name, perf_counter() - start)
"""
_INIT = "self.clock, self.built = time.monotonic, time.monotonic()"

COMPUTED_WITH = {
    "time.time": "h = h * time.time()",
    "nanoseconds by another name": "h = h + nanoseconds() % 1000003",
    "parity of the second": "h = h if int(time.time()) % 2 else -h",
    "morning and evening": "h = h.sin() if datetime.datetime.now().hour >= 12 else h.cos()",
    "day, by another name": "h = h * moment.today().toordinal()",
    "date": "h = h + datetime.date.today().year",
    "hour of a calendar": "h = h * (1 + time.localtime().tm_yday)",
    "text of a moment": "h = h * len(time.strftime('%A %B %d')) + int(time.strftime('%j'))",
    "attribute": "h = h * self.clock()",
    "other module's name": "h = h * timeit.default_timer()",
    "how long it took": "start = perf_counter(); h = h.relu(); h = h * (perf_counter() - start)",
    "time budget": "start = perf_counter(); h = h.relu()\nif perf_counter() - start < 60: h = h.sin()",
    "since it was built": "h = h.sin() if time.monotonic() - self.built < 3600 else h.cos()",
    "constant": "h = h + torch.tensor([float(time.time())] * 8)",
    "in a region": "with torch.no_grad():\n    g = h * time.time()\nh = h + g",
    "system's random numbers": "h = h * random.SystemRandom().random()",
    "secret": "h = h * secrets.randbelow(1 << 30)",
    "identifier": "h = h * (uuid.uuid4().int % 1000003)",
    "generator without a seed": "h = h * random.Random().random()",
    "NumPy's without a seed": "h = h * float(np.random.default_rng().random())",
}
ONLY_READ = {
    "timed and logged": "with timed('relu'): h = h.relu()",
    "printed": "start = time.time(); h = h.relu(); text = f'{time.time() - start} s at {datetime.datetime.now()}'",
    "calendar of a known moment": "h = h * time.gmtime(86400 * 365).tm_year + len(time.strftime('%Y', time.gmtime(0)))",
    "date of its own": "day = datetime.datetime(2020, 1, 2)\nh = h * day.day * isinstance(day, moment)",
    "timed beside NaN": "start = time.time(); h = h + torch.tensor([1.0, float('nan')]).nan_to_num().sum()",
    "logging": "logging.getLogger('model').warning('a warning'); h = h.relu()",
    "seeded generators": "h = h * random.Random(3).random() * float(np.random.default_rng(3).random())",
}


@pytest.fixture(autouse=True)
def _one_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the calendar says is the same whenever this runs."""
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.25)


def _captured(folder: Path, body: str) -> None:
    captured(folder, body, top=_TOP, init=_INIT)


@pytest.mark.parametrize("name", COMPUTED_WITH)
def test_computing_with_the_moment_is_refused(name: str, tmp_path: Path) -> None:
    body = COMPUTED_WITH[name]
    with pytest.raises(WorkloadError, match="one moment's value") as caught:
        _captured(tmp_path, body)
    assert caught.value.code == "HP112"
    assert caught.value.where in [f"{tmp_path}/{line_of(tmp_path, line)}" for line in body.splitlines()]


@pytest.mark.parametrize("name", ONLY_READ)
def test_reading_it_is_not(name: str, tmp_path: Path) -> None:
    _captured(tmp_path, ONLY_READ[name])


@pytest.mark.parametrize("folder", ["logging", "hetpipe_compiler"])
def test_the_name_of_the_models_folder_does_not_matter(folder: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir()
    with pytest.raises(WorkloadError, match="one moment's value"):
        _captured(tmp_path / folder, COMPUTED_WITH["time.time"])


def test_a_helper_beside_the_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "ticking_helper.py").write_text("from time import time\n\ndef ticked(h):\n    return h * time()\n")
    with pytest.raises(WorkloadError, match=r"time\.time\(\) \(at ticking_helper.py:4\)"):
        _captured(tmp_path, "from ticking_helper import ticked; h = ticked(h)")


STATE_BESIDE_A_CLOCK = {
    "counter": "start = time.time(); self.count = getattr(self, 'count', 0) + 1; h = h * self.count",
    "timed by what is kept": "self.at = time.time(); self.count = getattr(self, 'count', 0) + 1; h = h * self.count",
}


@pytest.mark.parametrize("name", STATE_BESIDE_A_CLOCK)
def test_state_beside_a_clock_is_told_as_state(name: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="count") as caught:
        _captured(tmp_path, STATE_BESIDE_A_CLOCK[name])
    assert caught.value.code == "HP113"


def test_the_moment_is_told_beside_a_cache(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="one moment's value"):
        _captured(tmp_path, "self.seen = 1; start = perf_counter(); h = h.relu(); h = h * (perf_counter() - start)")


def test_a_clock_that_the_garbage_collector_reads_is_no_reading(tmp_path: Path) -> None:
    moments, seen = Moments(tmp_path / "model.py"), []

    def collecting(*_: object) -> None:
        seen.append(time.perf_counter())

    gc.callbacks.append(collecting)
    try:
        with moments.watched(torch.nn.Linear(2, 2)):
            gc.collect()
    finally:
        gc.callbacks.remove(collecting)
    assert seen
    assert not moments._taken


def test_many_readings_move_on(tmp_path: Path) -> None:
    body = "start = time.time()\nfor _ in range(3000): last = time.time()\nassert last >= start"
    _captured(tmp_path, body)
    with pytest.raises(WorkloadError, match="one moment's value"):
        _captured(tmp_path, body + "\nh = h * last")


def test_clocks_are_put_back(tmp_path: Path) -> None:
    before = time.time, time.perf_counter, time.strftime
    _captured(tmp_path, ONLY_READ["printed"])
    assert (time.time, time.perf_counter, time.strftime) == before
