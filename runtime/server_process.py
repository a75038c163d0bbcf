"""The parameter server of one node: ``python -m hetpipe_compiler.runtime.server_process --run DIR --node NAME``.

A ROUTER socket around a `ParameterShard`. It listens on 127.0.0.1 at a free port and reports the endpoint to the
launcher. One thread handles one message at a time, in the order of arrival (with an emulated network: in the order of
delivery). Besides the parameters it keeps the newest buffers of the stages that report to it; it does not merge them.

With ``--save-every``, each parameter is kept as it was when its clock reached a multiple of that many waves (in
reproducible mode exactly the weights of that clock), and a set that is whole waits until the launcher takes it. While
several wait, messages of stages wait too: training is then as fast as the disk, and memory stays bounded. That cannot
deadlock: who holds up training has the clock that is saved next, and no stage needs anything newer to reach it.
"""

from __future__ import annotations

import argparse
import copy
import heapq
import itertools
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from hetpipe_compiler.errors import RunError
from hetpipe_compiler.runtime.child import child_process
from hetpipe_compiler.runtime.events import EventSender, StatusThread
from hetpipe_compiler.runtime.initial import load_weights
from hetpipe_compiler.runtime.job import Job, server_name
from hetpipe_compiler.runtime.kept_waves import KeptWaves
from hetpipe_compiler.runtime.placement import parameter_nodes
from hetpipe_compiler.runtime.transport.parameter_link import decode, encode, now_us
from hetpipe_compiler.runtime.waits import Activity
from hetpipe_compiler.runtime.wsp.server import ParameterShard, Reply

if TYPE_CHECKING:
    from torch import Tensor

_IDLE_MS = 500
_OF_LAUNCHER = ("snapshot", "take", "stop")


class ServerLoop:
    """Serves one shard until the launcher says stop.

    Args:
        shard: The parameters.
        virtual_workers: N.
        events: Where events go; None: nowhere.
        save_every: Waves between the weights kept for the launcher; None: never.
    """

    def __init__(
        self,
        shard: ParameterShard,
        virtual_workers: int,
        *,
        events: EventSender | None = None,
        save_every: int | None = None,
        activity: Activity | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self._shard = shard
        self._virtual_workers = virtual_workers
        self._events = events
        self._kept = KeptWaves(shard.names, save_every)
        self.activity = activity or Activity()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"
        self._due: list[tuple[int, int, bytes, dict[str, Any], dict[str, Tensor]]] = []
        self._order = itertools.count()
        self._buffers: dict[int, dict[str, Tensor]] = {}
        self._samples: dict[int, dict[str, int]] = {}
        self._asked: deque[tuple[bytes, dict[str, Any]]] = deque()
        self._stopped = False

    def clocks(self) -> dict[str, Any]:
        """For status events: virtual worker -> waves that it has pushed of every parameter here."""
        counts = {vw: min(self._shard.waves(vw).values(), default=0) for vw in range(self._virtual_workers)}
        return {"clocks": counts}

    def run(self) -> None:
        """Serve until told to stop and all that was kept has been taken."""
        self.activity.begin("serving")
        while not self._stopped or self._kept.waiting:
            if self._kept.full:
                clocks = ", ".join(map(str, self._kept.waiting))
                with self.activity.waiting(f"the saving of the weights at clocks {clocks}", "launcher"):
                    self._poll(_IDLE_MS)
            else:
                wait_ms = _IDLE_MS if not self._due else max(0, min(_IDLE_MS, (self._due[0][0] - now_us()) // 1000 + 1))
                self._poll(wait_ms)
                self.activity.steps += bool(self._due)  # an emulated network that takes its time is no stall
            while self._due and self._due[0][0] <= now_us() and not self._kept.full:
                _, _, sender, header, tensors = heapq.heappop(self._due)
                self._handle(sender, header, tensors)
            while self._asked:
                self._handle(*self._asked.popleft(), {})
        self._socket.close(linger=5000)
        self._context.term()

    def _poll(self, wait_ms: int) -> None:
        if self._socket.poll(wait_ms):
            self._receive()

    def _receive(self) -> None:
        while True:
            try:
                sender, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                header, tensors = decode([frame.buffer for frame in frames])
            except (ValueError, IndexError) as error:
                print(f"dropped a message that is none of ours, from {sender.bytes!r}: {error}", file=sys.stderr)
                continue
            if header.get("op") in _OF_LAUNCHER:
                self._asked.append((sender.bytes, header))
                continue
            due_us = header.get("due_us", 0)
            heapq.heappush(self._due, (due_us, next(self._order), sender.bytes, header, tensors))

    def _handle(self, sender: bytes, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        name = sender.decode(errors="replace")
        handler = getattr(self, f"_on_{header.get('op')}", None)
        if handler is None:
            self._send(sender, {"op": "error", "text": f"unknown request '{header.get('op')}' from {name}"})
            return
        try:
            handler(sender, header, tensors)
        except RunError as error:
            place = f"{error.where}: " if error.where else ""
            self._send(sender, {"op": "error", "text": place + error.message})

    def _on_push(self, sender: bytes, header: dict[str, Any], updates: dict[str, Tensor]) -> None:
        vw, stage, wave = header["vw"], header["stage"], header["wave"]
        self.activity.begin(f"wave {wave} of vw{vw}/stage{stage}")
        replies = self._shard.push(vw, stage, wave, updates)
        self._send(sender, {"op": "ack", "of": "push", "wave": wave})
        self._answer(replies + self._shard.pull(vw, stage, tuple(updates), header["need"]))
        self._keep(tuple(updates))

    def _on_finish(self, sender: bytes, header: dict[str, Any], _: dict[str, Tensor]) -> None:
        vw, stage, names = header["vw"], header["stage"], tuple(header["names"])
        self.activity.begin(f"finish of vw{vw}/stage{stage}")
        replies = self._shard.finish(vw, stage, names) if names else []
        self._send(sender, {"op": "ack", "of": "finish"})
        self._answer(replies)
        self._keep(names)

    def _on_buffers(self, _: bytes, header: dict[str, Any], values: dict[str, Tensor]) -> None:
        self._buffers.setdefault(header["vw"], {}).update(values)
        self._samples.setdefault(header["vw"], {}).update(dict.fromkeys(values, header["samples"]))

    def _on_snapshot(self, sender: bytes, *_: Any) -> None:
        self._send(sender, {"op": "snapshot", **self._snapshot_header()}, self._snapshot(self._shard.snapshot()))

    def _on_take(self, sender: bytes, header: dict[str, Any], _: Any) -> None:
        found = self._kept.take(header["clock"])
        if found is None:
            self._send(sender, {"op": "error", "text": f"no weights are kept of clock {header['clock']}"})
        else:
            self._send(sender, {"op": "snapshot", **found[0]}, found[1])

    def _on_stop(self, sender: bytes, *_: Any) -> None:
        self._send(sender, {"op": "ack", "of": "stop"})
        self._stopped = True

    def _answer(self, replies: list[Reply]) -> None:
        for reply in replies:
            header = {
                "op": "weights",
                "clock": reply.clock,
                "contains": reply.contains,
                "need": reply.need,
                "sent_us": now_us(),
            }
            self._send(f"vw{reply.vw}/stage{reply.stage}".encode(), header, reply.weights)

    def _send(self, to: bytes, header: dict[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        # Weights and buffers are never written again once they are here, so ZeroMQ may read them whenever it likes.
        self._socket.send_multipart([to, *encode(header, tensors)], copy=False)

    def _snapshot_header(self) -> dict[str, Any]:
        return {"clock": self._shard.clock(), "samples": self._samples, **self.clocks()}

    def _snapshot(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights as ``w:name`` and buffers as ``b:vw:name``."""
        tensors = {f"w:{name}": value for name, value in weights.items()}
        for vw, values in self._buffers.items():
            tensors.update({f"b:{vw}:{name}": value for name, value in values.items()})
        return tensors

    def _keep(self, names: tuple[str, ...]) -> None:
        """Keep those of these parameters that just reached a clock to be saved, and tell of sets that are whole."""
        if self._events is None or not self._kept.wanted:
            return
        weights = self._shard.snapshot()
        for name in names:
            self._kept.note(name, self._shard.clock([name]), weights[name])
        for clock, values in self._kept.completed():
            header = copy.deepcopy({**self._snapshot_header(), "clock": clock})
            self._kept.put(clock, header, self._snapshot(values))
            self._events.send("kept", clock=clock)


def serve(run: Path, node: str) -> None:
    """Be the server of ``node`` in the run of ``run``."""
    job = Job.load(run)
    with child_process(job, server_name(node)) as events:
        plan = job.load_plan()
        names = [name for name, at in parameter_nodes(plan).items() if at == node]
        n = len(plan.virtual_workers)
        # Not bound to a name here: the shard alone decides how long it keeps the initial weights.
        shard = ParameterShard(
            load_weights(plan, job.weights, names),
            n,
            scale=plan.update_scale,
            staleness=plan.staleness,
            reproducible=job.reproducible,
            on_event=lambda event: events.send(event.pop("event"), **event),
        )
        loop = ServerLoop(shard, n, events=events, save_every=job.save_every)
        status = StatusThread(events, loop.activity, loop.clocks)
        status.start()
        events.send("ready", endpoint=loop.endpoint)
        loop.run()
        status.stop()


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="hetpipe-server")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--node", required=True)
    arguments = parser.parse_args()
    serve(arguments.run, arguments.node)


if __name__ == "__main__":
    main()
