"""A file that carries something from one call of ``forward`` to the next is state; one that is only written is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_net import captured, line_of

from hetpipe_compiler.errors import WorkloadError

_TOP = "import os\nimport pathlib\nimport numpy as np"
#: The name of the file, and the line that writes it.
STATE = {
    "counter": (
        "n.txt",
        "path = pathlib.Path('n.txt'); n = int(path.read_text()) if path.exists() else 0",
        "path.write_text(str(n + 1)); h = h * (n + 1)",
    ),
    "first call by a file": (
        "mark",
        "first = not os.path.exists('mark')",
        "open('mark', 'w').close(); h = h * (2 + first)",
    ),
    "first call by a folder": (
        "mark",
        "first = not os.path.isdir('mark')",
        "os.makedirs('mark', exist_ok=True); h = h * (2 + first)",
    ),
    "array": (
        "n.npy",
        "n = np.load('n.npy') if os.path.exists('n.npy') else np.zeros(1)",
        "np.save('n.npy', n + 1); h = h * float(n[0])",
    ),
    "tensor": (
        "n.pt",
        "n = torch.load('n.pt') if os.path.exists('n.pt') else 0",
        "torch.save(n + 1, 'n.pt'); h = h * n",
    ),
}


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", STATE)
def test_state_in_a_file_is_refused(name: str, tmp_path: Path) -> None:
    file, reads, writes = STATE[name]
    with pytest.raises(WorkloadError, match=f"changes '{file}' on the disk") as caught:
        captured(tmp_path, f"{reads}\n{writes}", _TOP)
    assert caught.value.code == "HP113"
    assert str(caught.value.where).endswith(line_of(tmp_path, writes))


def test_a_log_is_not(tmp_path: Path) -> None:
    captured(tmp_path, "with open('log.txt', 'a') as file:\n    file.write('step')\nh = h * 2", _TOP)
    assert (tmp_path / "log.txt").exists()
