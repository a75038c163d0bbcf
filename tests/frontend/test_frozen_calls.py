"""Reading a parameter's gradient, and switching its training within ``forward``: refused with the line."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_net import captured, line_of

from hetpipe_compiler.errors import WorkloadError

SWITCHES = {
    "method": "self.b.weight.requires_grad_(False); h = self.b(h); self.b.weight.requires_grad_(True)",
    "flag": "self.b.weight.requires_grad = False; h = self.b(h); self.b.weight.requires_grad = True",
    "module": "self.b.requires_grad_(False); h = self.b(h); self.b.requires_grad_(True)",
}


@pytest.mark.parametrize("name", SWITCHES)
def test_switching_training_off_and_on_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="switches the training of a parameter") as caught:
        captured(tmp_path, SWITCHES[name])
    assert caught.value.code == "HP113"
    assert str(caught.value.where).endswith(line_of(tmp_path, SWITCHES[name]))


@pytest.mark.parametrize(
    "switch",
    [
        "set_autocast_enabled('cpu', True)",
        "set_autocast_dtype('cpu', torch.float16)",
        "set_autocast_cpu_enabled(True)",
        "set_autocast_cpu_dtype(torch.float16)",
        "set_autocast_gpu_dtype(torch.bfloat16)",
    ],
)
def test_switching_autocast_other_than_by_a_region_is_refused(switch: str, tmp_path: Path) -> None:
    body = f"torch.{switch}; h = self.b(h)"
    with pytest.raises(WorkloadError, match="switches autocast") as caught:
        captured(tmp_path, body)
    assert caught.value.code == "HP112"
    assert str(caught.value.where).endswith(line_of(tmp_path, body))


@pytest.mark.parametrize(
    "body",
    [
        "self.b.requires_grad_(True); self.b.weight.requires_grad = True; h = self.b(h)",
        "m = torch.ones(8); m.requires_grad_(); h = h * m",
        "d = h.detach(); d.requires_grad = True; h = h + d",
    ],
)
def test_what_switches_nothing_is_not(body: str, tmp_path: Path) -> None:
    captured(tmp_path, body)


def test_reading_a_parameters_gradient_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="reads the gradient of a parameter") as caught:
        captured(tmp_path, "g = self.a.weight.grad\nif g is not None:\n    h = h * g.norm()")
    assert caught.value.code == "HP112"
    assert str(caught.value.where).endswith(line_of(tmp_path, "weight.grad"))
    captured(tmp_path, "h = h * 2 if x.grad is None else h")
