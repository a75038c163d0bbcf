"""Which signals end a command. Whole runs: test_run.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from hetpipe_compiler.cli.interrupts import interrupts


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Puts back what a test changes."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_end_a_run_as_ctrl_c_does(number: signal.Signals) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), interrupts():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


def test_under_nohup_a_closed_terminal_changes_nothing() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interrupts():
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
