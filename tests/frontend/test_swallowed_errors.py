"""An error that only export raises, and that the model's code catches, is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_net import captured, factors, line_of

from hetpipe_compiler.errors import WorkloadError

SWALLOWED = {
    "numpy": "k = float(x.numpy().mean())",
    "array": "k = float(np.asarray(h.detach()).sum())",
    "number": "k = float(x.mean())",
    "branch on an item": "k = 2.0 if x.mean().item() > 0 else 3.0",
    "branch on a list": "k = 2.0 if x[0].tolist()[0] > 0 else 3.0",
    "branch on a tensor": "k = 3.0 if (x > 0).all() else 2.0",
    "comparison": "k = 3.0 if torch.equal(x, x) else 2.0",
    "address": "k = 3.0 if x.data_ptr() else 2.0",
    "size as a key": "k = {4: 2.0, 3: 3.0}[x.shape[0]]",
    "text": "k = 2.0 * len(f'{x.mean():.3f}')",
    "copy": "k = copy.deepcopy(x)",
}
_TOP = "import contextlib\nimport copy\nimport numpy as np"


@pytest.mark.parametrize("name", SWALLOWED)
def test_catching_it_is_refused(name: str, tmp_path: Path) -> None:
    body = f"k = 4.0\ntry:\n    {SWALLOWED[name]}\nexcept Exception:\n    pass\nh = h * k"
    with pytest.raises(WorkloadError, match=r"only torch\.export raises") as caught:
        captured(tmp_path, body, _TOP)
    assert caught.value.code == "HP111"
    assert str(caught.value.where).endswith(line_of(tmp_path, SWALLOWED[name]))


def test_suppressing_it_too(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"only torch\.export raises"):
        captured(tmp_path, "k = 4.0\nwith contextlib.suppress(Exception):\n    k = float(x.mean())\nh = h * k", _TOP)


NOT_OF_EXPORT = {
    "the same in eager mode": "try:\n    k = h.numpy().mean()\nexcept RuntimeError:\n    k = 3",
    "the model's own": "try:\n    k = {}['k']\nexcept KeyError:\n    k = 3",
    "no attribute": "k = 3 if not hasattr(x, 'lengths') else 4",
}


@pytest.mark.parametrize("name", NOT_OF_EXPORT)
def test_another_error_may_be_caught(name: str, tmp_path: Path) -> None:
    assert factors(captured(tmp_path, NOT_OF_EXPORT[name] + "\nh = h * k", _TOP)) == [3]
