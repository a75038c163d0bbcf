"""Train with real processes on this machine: a worker per stage, a parameter server per node, and this launcher."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hetpipe_compiler.errors import HetpipeError, RunError
from hetpipe_compiler.runtime import checkpoint, processes
from hetpipe_compiler.runtime.collect import ANSWER_S, WaveSaver, request, whole_model
from hetpipe_compiler.runtime.events import Event, EventReceiver, JsonLines
from hetpipe_compiler.runtime.initial import load_weights
from hetpipe_compiler.runtime.job import log_path, server_name, worker_name
from hetpipe_compiler.runtime.launch import Prepared
from hetpipe_compiler.runtime.placement import server_nodes
from hetpipe_compiler.runtime.processes import Child
from hetpipe_compiler.runtime.progress import Progress, finite
from hetpipe_compiler.runtime.supervise import Supervisor

if TYPE_CHECKING:
    from torch import Tensor

_HOST = "127.0.0.1"
_SERVERS_KEY = "servers"
_STOP_S = 10.0


def run_distributed(prepared: Prepared, *, port: int | None = None) -> bool:
    """Train to the end and save the weights; False when Ctrl-C (or SIGTERM) ended it, with the weights so far saved.

    They are saved where a worker failed, too.

    Raises:
        RunError: HP553 the port is in use; HP560-HP562 a process failed, or nothing goes on.
    """
    store = _open_store(port)
    receiver = EventReceiver()
    job = prepared.job.model_copy(update={"store": f"{_HOST}:{store.port}", "events": receiver.endpoint})
    job.save(prepared.run)
    stages = [len(worker.stages) for worker in prepared.plan.virtual_workers]
    log = JsonLines(prepared.run / "events.jsonl")
    try:
        progress = Progress(
            job.minibatches,
            stages,
            prepared.run / "metrics.jsonl",
            prepared.console,
            processes=sum(stages) + len(server_nodes(prepared.plan)),
        )
        with progress, _interrupts():
            return _Run(prepared, receiver, store, progress, log).go()
    finally:
        log.close()
        receiver.close()


class _Run:
    """The processes of one run."""

    def __init__(
        self, prepared: Prepared, receiver: EventReceiver, store: Any, progress: Progress, log: JsonLines
    ) -> None:
        self._plan, self._run, self._job = prepared.plan, prepared.run, prepared.job
        self._store, self._progress, self._log = store, progress, log
        self._initial = cache(lambda: load_weights(self._plan, self._job.weights))
        nodes = server_nodes(self._plan)
        self._servers = {server_name(node): node for node in nodes}
        self._saver = WaveSaver(self._plan, self._initial, self._run, len(nodes), progress.note)
        self._supervisor = Supervisor(receiver, timeout_s=self._job.timeout_s, on_event=self._on_event)
        self._children: list[Child] = []

    def go(self) -> bool:
        states = self._supervisor.states
        try:
            self._start()
            self._supervisor.wait_until(lambda: len(self._supervisor.endpoints) == len(self._servers))
            endpoints = {self._servers[name]: at for name, at in self._supervisor.endpoints.items()}
            self._store.set(_SERVERS_KEY, json.dumps(endpoints))
            self._supervisor.wait_until(lambda: all(s.finished for n, s in states.items() if n not in self._servers))
            self._save(self._run / "weights.safetensors")
            for endpoint in endpoints.values():
                request(endpoint, "stop", timeout_s=_STOP_S)
            self._supervisor.wait_until(lambda: all(s.finished for s in states.values()))
            return True
        except KeyboardInterrupt:
            self._progress.note("interrupted: stopping the workers")
            self._save_what_there_is()
            return False
        except RunError:
            if any(worker.pushed for worker in self._progress.workers):
                self._save_what_there_is()
            raise
        finally:
            processes.terminate(self._children)

    def _start(self) -> None:
        run = str(self._run.resolve())
        for name, node in self._servers.items():
            self._start_one(name, "server_process", ["--run", run, "--node", node])
        for vw, worker in enumerate(self._plan.virtual_workers):
            for stage in range(len(worker.stages)):
                place = ["--vw", str(vw), "--stage", str(stage)]
                self._start_one(worker_name(vw, stage), "worker", ["--run", run, *place])

    def _start_one(self, name: str, module: str, arguments: list[str]) -> None:
        log = log_path(self._run, name)
        full_name = f"hetpipe_compiler.runtime.{module}"
        child = processes.start(name, full_name, arguments, log=log, threads=self._job.threads)
        self._children.append(child)
        self._supervisor.add(child)

    def _save(self, path: Path, timeout_s: float = ANSWER_S) -> None:
        """Ask all servers for what they hold and write the whole model."""
        snapshots = [
            request(endpoint, "snapshot", timeout_s=timeout_s) for endpoint in self._supervisor.endpoints.values()
        ]
        values = whole_model(self._plan, self._initial(), snapshots)
        clock = min((header["clock"] for header, _ in snapshots), default=0)
        checkpoint.save(path, checkpoint.state_dict(self._plan, values), clock=clock)
        self._progress.note(f"saved {path}")

    def _save_what_there_is(self) -> None:
        """The weights so far, if all servers are there to tell."""
        processes.terminate(c for c in self._children if c.name not in self._servers)
        if len(self._supervisor.endpoints) < len(self._servers):
            self._progress.note("nothing to save yet")
            return
        if any(c.name in self._servers and c.exit_code is not None for c in self._children):
            return
        try:
            self._save(self._run / "weights-interrupted.safetensors", _STOP_S)
        except HetpipeError as error:
            self._progress.note(f"the weights could not be saved: {error}")

    def _on_event(self, event: Event, tensors: Mapping[str, Tensor]) -> None:
        kind = event["kind"]
        if kind != "status":
            self._log.write({key: finite(v) if isinstance(v, float) else v for key, v in event.items()})
        if kind == "weights":
            self._saver.on_event(event, tensors)
        elif kind == "note":
            self._progress.note(event["text"])
        self._progress.on_event(event)


def _open_store(port: int | None) -> Any:
    """A TCPStore that only this machine can reach: left to itself, it listens on every address."""
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


@contextmanager
def _interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP do what Ctrl-C does; but under nohup a terminal that closes changes nothing."""
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
