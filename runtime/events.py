"""Events: what workers and servers tell the launcher over one ZeroMQ PUSH/PULL channel; the log in RUN/events.jsonl.

Every event is a dict with ``kind``, ``process`` (``launcher``, ``vw0/stage1``, ``server n0``) and ``time`` (seconds
since the epoch), and by kind:

==========  ====================================================================================================
kind        further keys
==========  ====================================================================================================
started     pid
ready       servers: ``endpoint``
status      once a second, from a thread of its own: `Activity.report`, servers also ``clocks`` (VW -> waves)
minibatch   vw, minibatch, loss (None when it is not a number), samples: the last stage has finished it
batch       evaluation: vw, minibatch, samples: stage 0 begins with it
loss        evaluation: vw, minibatch, loss: the last stage has finished it
push        servers: vw, stage, wave, accepted, clock
pull        servers: vw, stage, need, clock, contains: with each answer
finish      servers: vw, stage, clock
apply       vw, stage, minibatch, clock: from this forward on a stage works on weights of that clock
times       vw, stage, times: at the end of a stage's program, `InstructionTimes.summary`; waiting included, but for
            forwards and backwards on one CPU thread, which have that thread's own time
kept        servers, with ``--save-every``: clock: they hold the weights of that many waves until they are asked for
finished
failed      error, traceback, consequence (True: it only lost a peer); of a `HetpipeError` also code and hint
==========  ====================================================================================================
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import zmq

from hetpipe_compiler.errors import RunError
from hetpipe_compiler.runtime.processes import LAUNCHER_VARIABLE
from hetpipe_compiler.runtime.waits import Activity

Event = dict[str, Any]
_STATUS_EVERY_S = 1.0


class EventSender:
    """One process's end of the channel; any thread may use it."""

    def __init__(self, endpoint: str, process: str) -> None:
        self.process = process
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.connect(endpoint)

    def send(self, kind: str, **content: Any) -> None:
        """Send an event."""
        event = {"kind": kind, "process": self.process, "time": time.time(), **content}
        with self._lock:
            if not self._socket.closed:
                self._socket.send(msgpack.packb(event))

    def close(self) -> None:
        """Wait up to two seconds until everything is on its way, then close."""
        with self._lock:
            self._socket.close(linger=2000)
        self._context.term()


class StatusThread(threading.Thread):
    """Reports an activity every second, and ends the process at once if its parent is gone.

    A process whose working thread hangs still reports; only a stopped or dead one is silent.
    """

    def __init__(
        self, sender: EventSender, activity: Activity, more: Callable[[], dict[str, Any]] | None = None
    ) -> None:
        super().__init__(name="status", daemon=True)
        self._sender = sender
        self._activity = activity
        self._more = more or dict
        # Not what getppid() says now: the launcher may have gone while this process was still importing.
        self._parent = int(os.environ.get(LAUNCHER_VARIABLE) or os.getppid())
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(_STATUS_EVERY_S):
            if os.getppid() != self._parent:
                os._exit(1)  # an orphan: nobody will collect what it makes
            self._sender.send("status", **self._activity.report(), **self._more())

    def stop(self) -> None:
        """Send a last report and end the thread."""
        self._stopped.set()
        self.join()
        self._sender.send("status", **self._activity.report(), **self._more())


class EventReceiver:
    """The launcher's end."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"

    def receive(self, timeout_s: float) -> list[Event]:
        """Events that have arrived, oldest first; waits up to ``timeout_s`` for the first."""
        events: list[Event] = []
        if not self._socket.poll(int(timeout_s * 1000)):
            return events
        while True:
            try:
                events.append(msgpack.unpackb(self._socket.recv(zmq.NOBLOCK), strict_map_key=False))
            except zmq.Again:
                return events

    def close(self) -> None:
        """Close the channel."""
        self._socket.close(linger=0)
        self._context.term()


class JsonLines:
    """A file of one JSON object a line, flushed line by line so that it can be followed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Add a line; raises `RunError` HP554 when the disk is full, for instance."""
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise RunError(
                "HP554",
                f"cannot write: {error.strerror or error}",
                where=self._file.name,
                hint="make room, or choose another -o",
            ) from None

    def close(self) -> None:
        """Close the file; a line that could not be written was an error before."""
        with suppress(OSError):
            self._file.close()
