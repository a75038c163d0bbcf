"""A stage's way to the parameter servers, over ZeroMQ.

Every message is one msgpack frame that says what it is, then one raw frame per tensor; nothing is pickled. ``op`` is:

=========  ==================  ================================================================================
from       op                  content
=========  ==================  ================================================================================
stage      push                vw, stage, wave, need, the summed updates
stage      buffers             vw, stage, samples, the buffers that training changes
stage      finish              vw, stage, names of the parameters that it pushes no more
launcher   snapshot            asks for weights and buffers as they are now
launcher   take                asks for those kept of a clock, once
launcher   stop                the server ends when nothing that it has kept is left
server     ack                 of a push or finish: which op, and the wave
server     weights             clock, contains, the weights of one answered pull
server     snapshot            weights, wave counts and buffers, as asked for by snapshot or take
server     error               text: a request that the server refuses
=========  ==================  ================================================================================

``due_us`` (us since the epoch) in a message: when an emulated network would deliver it; the receiver holds it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgpack
import zmq

from hetpipe_compiler.errors import RunError
from hetpipe_compiler.runtime.channels import PulledWeights
from hetpipe_compiler.runtime.transport.frames import pack, unpack
from hetpipe_compiler.runtime.waits import Activity

if TYPE_CHECKING:
    from torch import Tensor

_POLL_MS = 200


def encode(header: dict[str, Any], tensors: Mapping[str, Tensor] | None = None) -> list[Any]:
    """The frames of a message; they share memory with the tensors until they are sent with ``copy=True``."""
    specs, buffers = pack(tensors or {})
    return [msgpack.packb({**header, "tensors": specs}), *buffers]


def decode(frames: list[Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors (their own memory) of a message. Raises `ValueError` for what is none."""
    try:
        header = msgpack.unpackb(frames[0], strict_map_key=False)
    except msgpack.UnpackException as error:
        raise ValueError(str(error)) from error
    if not isinstance(header, dict) or not isinstance(header.get("tensors"), list):
        raise ValueError("the first frame is no header")
    return header, unpack(header.pop("tensors"), frames[1:])


def now_us() -> int:
    """Microseconds since the epoch."""
    return time.time_ns() // 1000


class ZmqParameterLink:
    """A `ParameterLink` with one DEALER socket per server.

    Args:
        servers: Node -> endpoint (``tcp://127.0.0.1:5555``) of every server that holds a parameter of this stage.
        placement: Parameter name -> node of its server.
        buffer_node: The server that keeps this stage's buffers; must be in ``servers`` if the stage has any.
        transfer_ms: For emulation: ``(node, payload bytes) -> ms`` of one way between this stage and that server.
    """

    def __init__(
        self,
        *,
        vw: int,
        stage: int,
        servers: Mapping[str, str],
        placement: Mapping[str, str],
        buffer_node: str | None = None,
        activity: Activity | None = None,
        transfer_ms: Callable[[str, int], float] | None = None,
    ) -> None:
        self._vw = vw
        self._stage = stage
        self._placement = dict(placement)
        self._buffer_node = buffer_node
        self._activity = activity or Activity()
        self._transfer_ms = transfer_ms
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        for node, endpoint in servers.items():
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, f"vw{vw}/stage{stage}".encode())
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(endpoint)
            self._poller.register(socket, zmq.POLLIN)
            self._sockets[node] = socket
        self._clocks = dict.fromkeys(placement.values(), 0)
        self._ready: list[PulledWeights] = []
        self._held: list[tuple[int, str, PulledWeights]] = []
        self._due_us: dict[tuple[str, str], int] = {}
        self._unacknowledged: dict[str, int] = dict.fromkeys(servers, 0)

    @property
    def clock(self) -> int:
        """Smallest clock of the weights that came, over this stage's servers; without servers nothing is late."""
        return min(self._clocks.values(), default=sys.maxsize)

    def push(self, wave: int, updates: Mapping[str, Tensor], need: int) -> None:
        """See `ParameterLink.push`. Returns once the sockets hold a copy."""
        for node, share in self._by_server(updates).items():
            header = {"op": "push", "vw": self._vw, "stage": self._stage, "wave": wave, "need": need}
            self._send(node, header, share, acknowledged=True)

    def buffers(self, values: Mapping[str, Tensor], samples: int) -> None:
        """See `ParameterLink.buffers`."""
        if values:
            node = self._buffer_node
            assert node is not None, "a stage with buffers needs a server for them"
            self._send(node, {"op": "buffers", "vw": self._vw, "stage": self._stage, "samples": samples}, values)

    def poll(self) -> list[PulledWeights]:
        """See `ParameterLink.poll`. Raises `RunError` HP540 when a server refused a request."""
        self._collect(0)
        ready, self._ready = self._ready, []
        return ready

    def wait(self, clock: int) -> list[PulledWeights]:
        """See `ParameterLink.wait`; waits for ever: the launcher ends processes whose peers are gone."""
        self._collect(0)
        if self.clock < clock:
            late = ", ".join(f"server {node}" for node, c in self._clocks.items() if c < clock)
            with self._activity.waiting(f"weights at clock {clock}", late, weights=True):
                while self.clock < clock:
                    self._collect(_POLL_MS)
        ready, self._ready = self._ready, []
        return ready

    def finish(self) -> None:
        """See `ParameterLink.finish`; returns when the servers have confirmed everything."""
        for node in self._sockets:
            names = [name for name, server in self._placement.items() if server == node]
            header = {"op": "finish", "vw": self._vw, "stage": self._stage, "names": names}
            self._send(node, header, {}, acknowledged=True)
        late = ", ".join(f"server {node}" for node in self._sockets)
        with self._activity.waiting("acknowledgement of the last push", late, weights=True):
            while any(self._unacknowledged.values()):
                self._collect(_POLL_MS)

    def close(self) -> None:
        """Close the sockets; what they hold is still sent."""
        for socket in self._sockets.values():
            socket.close(linger=5000)
        self._context.term()

    def _by_server(self, values: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        shares: dict[str, dict[str, Tensor]] = {}
        for name, value in values.items():
            shares.setdefault(self._placement[name], {})[name] = value
        return shares

    def _send(
        self, node: str, header: dict[str, Any], tensors: Mapping[str, Tensor], *, acknowledged: bool = False
    ) -> None:
        if self._transfer_ms is not None:
            header = {**header, "due_us": self._due("to", node, now_us(), tensors)}
        self._unacknowledged[node] += acknowledged
        self._sockets[node].send_multipart(encode(header, tensors), copy=True)

    def _due(self, way: str, node: str, sent_us: int, tensors: Mapping[str, Tensor]) -> int:
        """When the emulated network delivers a message; a small one does not overtake a large one before it."""
        if self._transfer_ms is None:
            return 0
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        due_us = max(self._due_us.get((way, node), 0), sent_us + int(1000 * self._transfer_ms(node, size)))
        self._due_us[way, node] = due_us
        return due_us

    def _collect(self, timeout_ms: int) -> None:
        """Take in what has arrived; wait up to ``timeout_ms`` for something to."""
        if self._held:
            self._activity.steps += 1  # the emulated network is at work: no reason to call this a stall
            timeout_ms = min(timeout_ms, max(0, (self._held[0][0] - now_us()) // 1000 + 1))
        for socket, _ in self._poller.poll(timeout_ms):
            node = next(n for n, s in self._sockets.items() if s is socket)
            while True:
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                self._take(node, *decode([frame.buffer for frame in frames]))
        while self._held and self._held[0][0] <= now_us():
            _, node, pulled = self._held.pop(0)
            self._clocks[node] = max(self._clocks[node], pulled.clock)
            self._ready.append(pulled)

    def _take(self, node: str, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        if header["op"] == "ack":
            self._unacknowledged[node] -= 1
        elif header["op"] == "weights":
            due_us = self._due("from", node, header["sent_us"], tensors)
            self._held.append((due_us, node, PulledWeights(tensors, header["clock"], header["contains"])))
            self._held.sort(key=lambda item: item[0])
        else:
            raise RunError(
                "HP540",
                header.get("text", f"unknown answer '{header['op']}'"),
                where=f"server {node}, asked by vw{self._vw}/stage{self._stage}",
                hint="the processes do not run the same plan: start the run again in a new folder",
            )
