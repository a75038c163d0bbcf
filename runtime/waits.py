"""What a process is doing and what it waits for, so that nothing waits without a name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

_PACE_S = 1.0


@dataclass(frozen=True)
class Wait:
    """``what`` from ``whom`` since ``since`` (seconds since the epoch)."""

    what: str
    whom: str
    since: float


@dataclass
class Activity:
    """The state that a process reports to the launcher. Written by the working thread, read by the reporting one.

    Attributes:
        steps: Instructions (or requests) finished; the launcher's watchdog takes any change for progress.
        doing: The instruction in progress, or the last one.
        since: When that began, seconds since the epoch.
        wait: What the working thread waits for now, if it waits.
        counted_from: Monotonic time from which waits count: when the work itself began.
        waited_s: Seconds spent since then in waits that have ended.
        waited_for_weights_s: The part of them spent waiting for parameter servers.
    """

    steps: int = 0
    doing: str = "starting"
    since: float = field(default_factory=time.time)
    wait: Wait | None = None
    counted_from: float = field(default_factory=time.monotonic)
    waited_s: float = 0.0
    waited_for_weights_s: float = 0.0

    def begin(self, doing: str) -> None:
        """Say what comes next; ends what was done before."""
        self.steps += 1
        self.doing = doing
        self.since = time.time()

    def start_counting(self) -> None:
        """The work begins here: forget the waits before."""
        self.counted_from = time.monotonic()
        self.waited_s = self.waited_for_weights_s = 0.0

    @contextmanager
    def waiting(self, what: str, whom: str, *, weights: bool = False) -> Iterator[None]:
        """Around anything that may block: time in it counts as waiting."""
        start = time.monotonic()
        self.wait = Wait(what, whom, time.time())
        try:
            yield
        finally:
            self.wait = None
            spent = time.monotonic() - start
            self.waited_s += spent
            if weights:
                self.waited_for_weights_s += spent

    def pace(self, seconds: float) -> None:
        """Sleep on purpose, as a slower machine would compute: that is progress, and the watchdog must see it."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _PACE_S))
            self.steps += 1

    def report(self) -> dict[str, Any]:
        """For the event channel; the time of an unfinished wait is included in the totals."""
        wait = self.wait
        now = time.monotonic()
        running = min(max(0.0, time.time() - wait.since), now - self.counted_from) if wait else 0.0
        return {
            "steps": self.steps,
            "doing": self.doing,
            "since": self.since,
            "counted_s": now - self.counted_from,
            "waited_s": self.waited_s + running,
            "waited_for_weights_s": self.waited_for_weights_s,
            "wait": {"what": wait.what, "whom": wait.whom, "since": wait.since} if wait else None,
        }
