"""What the watchdog takes for progress. Failing processes: test_run.py."""

from __future__ import annotations

import time
from typing import Any, cast

from hetpipe_compiler.runtime.events import Event, EventReceiver
from hetpipe_compiler.runtime.supervise import Supervisor


class OneEvent:
    """Has one event, and then none."""

    def __init__(self) -> None:
        self.events: list[Event] = [{"kind": "kept", "process": "server n0", "clock": 2}]

    def receive(self, timeout_s: float) -> list[Event]:
        time.sleep(0 if self.events else timeout_s / 10)
        events, self.events = self.events, []
        return events


def test_writing_weights_is_no_stall() -> None:
    turns: list[Any] = []
    supervisor = Supervisor(cast(EventReceiver, OneEvent()), timeout_s=0.25, on_event=lambda _: time.sleep(0.5))
    supervisor.wait_until(lambda: len(turns) > 2 or bool(turns.append(1)))
