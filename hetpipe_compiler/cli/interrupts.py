"""Signals that end a command."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType


@contextmanager
def interrupts() -> Iterator[None]:
    """Meanwhile SIGTERM and SIGHUP do what Ctrl-C does; but under nohup a terminal that closes changes nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_signum: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        with suppress(ValueError):
            for number, handler in before.items():
                signal.signal(number, handler)
