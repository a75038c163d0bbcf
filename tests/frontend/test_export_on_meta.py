"""What a model sees of devices while it is captured from meta tensors, and which line it is told of."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.capture import capture
from hetpipe_compiler.frontend.construct import build_on_meta
from hetpipe_compiler.frontend.load import LoadedWorkload, load_workload

_MODEL = """
import torch
from torch import nn
from hetpipe_compiler import Workload
{imports}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x):
        {forward}

def workload():
    return Workload(
        model=Net,
        loss=lambda output: output.square().mean(),
        example=(torch.zeros(3, 4),),
        targets=0,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
"""


def _load(folder: Path, forward: str, imports: str = "") -> LoadedWorkload:
    path = folder / "model.py"
    body = textwrap.indent(textwrap.dedent(forward), " " * 8).strip()
    path.write_text(_MODEL.format(forward=body, imports=imports))
    return load_workload(path)


def test_a_branch_on_the_device_takes_the_path_that_runs_everywhere(tmp_path: Path) -> None:
    loaded = _load(
        tmp_path,
        """
        y = self.layer(x)
        return y.sin() if y.device.type == "cpu" and self.layer.weight.device.type == "cpu" else y.cos()
        """,
    )
    targets = {node.target for node in capture(loaded).graph_module.graph.nodes}
    assert torch.ops.aten.sin.default in targets
    assert torch.ops.aten.cos.default not in targets


def test_a_constant_made_on_the_inputs_device_keeps_its_value_without_a_real_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = _load(tmp_path, "return self.layer(x) * torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)")
    monkeypatch.setattr("hetpipe_compiler.frontend.capture.build_real", lambda *_, **__: pytest.fail("built for real"))
    (value,) = capture(loaded).constant_values.values()
    assert value.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_the_model_itself_stays_on_meta(tmp_path: Path) -> None:
    model = build_on_meta(_load(tmp_path, "return self.layer(x)"), seed=0)
    assert model is not None
    assert all(p.is_meta for p in model.parameters())


def test_a_branch_on_values_inside_a_library_names_the_librarys_line(tmp_path: Path) -> None:
    (tmp_path / "helpers_of_the_model.py").write_text(
        "def choose(x):\n    if x.sum() > 0:\n        return x\n    return -x\n"
    )
    loaded = _load(tmp_path, "return choose(self.layer(x))", "from helpers_of_the_model import choose")
    with pytest.raises(WorkloadError, match=r"\(at helpers_of_the_model.py:2\)") as caught:
        capture(loaded)
    assert caught.value.code == "HP111"
    assert str(caught.value.where).startswith(str(tmp_path / "model.py:"))
