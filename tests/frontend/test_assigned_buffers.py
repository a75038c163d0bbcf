"""``self.buffer = value``: over several calls, a plan's stages compute what the model does; or it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from random_models.check import compiled, load
from random_models.strategy import DrawnCut

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.construct import build_real
from hetpipe_compiler.frontend.load import LoadedWorkload
from hetpipe_compiler.frontend.training_step import TrainingStep
from hetpipe_compiler.ir.plan import Plan
from hetpipe_compiler.verification.original import Original
from hetpipe_compiler.verification.stages import WrittenStages

_MODEL = """
import torch
from torch import nn

from hetpipe_compiler import Workload


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("a", torch.linspace(0, 1, 6))
        self.register_buffer("c", torch.linspace(3, 2, 6))
        {init}

    def forward(self, x):
        h = self.fc(x)
        {forward}
        return self.head(h)


def workload():
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(5, 6, generator=generator), torch.randint(0, 3, (5,), generator=generator)
    return Workload(Net, (x, y), lambda p: torch.optim.SGD(p, lr=0.1), nn.CrossEntropyLoss())
"""

SAME = {
    "read by what autograd saves": "h = h * self.a; self.a = self.a * 0.5; h = h * self.a",
    "two that change places": "h = h * self.a + self.c; self.a, self.c = self.c, self.a",
    "the last two values": "h = h * self.a + self.c; self.c = self.a; self.a = h.detach().mean(0)",
    "the old one kept, and written": "old = self.a; self.a = self.a * 0.5; old += 1; h = h + self.a + old",
    "in place before": "self.a += 1; self.a = self.a * 0.5; h = h * self.a",
    "in place after": "self.a = self.a * 0.5; self.a += 1; h = h * self.a",
    "only in training": "h = h * self.a\n        if self.training:\n            self.a = self.a + h.detach().mean(0)",
    "never read": "self.a = h.detach().mean(0)",
}
REFUSED = {
    "under two names": ("self.register_buffer('b', self.a)", "self.a = self.a * 0.5; h = h * self.a + self.b", "'b'"),
    "another buffer": ("", "self.c = self.a; self.c += 1; h = h * self.a + self.c", "'a'"),
    "a parameter": ("", "h = h * self.a; self.a = self.fc.bias.detach()", "'fc.bias'"),
}


def _losses(loaded: LoadedWorkload) -> list[float]:
    """Three calls of the model itself."""
    batch = loaded.workload.example_batch()
    step = TrainingStep(loaded.workload, build_real(loaded, 0), batch).train()
    losses = []
    for _ in range(3):
        losses.append(step(*(t.clone() for t in batch)))
        losses[-1].backward()
    return [loss.item() for loss in losses]


def _losses_of_stages(loaded: LoadedWorkload, folder: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    original = Original(loaded, build_real(loaded, 0), 0)
    stages = WrittenStages(folder, plan, 0, original.tensors, False)
    monkeypatch.setattr(stages, "_restore_buffers", lambda: None)  # buffers go on from call to call
    return [stages.run(original.leaves, 0)[0].values["loss"].item() for _ in range(3)]


@pytest.mark.parametrize("name", SAME)
def test_stages_go_on_as_the_model_does(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(_MODEL.format(init="", forward=SAME[name]), tmp_path)
    plan = compiled(loaded, [DrawnCut(0, (0, 1))], tmp_path / "plan")
    assert plan.evaluation
    expected = _losses(loaded)
    assert _losses_of_stages(loaded, tmp_path / "plan", plan, monkeypatch) == pytest.approx(expected, rel=1e-6)
    assert len(set(expected)) > 1 or "never" in name


@pytest.mark.parametrize("name", REFUSED)
def test_a_tensor_that_goes_by_another_name_too_is_refused(name: str, tmp_path: Path) -> None:
    init, forward, other = REFUSED[name]
    loaded = load(_MODEL.format(init=init, forward=forward), tmp_path)
    with pytest.raises(WorkloadError) as caught:
        compiled(loaded, [DrawnCut(0, ())], tmp_path / "plan")
    assert caught.value.code == "HP116"
    assert other in caught.value.message
    assert caught.value.where == f"{loaded.path}:18"


def test_a_buffer_that_is_only_written_is_not_copied(tmp_path: Path) -> None:
    loaded = load(_MODEL.format(init="", forward=SAME["never read"]), tmp_path)
    plan = compiled(loaded, [DrawnCut(0, ())], tmp_path / "plan")
    text = (tmp_path / "plan" / str(plan.virtual_workers[0].stages[0].module)).read_text()
    assert "copy_" in text
    assert "clone" not in text
