"""What every child process of a run does at its start and end: signals, threads, and the report of how it ended."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hetpipe_compiler.errors import HetpipeError
from hetpipe_compiler.runtime.events import EventSender
from hetpipe_compiler.runtime.job import Job
from hetpipe_compiler.user_code import told


@contextmanager
def child_process(job: Job, name: str) -> Iterator[EventSender]:
    """Around the work of a child: reports ``started``, then ``finished`` or ``failed`` with the traceback.

    An error is printed to the log too, and ends the process with status 1. The launcher alone decides about Ctrl-C.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(job.threads)
    events = EventSender(job.events, name)
    events.send("started", pid=os.getpid())
    try:
        yield events
    except BaseException as error:
        trace = traceback.format_exc()
        with suppress(OSError):  # a full disk has no room for the log; the launcher hears of it all the same
            print(trace, file=sys.stderr, flush=True)
        events.send("failed", **_failure(error), traceback=trace)
        events.close()
        # Not sys.exit: threads inside Gloo may wait for a peer that is gone.
        os._exit(1)
    events.send("finished")
    events.close()


def _failure(error: BaseException) -> dict[str, object]:
    from hetpipe_compiler.runtime.transport.process_group import PeerLostError

    failure: dict[str, object] = {"consequence": isinstance(error, PeerLostError)}
    if isinstance(error, HetpipeError):
        place = f"{error.where}: " if error.where else ""
        return {**failure, "code": error.code, "error": place + error.message, "hint": error.hint}
    return {**failure, "code": None, "error": told(error), "hint": None}
