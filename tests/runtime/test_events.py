"""The event log."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hetpipe_compiler.errors import RunError
from hetpipe_compiler.runtime.events import EventReceiver, JsonLines

CHILD = """
import sys
from types import SimpleNamespace
from hetpipe_compiler.runtime.child import child_process
with child_process(SimpleNamespace(events=sys.argv[1], threads=1), "vw0/stage0"):
    raise ValueError("the cause")
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_failure_is_told_though_its_log_is_full() -> None:
    receiver = EventReceiver()
    with Path("/dev/full").open("wb") as log:
        done = subprocess.run([sys.executable, "-c", CHILD, receiver.endpoint], stdout=log, stderr=log, check=False)
    events = {event["kind"]: event for event in receiver.receive(5.0)}
    receiver.close()
    assert done.returncode == 1
    assert events["failed"]["error"] == "ValueError: the cause"


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
