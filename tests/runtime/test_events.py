"""The event log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetpipe_compiler.errors import RunError
from hetpipe_compiler.runtime.events import JsonLines


def test_a_line_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "log")
    log.write({"a": 1})
    assert json.loads((tmp_path / "log").read_text()) == {"a": 1}
    log.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_no_bug_of_ours() -> None:
    log = JsonLines(Path("/dev/full"))
    with pytest.raises(RunError, match="No space left") as caught:
        log.write({"a": 1})
    assert caught.value.code == "HP554"
    log.close()
