"""Child processes of the launcher: what they import, and that none is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetpipe_compiler.runtime import processes
from hetpipe_compiler.runtime.events import EventSender, StatusThread
from hetpipe_compiler.runtime.waits import Activity

_CHILD = """
import os, subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(grandchild.pid, os.environ["HETPIPE_LAUNCHER"], flush=True)
time.sleep(600)
"""


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


class Telling(EventSender):
    """A sender that nobody listens to."""

    def __init__(self) -> None:
        super().__init__("tcp://127.0.0.1:9", "nobody")

    def __enter__(self) -> Telling:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close(linger=0)
        self._context.term()


def wait_for(condition: object, seconds: float = 20.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_a_child_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleeper.py").write_text(_CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    log = tmp_path / "logs" / "child.log"
    child = processes.start("child", "sleeper", [], log=log, threads=1)
    wait_for(lambda: log.read_text().count("\n") == 1)
    grandchild, launcher = map(int, log.read_text().split())
    assert launcher == os.getpid()
    processes.terminate([child])
    assert child.ended_by() == "signal SIGTERM"
    wait_for(lambda: gone(grandchild))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 always takes the folder in")
def test_files_where_the_command_is_called_hide_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('the wrong queue')\n")
    monkeypatch.chdir(tmp_path)
    child = processes.start("child", "hetpipe_compiler.runtime.worker", ["--help"], log=tmp_path / "log", threads=1)
    assert child.popen.wait(60) == 0, child.log_tail()


def test_an_orphan_ends_though_its_launcher_went_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher was killed while the child still imported: getppid() never changes after that."""
    ended: list[int] = []
    was = subprocess.Popen([sys.executable, "-c", ""])
    was.wait()
    monkeypatch.setenv(processes.LAUNCHER_VARIABLE, str(was.pid))
    monkeypatch.setattr("hetpipe_compiler.runtime.events._STATUS_EVERY_S", 0.01)
    monkeypatch.setattr(os, "_exit", ended.append)
    with Telling() as sender:
        thread = StatusThread(sender, Activity())
        thread.start()
        wait_for(lambda: ended)
        thread.stop()
    assert set(ended) == {1}
