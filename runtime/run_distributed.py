"""Train with real processes on this machine: a worker per stage, a parameter server per node, and this launcher."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetpipe_compiler.errors import HetpipeError, RunError
from hetpipe_compiler.runtime import checkpoint
from hetpipe_compiler.runtime.collect import ANSWER_S, WaveSaver, request, whole_model
from hetpipe_compiler.runtime.events import Event
from hetpipe_compiler.runtime.initial import load_weights
from hetpipe_compiler.runtime.job import server_name
from hetpipe_compiler.runtime.placement import parameter_nodes, server_nodes
from hetpipe_compiler.runtime.prepared import Prepared
from hetpipe_compiler.runtime.progress import Progress
from hetpipe_compiler.runtime.run_processes import RunProcesses, open_store

_SERVERS_KEY = "servers"
_STOP_S = 10.0


def run_distributed(prepared: Prepared, *, port: int | None = None) -> bool:
    """Train to the end and save the weights; False when Ctrl-C ended it, with the weights so far saved.

    They are saved where a worker failed, too.

    Raises:
        RunError: HP553 the port is in use; HP560-HP562 a process failed, or nothing goes on.
    """
    store = open_store(port)
    stages = [len(worker.stages) for worker in prepared.plan.virtual_workers]
    progress = Progress(
        prepared.job.minibatches,
        stages,
        prepared.run / "metrics.jsonl",
        prepared.console,
        processes=sum(stages) + len(server_nodes(prepared.plan)),
    )
    with progress:
        return _Training(prepared, progress).go(store)


class _Training:
    """One run."""

    def __init__(self, prepared: Prepared, progress: Progress) -> None:
        self._plan, self._run, self._job = prepared.plan, prepared.run, prepared.job
        self._progress = progress
        # Now: when the run ends, the plan folder may be another one.
        trained = parameter_nodes(self._plan)
        untrained = [t.name for t in (*self._plan.parameters, *self._plan.buffers) if t.name not in trained]
        self._initial = load_weights(self._plan, self._job.weights, untrained)
        nodes = server_nodes(self._plan)
        self._servers = {server_name(node): node for node in nodes}
        self._saver = WaveSaver(self._plan, self._initial, self._run, progress.note)
        self._children: RunProcesses | None = None

    def go(self, store: Any) -> bool:
        with RunProcesses(self._run, self._job, store, self._on_event) as children:
            self._children = children
            try:
                self._train(children)
                return True
            except KeyboardInterrupt:
                self._progress.note("interrupted: stopping the workers")
                self._save_what_there_is(children)
                return False
            except RunError:
                if any(worker.pushed for worker in self._progress.workers):
                    self._save_what_there_is(children)
                raise

    def _train(self, children: RunProcesses) -> None:
        supervisor = children.supervisor
        states = supervisor.states
        self._start(children)
        supervisor.wait_until(lambda: len(supervisor.endpoints) == len(self._servers))
        endpoints = {self._servers[name]: at for name, at in supervisor.endpoints.items()}
        children.store.set(_SERVERS_KEY, json.dumps(endpoints))
        supervisor.wait_until(lambda: all(s.finished for n, s in states.items() if n not in self._servers))
        self._save(self._run / "weights.safetensors", endpoints)
        for endpoint in endpoints.values():
            request(endpoint, "stop", timeout_s=_STOP_S)
        supervisor.wait_until(lambda: all(s.finished for s in states.values()))

    def _start(self, children: RunProcesses) -> None:
        for name, node in self._servers.items():
            children.start(name, "server_process", "--node", node)
        for worker in self._plan.virtual_workers:
            children.start_stages(worker.index, len(worker.stages), "worker")

    def _save(self, path: Path, endpoints: Mapping[str, str], timeout_s: float = ANSWER_S) -> None:
        """Ask all servers for what they hold and write the whole model."""
        snapshots = [request(endpoint, "snapshot", timeout_s=timeout_s) for endpoint in endpoints.values()]
        values = whole_model(self._plan, self._initial, snapshots)
        clock = min((header["clock"] for header, _ in snapshots), default=0)
        checkpoint.save(path, checkpoint.state_dict(self._plan, values), clock=clock)
        self._progress.note(f"saved {path}")

    def _save_what_there_is(self, children: RunProcesses) -> None:
        """The weights so far, if all servers are there to tell."""
        children.end(spare=lambda name: name in self._servers)
        supervisor = children.supervisor
        if len(supervisor.endpoints) < len(self._servers):
            self._progress.note("nothing to save yet")
            return
        if any(supervisor.states[name].child.exit_code is not None for name in self._servers):
            return
        try:
            self._save(self._run / "weights-interrupted.safetensors", supervisor.endpoints, _STOP_S)
        except HetpipeError as error:
            self._progress.note(f"the weights could not be saved: {error}")

    def _on_event(self, event: Event) -> None:
        if event["kind"] == "kept" and self._children is not None:
            self._saver.on_kept(event["process"], event["clock"], self._children.supervisor.endpoints)
        elif event["kind"] == "note":
            self._progress.note(event["text"])
        self._progress.on_event(event)
