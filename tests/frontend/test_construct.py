"""Which model is constructed to be looked at."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_net import captured, factors

from hetpipe_compiler.frontend.construct import build_on_meta, build_real
from hetpipe_compiler.frontend.load import load_workload

ASKS = {
    "device of a tensor": "self.a.weight.device.type == 'cpu'",
    "whether it is on meta": "not self.a.weight.is_meta",
    "whether it is on the CPU": "self.a.weight.is_cpu",
    "device by default": "torch.get_default_device().type == 'cpu'",
}


@pytest.mark.parametrize("name", ASKS)
def test_a_constructor_that_asks_for_its_device_makes_the_model_of_the_cpu(name: str, tmp_path: Path) -> None:
    init = f"self.factor = 3 if {ASKS[name]} else 2"
    assert factors(captured(tmp_path, "h = h * self.factor", init=init)) == [3]


@pytest.mark.parametrize("name", ASKS)
def test_one_that_makes_nothing_of_the_answer_is_looked_at_on_meta(name: str, tmp_path: Path) -> None:
    init = f"if {ASKS[name]}:\n    self.a.weight.data.fill_(1)"
    captured(tmp_path, "pass", init=init)
    model = build_on_meta(load_workload(tmp_path / "model.py", {}), seed=0)
    assert model is not None
    assert all(p.is_meta for p in model.parameters())


def test_other_shapes_are_seen(tmp_path: Path) -> None:
    captured(tmp_path, "h = h + self.t", init="self.t = nn.Parameter(torch.ones(1 if self.a.weight.is_meta else 8))")
    loaded = load_workload(tmp_path / "model.py", {})
    assert build_on_meta(loaded, seed=0) is None
    assert build_real(loaded, seed=0).t.shape == (8,)


def test_what_counts_constructions_is_no_difference(tmp_path: Path) -> None:
    top = "MADE = []"
    captured(tmp_path, "pass", top, "MADE.append(self.a.weight.device)")
    assert build_on_meta(load_workload(tmp_path / "model.py", {}), seed=0) is not None


def test_torchs_own_attributes_are_put_back(tmp_path: Path) -> None:
    captured(tmp_path, "pass", init="self.a.weight.device")
    assert not {"device", "is_meta", "is_cpu"} & vars(torch.Tensor).keys()


def test_libraries_may_be_quicker_on_meta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "site-packages" / "quick_library"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("def start(module, t):\n    module.started = not t.is_meta\n")
    monkeypatch.syspath_prepend(str(library.parent))
    captured(tmp_path, "pass", "from quick_library import start", "start(self, self.a.weight)")
    assert build_on_meta(load_workload(tmp_path / "model.py", {}), seed=0) is not None


def test_a_device_that_is_kept_needs_no_real_model(tmp_path: Path) -> None:
    captured(tmp_path, "h = h + torch.ones(8, device=x.device)", init="self.device = self.a.weight.device")
    assert build_on_meta(load_workload(tmp_path / "model.py", {}), seed=0) is not None
