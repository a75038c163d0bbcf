"""What a model keeps in Python from one call to the next: state is refused with its line, a cache is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_net import captured, factors, line_of

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.ir.captured import Captured

_TOP = """
import contextvars
import os
import random
import threading
import weakref
from collections import deque

import numpy as np

COUNT = 0
TABLE, LOCAL, VARIABLE = weakref.WeakKeyDictionary(), threading.local(), contextvars.ContextVar("VARIABLE", default=0)


class Meter:
    def __init__(self):
        self.count = 0


def counting():
    count = 0

    def tick():
        nonlocal count
        count += 1
        return count

    return tick


def numbers():
    number = 0
    while True:
        number += 1
        yield number
"""
_INIT = """
self.calls, self.kept, self.recent, self.meter, self.step = {"n": 0}, [], deque(maxlen=2), Meter(), None
self.tick, self.numbers = counting(), numbers()
self.dice = {"python": random.Random(3), "numpy": np.random.default_rng(3), "table": np.zeros(3)}
"""

STATE = {
    "counter in a dict": ("self.calls['n'] += 1; h = h / self.calls['n']", "calls"),
    "growing deque": ("self.recent.append(len(self.recent)); h = h * len(self.recent)", "recent"),
    "counter from None": ("self.step = 1 if self.step is None else self.step + 1; h = h * self.step", "step"),
    "counter set beside another name": ("self.step, h = (self.step or 0) + 1, h * (self.step or 1)", "step"),
    "counter of an object": ("self.meter.count += 1; h = h * self.meter.count", "meter"),
    "counter of the file": ("global COUNT; COUNT += 1; h = h * COUNT", "COUNT"),
    "counter of the class": ("type(self).of_class += 1; h = h * self.of_class", "of_class"),
    "list of the class": ("self.met.append(1); h = h * len(self.met)", "met"),
    "counter of a closure": ("h = h * self.tick()", "tick"),
    "first call of its own kind in a region": (
        "with torch.no_grad(): g = h * (2 if self.step is None else 3)\nself.step = 1; h = h + g",
        "step",
    ),
    "counter in a table of modules": ("TABLE[self.a] = TABLE.get(self.a, 0) + 1; h = h * TABLE[self.a]", "TABLE"),
    "counter beside another one": (
        "if not self.calls.get(self): self.calls.update({self.head: 1, self.a: 1, self: 1})\n"
        "self.calls[self.head] += 1; h = h * self.calls[self.head]",
        "calls",
    ),
    "counter of the thread": ("LOCAL.n = getattr(LOCAL, 'n', 0) + 1; h = h * LOCAL.n", "LOCAL"),
    "counter of the context": ("VARIABLE.set(VARIABLE.get() + 1); h = h * VARIABLE.get()", "VARIABLE"),
    "counter of the process": (
        "n = int(os.environ.get('CALLS', '0')) + 1; os.environ['CALLS'] = str(n); h = h * n",
        "environ",
    ),
    "noise of the first step": ("h = h + self.calls.setdefault('noise', torch.randn(8))", "calls"),
    "weights of the first step": ("h = h + self.calls.setdefault('w', self.a.weight[0].detach())", "calls"),
    "memory of the batch before": ("h = h + sum(self.kept); self.kept = [h.detach()]", "kept"),
}
CACHES = {
    "table by width": "h = h + self.calls.setdefault(x.shape[1], torch.ones(x.shape[1]))",
    "made in inference mode": (
        "if self.step is None:\n    with torch.inference_mode(): self.step = torch.ones(8).exp()\nh = h + self.step"
    ),
    "setting of the call": "token = VARIABLE.set(5); h = h * VARIABLE.get(); VARIABLE.reset(token)",
    "told to the process": "os.environ.setdefault('BACKEND', 'none'); h = h.relu()",
    "refilled in every call": "self.kept.clear(); self.kept.append(h.square().mean()); h = h + self.kept[0]",
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CALLS", "BACKEND"):
        monkeypatch.setenv(name, "")  # takes away what a test leaves
        monkeypatch.delenv(name)


def _captured(folder: Path, body: str, init: str = "", *, evaluation: bool = False) -> Captured:
    return captured(folder, body, _TOP, _INIT + init, "of_class, met = 0, []", evaluation=evaluation)


@pytest.mark.parametrize("name", STATE)
def test_state_is_refused(name: str, tmp_path: Path) -> None:
    body, attribute = STATE[name]
    with pytest.raises(WorkloadError) as caught:
        _captured(tmp_path, body)
    assert caught.value.code == "HP113"
    assert attribute in str(caught.value)
    line = next(line for line in reversed(body.splitlines()) if attribute in line)
    assert line_of(tmp_path, line) in str(caught.value)


@pytest.mark.parametrize(
    ("body", "kind", "hint"),
    [
        ("h = h * self.dice['python'].random()", "(the state of a random.Random)", "torch.rand"),
        ("h = h * float(self.dice['numpy'].random())", "(the state of a numpy.random.Generator)", "torch.rand"),
        ("h = h * next(self.numbers)", "(the state of a generator)", "buffer"),
        ("self.dice['table'] += 1; h = h * self.dice['table'][0]", "(a NumPy array of float64 (3,))", "buffer"),
    ],
)
def test_state_that_says_nothing_is_told_by_its_kind(body: str, kind: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError) as caught:
        _captured(tmp_path, body)
    assert caught.value.code == "HP113"
    assert f"from call to call {kind}" in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize("name", CACHES)
def test_caches_are_not(name: str, tmp_path: Path) -> None:
    _captured(tmp_path, CACHES[name])


def test_weights_may_be_kept_in_eval_mode(tmp_path: Path) -> None:
    """LeViT does; training empties what it kept."""
    kept = "h = h + (self.a.weight[0] if self.training else self.calls.setdefault(str(x.device), self.a.weight[0]))"
    found = _captured(tmp_path, kept, evaluation=True)
    assert found.in_eval is not None, found.evaluation_note


_SCALED = """
from torch import nn


class Scaled(nn.Linear):
    scaled = False

    def forward(self, x):
        x = x if self.training or self.scaled else x / 2
        self.scaled = not self.training
        return super().forward(x)
"""


def test_a_plan_names_lines_without_the_machines_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model cannot do in eval mode is a note in the plan."""
    library = tmp_path / "site-packages" / "scaling_library"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text(_SCALED)
    monkeypatch.syspath_prepend(str(library.parent))
    folder = tmp_path / "job"
    folder.mkdir()
    of_library = "self.a = __import__('scaling_library').Scaled(8, 8)"
    note = _captured(folder, "pass", of_library, evaluation=True).evaluation_note
    assert note is not None
    assert "(scaling_library/__init__.py:10)" in note
    own = "if not self.training: self.step = (self.step or 0) + 1; h = h * self.step"
    note = _captured(folder, own, evaluation=True).evaluation_note
    assert note is not None
    assert f"({line_of(folder, own)})" in note


def test_a_shared_module_is_not_exchanged(tmp_path: Path) -> None:
    """Export then hands out new stand-ins for all modules, at addresses of their own."""
    _captured(tmp_path, "kept = list(self.modules())", "self.again = nn.Sequential(self.a, nn.ReLU())")


def test_hooks_of_the_first_call_are_not_set_again(tmp_path: Path) -> None:
    """The eval graph is captured on the same module, which is given back what it held before the first call."""
    body = (
        "if self.step is None:\n"
        "    self.step = self.b.register_forward_hook(lambda *_: self.kept.append(1))\n"
        "self.kept.clear(); h = self.b(h); h = h * len(self.kept)"
    )
    found = _captured(tmp_path, body, evaluation=True)
    assert found.in_eval is not None
    assert factors(found) == factors(found.in_eval) == [1]
