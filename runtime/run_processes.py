"""The processes of a run on this machine, training or evaluating: how they are started, watched and ended."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hetpipe_compiler.errors import RunError
from hetpipe_compiler.runtime import processes
from hetpipe_compiler.runtime.events import Event, EventReceiver, JsonLines
from hetpipe_compiler.runtime.job import Job, log_path, worker_name
from hetpipe_compiler.runtime.processes import Child
from hetpipe_compiler.runtime.progress import finite
from hetpipe_compiler.runtime.supervise import Supervisor

_HOST = "127.0.0.1"


class RunProcesses:
    """Children of the launcher, under its supervisor, with what all of them share.

    Args:
        run: The run folder. Use as a context manager: at the end every child is ended.
        job: Written to the run folder with the addresses filled in.
        store: In which processes that start find each other; see `open_store`.
        on_event: Sees every event, after it went into RUN/events.jsonl.

    Attributes:
        supervisor: Watches them.
    """

    def __init__(self, run: Path, job: Job, store: Any, on_event: Callable[[Event], None]) -> None:
        self._run, self._threads, self._on_event = run.resolve(), job.threads, on_event
        self.store = store
        self._receiver = EventReceiver()
        job.model_copy(update={"store": f"{_HOST}:{self.store.port}", "events": self._receiver.endpoint}).save(run)
        self._log = JsonLines(run / "events.jsonl")
        self.supervisor = Supervisor(self._receiver, timeout_s=job.timeout_s, on_event=self._take)
        self._children: list[Child] = []

    def __enter__(self) -> RunProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._log.close()
        self._receiver.close()

    def start(self, name: str, module: str, *arguments: str) -> None:
        """Start ``python -m hetpipe_compiler.runtime.MODULE --run RUN ARGUMENTS`` and watch it."""
        child = processes.start(
            name,
            f"hetpipe_compiler.runtime.{module}",
            ["--run", str(self._run), *arguments],
            log=log_path(self._run, name),
            threads=self._threads,
        )
        self._children.append(child)
        self.supervisor.add(child)

    def start_stages(self, vw: int, stages: int, module: str) -> None:
        """A process for each stage of a virtual worker."""
        for stage in range(stages):
            self.start(worker_name(vw, stage), module, "--vw", str(vw), "--stage", str(stage))

    def end(self, spare: Callable[[str], bool] = lambda _: False) -> None:
        """End those that still run, but for the names that ``spare`` says."""
        processes.terminate(child for child in self._children if not spare(child.name))

    def _take(self, event: Event) -> None:
        if event["kind"] != "status":
            self._log.write({key: finite(v) if isinstance(v, float) else v for key, v in event.items()})
        self._on_event(event)


def open_store(port: int | None) -> Any:
    """A TCPStore that only this machine can reach (left to itself, it listens on every address).

    Raises:
        RunError: HP553 the port is in use. Call it before anything is written: the run folder stays empty then.
    """
    listener = socket.socket()
    try:
        listener.bind((_HOST, port or 0))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise RunError(
            "HP553",
            f"cannot listen on port {port}: {error.strerror}",
            where=f"{_HOST}:{port}",
            hint="give another --port, or none: then a free one is taken",
        ) from None
    return dist.TCPStore(  # type: ignore[attr-defined]
        _HOST,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
