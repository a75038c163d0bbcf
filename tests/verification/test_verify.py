"""A plan that computes what the model computes passes; one that does not is refused, and nothing is written."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe_compiler.codegen import artifact
from hetpipe_compiler.compiler import CompileOptions, CompileResult, compile
from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.ir.cluster import Cluster

EXAMPLES = Path(__file__).parents[2] / "examples"
CLUSTER = Cluster.from_dict(
    {
        "name": "four",
        "nodes": [{"name": "n0", "devices": {"fast": 2, "slow": 2}, "link": {"bandwidth_gb_s": 10, "latency_us": 1}}],
        "network": {"bandwidth_gb_s": 1, "latency_us": 10},
        "kinds": {
            "fast": {"memory_gb": 4, "fp32_tflops": 0.02, "memory_bandwidth_gb_s": 4},
            "slow": {"memory_gb": 4, "fp32_tflops": 0.01, "memory_bandwidth_gb_s": 2},
        },
    }
)

#: The head of a model.py whose model is `Net`, on batches of 6 vectors of 8 numbers in 3 classes.
_MODEL = """
import torch
from torch import nn
from torch.nn import functional as F
from hetpipe_compiler import Workload

{net}

def workload():
    return Workload(
        model=Net,
        loss=nn.CrossEntropyLoss(),
        example=lambda: (torch.zeros(6, 8), torch.zeros(6, dtype=torch.int64)),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
"""

_PLAIN = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b, self.c = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 3)
    def forward(self, x):
        return self.c(F.dropout(F.relu(self.b(F.relu(self.norm(self.a(x))))), 0.5, self.training))
"""

#: The noise is drawn first, but written to with what the dropout made: its component runs after the dropout.
_REORDERED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)
    def forward(self, x):
        noise = torch.rand(6, 16)
        view = noise[:, 2:]
        h = F.dropout(self.a(x), 0.5)
        noise.add_(h.detach())
        return self.b(h * view.sum() + noise)
"""

_ONLY_FLOAT32 = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)
    def forward(self, x):
        if x.dtype != torch.float32:
            raise TypeError("images are float32")
        return self.b(F.gelu(self.a(x)))
"""

#: Asks for float32 itself, and for the least number of the dtype that it has.
_NAMES_FLOAT32 = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)
        self.register_buffer("scale", torch.full((16,), 0.1))
    def forward(self, x):
        h = self.a(x)
        masked = h.masked_fill(h < 0, torch.finfo(h.dtype).min)
        positions = torch.arange(16, dtype=torch.float32, device=x.device) * torch.tensor(0.3)
        return self.b(torch.softmax(masked.float() * self.scale, -1, dtype=torch.float32).to(h.dtype) + positions.sin())
"""

#: Computes in bfloat16, but not in float64, which autocast leaves alone.
_CASTS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)
    def forward(self, x):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            h = F.gelu(self.a(x))
        return self.b(h.float())
"""

#: In eval mode without gradients PyTorch takes a kernel that is not tagged as random; captured, attention without
#: dropout is one that is.
_ATTENDS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
    def forward(self, x):
        h = self.a(x).reshape(-1, 4, 4)
        h, _ = self.attention(h, h, h, need_weights=False)
        return self.b(h.reshape(-1, 16))
"""

_NO_NUMBER = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 3)
    def forward(self, x):
        return self.a(x).log() + float("nan")
"""


def _compile(tmp_path: Path, net: str, split: tuple[int, ...] | None = None) -> CompileResult:
    model = tmp_path / "model.py"
    model.write_text(_MODEL.format(net=textwrap.dedent(net)))
    options = CompileOptions(policy="NP", verify=True, splits=(split,) if split else None)
    return compile(model, CLUSTER, tmp_path / "out", options=options)


def _tamper(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """Have the writer of stage modules write ``new`` for the first ``old``."""
    write = artifact.emit_stage

    def wrong(*args: Any, **kwargs: Any) -> str:
        text = write(*args, **kwargs)
        return text.replace(old, new, 1)

    monkeypatch.setattr(artifact, "emit_stage", wrong)


def test_an_example_passes(tmp_path: Path) -> None:
    model = EXAMPLES / "digits" / "model.py"
    found = compile(model, CLUSTER, tmp_path / "out", settings={"batch_size": 8}, options=CompileOptions(verify=True))
    assert found.verification is not None
    assert found.verification.dtype == "float64"
    assert found.verification.difference.relative <= 1e-12
    assert (tmp_path / "out" / "plan.json").exists()


@pytest.mark.parametrize("cut", [(1,), (2, 4), (1, 3, 5)])
def test_dropout_gets_the_same_numbers_on_both_sides(tmp_path: Path, cut: tuple[int, ...]) -> None:
    found = _compile(tmp_path, _PLAIN, cut).verification
    assert found is not None
    assert found.difference.relative == 0.0


def test_only_operators_that_draw_count_as_random(tmp_path: Path) -> None:
    found = _compile(tmp_path, _ATTENDS, (2,))
    assert found.plan.evaluation
    assert found.verification is not None
    assert found.verification.dtype == "float64"


def test_random_numbers_follow_their_operator_when_the_order_changes(tmp_path: Path) -> None:
    found = _compile(tmp_path, _REORDERED, (2,)).verification
    assert found is not None
    assert found.difference.relative <= 1e-12
    stages = "".join(p.read_text() for p in sorted((tmp_path / "out" / "stages").glob("*.py")))
    assert stages.index("aten.dropout") < stages.index("aten.rand"), "nothing was reordered: the test shows nothing"


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("aten.relu.default(", "aten.silu.default(", "gradient|loss|buffer"),
        (", 0.5, self.training)", ", 0.4, self.training)", "gradient|loss"),
        (", 0.5, self.training)", ", 0.5, True)", "random numbers in eval mode: 0 in the model, 1 in the stages"),
        ("self.training, 0.1", "True, 0.1", "in eval mode"),
        ("0.1, 1e-05", "0.2, 1e-05", "buffer norm.running"),
        ('b.bias", (16,), torch.float32)', 'b.bias", (16,), torch.float32, trainable=False)', "b.bias: only the model"),
        ("aten.relu.default(", "torch.nn.functional.dropout(", "random numbers: 1 in the model, 3 in the stages"),
    ],
)  # fmt: skip
def test_a_wrong_stage_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, value: str
) -> None:
    _tamper(monkeypatch, old, new)
    with pytest.raises(WorkloadError, match=value) as caught:
        _compile(tmp_path, _PLAIN, (2, 4))
    assert caught.value.code == "HP120"
    assert [p.name for p in tmp_path.iterdir() if p.name != "__pycache__"] == ["model.py"]


def test_an_earlier_plan_survives_a_refused_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _compile(tmp_path, _PLAIN, (2,))
    before = (tmp_path / "out" / "plan.json").read_bytes()
    _tamper(monkeypatch, "aten.relu.default(", "aten.silu.default(")
    with pytest.raises(WorkloadError, match="HP120"):
        _compile(tmp_path, _PLAIN, (3,))
    assert (tmp_path / "out" / "plan.json").read_bytes() == before


def test_a_stage_that_raises_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _tamper(monkeypatch, "aten.relu.default(", "aten.no_such_operator.default(")
    with pytest.raises(WorkloadError, match="no_such_operator") as caught:
        _compile(tmp_path, _PLAIN, (2, 4))
    assert caught.value.code == "HP121"


def test_a_loss_that_is_no_number_cannot_be_verified(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="loss is nan") as caught:
        _compile(tmp_path, _NO_NUMBER)
    assert caught.value.code == "HP122"
    assert not (tmp_path / "out").exists()


def test_a_model_that_insists_on_float32_is_compared_in_float32(tmp_path: Path) -> None:
    found = _compile(tmp_path, _ONLY_FLOAT32, (1, 2)).verification
    assert found is not None
    assert found.dtype == "float32"
    assert "images are float32" in str(found)
    assert found.passed


def test_dtypes_that_the_model_names_do_not_stop_float64(tmp_path: Path) -> None:
    found = _compile(tmp_path, _NAMES_FLOAT32, (1, 3)).verification
    assert found is not None
    assert found.dtype == "float64", found.note


def test_a_lost_autocast_is_seen_though_float64_knows_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _compile(tmp_path, _CASTS, (1,)).verification
    assert found is not None
    assert found.dtype == "float64", found.note
    _tamper(monkeypatch, "torch.bfloat16, True)", "torch.bfloat16, False)")
    with pytest.raises(WorkloadError, match="allowed 1e-06 in float32; autocast does nothing in float64") as caught:
        _compile(tmp_path, _CASTS, (1,))
    assert caught.value.code == "HP120"


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    """The weights written are those from before verification, in their own dtype."""
    from safetensors.torch import load_file

    _compile(tmp_path, _PLAIN, (2,))
    written = load_file(tmp_path / "out" / "weights.safetensors")
    assert written["a.weight"].dtype == torch.float32
    assert bool((written["norm.running_mean"] == 0).all())
