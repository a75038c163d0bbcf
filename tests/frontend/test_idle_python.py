"""Python in forward that decides nothing: module.to without effect, assertions on values."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.capture import capture
from hetpipe_compiler.frontend.load import load_workload
from hetpipe_compiler.passes.normalize import normalize

_MODEL = """
import torch
from torch import nn
from hetpipe_compiler import Workload

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        {line}
        return self.first(x).sum()

def workload():
    return Workload(model=Net, loss=None, example=lambda: (torch.zeros(3, 4),), targets=0,
                    optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
"""


def _operators(tmp_path: Path, line: str) -> list[str]:
    path = tmp_path / "model.py"
    path.write_text(_MODEL.format(line=line))
    graph = normalize(capture(load_workload(path, {}))).graph_module.graph
    return [str(n.target) for n in graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize(
    "line",
    [
        "self.first = self.first.to(torch.float32)",
        "self.first.to(x.device)",
        "assert x.isnan().sum() == 0, 'NaN'",
        "assert x.isnan().sum() == 0 and (x < 9).all()",
        "assert not (x > 9).any()",
        "assert not (x.isnan().any() or (x > 9).any())",
        "assert (x < 9).all().item(), f'{x.max()}'",
        "assert torch.all(\n            x < 9\n        )",
        "assert all(bool((row < 9).all()) for row in (x, x + 1))",
    ],
)
def test_what_decides_nothing_leaves_no_operator(tmp_path: Path, line: str) -> None:
    plain = _operators(tmp_path, "pass")
    assert _operators(tmp_path, line) == plain


@pytest.mark.parametrize(
    "line",
    [
        "x = x + 1 if x.sum() > 0 else x",
        "assert x.sum() > 0 or x.min() < 3",
        "assert not ((x < 9).all() and (x > 9).all())",
        "assert (x < 9).any() and not (x > 9).any()",
    ],
)
def test_what_may_decide_is_still_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(WorkloadError, match="depends on a tensor's values") as refused:
        _operators(tmp_path, line)
    assert refused.value.code == "HP111"
