"""Child processes of the launcher: start them, see how they ended, end them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_GRACE_S = 3.0
#: Environment variable of a child: the launcher's process id.
LAUNCHER_VARIABLE = "HETPIPE_LAUNCHER"
#: Names in the folder where the command was called must not hide modules of the library, as they would with plain -m.
_SAFE_PATH = ["-P"] if sys.version_info >= (3, 11) else []


@dataclass
class Child:
    """A started process. ``name`` is what messages call it; ``log`` has its stdout and stderr."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self.popen.poll()

    def ended_by(self) -> str:
        """``signal SIGKILL`` or ``exit status 3``."""
        code = self.popen.poll()
        if code is None:
            return "still running"
        if code < 0:
            try:
                return f"signal {signal.Signals(-code).name}"
            except ValueError:
                return f"signal {-code}"
        return f"exit status {code}"

    def log_tail(self, lines: int = 15) -> list[str]:
        """The last lines of its log."""
        if not self.log.is_file():
            return []
        return self.log.read_text(errors="replace").splitlines()[-lines:]


def start(name: str, module: str, arguments: list[str], *, log: Path, threads: int) -> Child:
    """Run ``python -m module arguments`` in a session of its own, so that Ctrl-C reaches the launcher alone."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ, PYTHONUNBUFFERED="1", OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
    environment[LAUNCHER_VARIABLE] = str(os.getpid())
    if sys.platform == "linux":
        # All processes are on this machine; without this Gloo asks what address the host's name resolves to.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with log.open("ab") as out:
        popen = subprocess.Popen(
            [sys.executable, *_SAFE_PATH, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    return Child(name, popen, log)


def terminate(children: Iterable[Child]) -> None:
    """SIGTERM to all that still run, SIGKILL to those that are there three seconds later.

    What they started themselves (the processes of a DataLoader) gets the same: each has a process group of its own.
    """
    running = [c for c in children if c.exit_code is None]
    for child in running:
        _signal_group(child, signal.SIGTERM)
        # A stopped process does not act on a signal until it continues.
        _signal_group(child, signal.SIGCONT)
    deadline = time.monotonic() + _GRACE_S
    for child in running:
        try:
            child.popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _signal_group(child, signal.SIGKILL)
            child.popen.wait()


def _signal_group(child: Child, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.popen.pid, number)
