"""What the graph reads goes by the model's own names, or is a constant."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_net import captured

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.eager_check import EagerCheck


def test_a_parameter_in_a_list_is_refused_where_nothing_else_would_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EagerCheck, "check", lambda *_: False)  # as of a model that cannot be held to eager mode
    with pytest.raises(WorkloadError, match=r"the memory of 'b.weight' through another tensor") as caught:
        captured(tmp_path, "h = h @ self.listed[0]", init="self.listed = [self.b.weight]")
    assert caught.value.code == "HP116"
