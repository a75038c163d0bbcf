"""Watch the processes of a run: who progresses, who waits for whom, and which failure was the first.

A failure shows in two ways: a ``failed`` event, or a process that is gone without having finished. A process that
reports only a lost peer is a consequence; the one named is the first of the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hetpipe_compiler.errors import RunError
from hetpipe_compiler.runtime.events import Event, EventReceiver
from hetpipe_compiler.runtime.processes import Child

_POLL_S = 0.1
_SETTLE_S = 1.0
_SETTLE_CONSEQUENCES_S = 5.0
_SILENT_S = 5.0
_START_S = 300.0
_TRACE_LINES = 12


@dataclass
class ProcessState:
    """What the launcher knows of one process.

    Attributes:
        heard: When the last event came (monotonic seconds).
        status: The last ``status`` event.
        failure: The ``failed`` event, if one came.
        gone_at: When it was first seen to have ended without finishing (monotonic seconds).
    """

    child: Child
    heard: float = field(default_factory=time.monotonic)
    status: Event = field(default_factory=dict)
    started: bool = False
    ready: bool = False
    finished: bool = False
    failure: Event | None = None
    gone_at: float | None = None

    @property
    def steps(self) -> int:
        """Steps it has reported."""
        return int(self.status.get("steps", 0))

    def describe(self) -> str:
        """``waits for g3<1 from vw0/stage1 since 12 s``."""
        if self.finished:
            return "has finished"
        if self.child.exit_code is not None:
            return f"has ended ({self.child.ended_by()})"
        if not self.started:
            return "has not started yet"
        silent_s = time.monotonic() - self.heard
        silence = f"silent for {silent_s:.0f} s (stopped?), last seen: " if silent_s > _SILENT_S else ""
        wait = self.status.get("wait")
        if wait:
            seconds = time.time() - wait["since"]
            return f"{silence}waits for {wait['what']} from {wait['whom']} since {seconds:.0f} s"
        seconds = time.time() - self.status.get("since", time.time())
        return f"{silence}at {self.status.get('doing', 'start')} since {seconds:.0f} s"


class Supervisor:
    """Collects events until a condition holds; raises as soon as something is wrong.

    Args:
        timeout_s: Seconds without progress of any process until the watchdog ends the run; while processes start, it
            waits five minutes at least.
        on_event: Sees every event (for the log, the progress display, saving weights); its time is no stall.
    """

    def __init__(
        self,
        receiver: EventReceiver,
        *,
        timeout_s: float,
        on_event: Callable[[Event], None],
    ) -> None:
        self._receiver = receiver
        self._timeout_s = timeout_s
        self._on_event = on_event
        self._states: dict[str, ProcessState] = {}
        self._progress_at = time.monotonic()
        self.endpoints: dict[str, str] = {}

    @property
    def states(self) -> Mapping[str, ProcessState]:
        """By process name."""
        return self._states

    def add(self, child: Child) -> None:
        """Watch one more process."""
        self._states[child.name] = ProcessState(child)

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Handle events until ``done``.

        Raises:
            RunError: HP560 a process was ended by a signal or left without a word; HP561 a process raised; HP562 no
                progress for the timeout.
        """
        self._progress_at = time.monotonic()
        while not done():
            self._step()
            self._raise_failures()
            waited_s = time.monotonic() - self._progress_at
            if waited_s > (self._timeout_s if self._all_ready() else max(self._timeout_s, _START_S)):
                raise self._stall(waited_s)

    def _step(self) -> None:
        for event in self._receiver.receive(_POLL_S):
            self._take(event)
            start = time.monotonic()
            self._on_event(event)
            self._progress_at += time.monotonic() - start  # nobody stands still because weights are being written here
        for state in self._states.values():
            if state.gone_at is None and not state.finished and state.child.exit_code is not None:
                state.gone_at = time.monotonic()

    def _take(self, event: Event) -> None:
        state = self._states.get(event["process"])
        if state is None:
            return
        state.heard = time.monotonic()
        kind = event["kind"]
        if kind == "status":
            if event["steps"] != state.steps:
                self._progress_at = time.monotonic()
            state.status = event
            return
        self._progress_at = time.monotonic()
        if kind == "started":
            state.started = True
        elif kind == "finished":
            state.finished, state.gone_at = True, None
        elif kind == "failed":
            state.failure = state.failure or event
        elif kind == "ready":
            state.ready = True
            if "endpoint" in event:
                self.endpoints[event["process"]] = event["endpoint"]

    # failures

    def _failed(self) -> list[ProcessState]:
        return [s for s in self._states.values() if s.failure is not None or s.gone_at is not None]

    def _raise_failures(self) -> None:
        """Once something failed: listen on for a moment, so that the cause is named and not what it led to."""
        if not self._failed():
            return
        start = time.monotonic()
        while True:
            self._step()
            spent = time.monotonic() - start
            if spent > _SETTLE_CONSEQUENCES_S or (spent > _SETTLE_S and any(map(_is_cause, self._failed()))):
                break
        failed = self._failed()
        if failed:
            raise _failure_error(min(failed, key=_suspicion), [s.child.name for s in failed])

    def _all_ready(self) -> bool:
        return all(s.ready for s in self._states.values())

    def _stall(self, waited_s: float) -> RunError:
        lines = [f"{name}: {state.describe()}" for name, state in self._states.items()]
        return RunError(
            "HP562",
            f"no process has made progress for {waited_s:.0f} s\n  " + "\n  ".join(lines),
            hint="see the log of the process that the others wait for; if it is only slow, give a larger --timeout",
        )


def _is_cause(state: ProcessState) -> bool:
    if state.failure is not None:
        return not state.failure["consequence"]
    return state.gone_at is not None


def _suspicion(state: ProcessState) -> tuple[bool, float]:
    """Sorts the cause first: no lost peer, then the earliest."""
    offset = time.time() - time.monotonic()
    at = state.failure["time"] if state.failure is not None else (state.gone_at or 0.0) + offset
    return (not _is_cause(state), at)


def _failure_error(state: ProcessState, failed: list[str]) -> RunError:
    name, log = state.child.name, state.child.log
    others = [other for other in failed if other != name]
    also = f"\n  {', '.join(others)} ended with it" if others else ""
    if state.failure is not None:
        failure, hint = state.failure, f"see the log {log}"
        if failure["code"] is not None:
            advice = f"{failure['hint']}; or {hint}" if failure["hint"] else hint
            return RunError("HP561", f"{failure['code']}: {failure['error']}{also}", where=name, hint=advice)
        trace = str(failure["traceback"]).rstrip().splitlines()[-_TRACE_LINES:]
        message = f"{failure['error']}\n  " + "\n  ".join(trace) + also
        return RunError("HP561", message, where=name, hint=hint)
    message = f"the process ended by itself ({state.child.ended_by()}){_last_seen(state.status)}"
    tail = state.child.log_tail()
    if tail:
        message += "\n  " + "\n  ".join(tail)
    hint = f"see the log {log}"
    if state.child.exit_code == -9:
        hint += "; SIGKILL without your doing is usually the kernel out of memory (see dmesg)"
    return RunError("HP560", message + also, where=name, hint=hint)


def _last_seen(status: Mapping[str, Any]) -> str:
    return f", last seen at {status['doing']}" if status else " before it could report anything"
