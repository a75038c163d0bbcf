"""What is checkpointed is followed as the stages run it, and may write no buffer."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_net import captured, compared, line_of

from hetpipe_compiler.errors import WorkloadError

TOP = "from torch.utils.checkpoint import checkpoint"

either = pytest.mark.parametrize("reentrant", [False, True])


@either
def test_it_is_no_difference_to_eager_mode(reentrant: bool, tmp_path: Path) -> None:
    assert compared(tmp_path, f"h = checkpoint(lambda t: self.b(t).relu() + t, h, use_reentrant={reentrant})", TOP)


@either
def test_of_frozen_layers_whose_output_is_made_to_want_gradients(reentrant: bool, tmp_path: Path) -> None:
    body = f"h.requires_grad_(True)\nh = checkpoint(self.b, h, use_reentrant={reentrant})"
    assert compared(tmp_path, body, TOP, "self.a.requires_grad_(False)")


@either
def test_checkpointing_what_writes_a_buffer_is_refused(reentrant: bool, tmp_path: Path) -> None:
    body = f"h = checkpoint(self.norm, h, use_reentrant={reentrant})"
    with pytest.raises(WorkloadError, match="writes a buffer") as caught:
        captured(tmp_path, body, TOP, "self.norm = nn.BatchNorm1d(8)")
    assert caught.value.code == "HP119"
    assert line_of(tmp_path, "checkpoint(self") in str(caught.value)
    assert compared(tmp_path, body, TOP, "self.norm = nn.LayerNorm(8)")


def test_unless_no_gradient_is_wanted(tmp_path: Path) -> None:
    norm = "self.norm = nn.BatchNorm1d(8)"
    captured(tmp_path, "with torch.no_grad(): h = h + checkpoint(self.norm, h, use_reentrant=False)", TOP, norm)
    captured(tmp_path, "h = h + checkpoint(self.norm, x, use_reentrant=True)", TOP, norm)
