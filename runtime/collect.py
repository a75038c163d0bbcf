"""What the parameter servers hold, as values of the whole model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from hetpipe_compiler.errors import RunError
from hetpipe_compiler.runtime import checkpoint
from hetpipe_compiler.runtime.merge import BufferBook
from hetpipe_compiler.runtime.transport.parameter_link import decode, encode

if TYPE_CHECKING:
    from torch import Tensor

    from hetpipe_compiler.ir.plan import Plan

Snapshot = tuple[Mapping[str, Any], Mapping[str, "Tensor"]]
ANSWER_S = 60.0


def request(endpoint: str, op: str, *, timeout_s: float = ANSWER_S, **more: Any) -> Snapshot:
    """Ask one server for a snapshot, for kept weights, or to stop.

    Raises:
        RunError: HP541 it does not answer in time.
    """
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.IDENTITY, f"launcher-{time.monotonic_ns()}".encode())
        socket.connect(endpoint)
        socket.send_multipart(encode({"op": op, **more}))
        if not socket.poll(int(timeout_s * 1000)):
            raise RunError(
                "HP541",
                f"the parameter server did not answer '{op}' within {timeout_s:g} s",
                where=endpoint,
                hint="see its log in the run folder",
            )
        return decode([frame.buffer for frame in socket.recv_multipart(copy=False)])
    finally:
        socket.close(linger=0)
        context.term()


def whole_model(plan: Plan, initial: Mapping[str, Tensor], snapshots: list[Snapshot]) -> dict[str, Tensor]:
    """Trained parameters and merged buffers by the plan's names; what was not trained keeps its initial value.

    Args:
        initial: Untrained parameters and all buffers as training started.
        snapshots: Of all servers: header and tensors, see `ServerLoop`.

    Raises:
        RunError: HP514 buffers that cannot be merged.
    """
    values = dict(initial)
    book = BufferBook({b.name: initial[b.name] for b in plan.buffers})
    for header, tensors in snapshots:
        for key, tensor in tensors.items():
            kind, _, name = key.partition(":")
            if kind == "w":
                values[name] = tensor
            else:
                vw, _, name = name.partition(":")
                book.report(int(vw), {name: tensor}, header["samples"][int(vw)][name])
    return {**values, **book.merged()}


class WaveSaver:
    """Writes RUN/weights-wave<k>.safetensors once all servers hold their weights of clock k.

    The servers keep them until they are asked for, and hold up training when they have kept several: however slow the
    disk is, one set at most is in this process.
    """

    def __init__(self, plan: Plan, initial: Mapping[str, Tensor], run: Path, on_saved: Callable[[str], None]) -> None:
        self._plan, self._initial, self._run = plan, initial, run
        self._on_saved = on_saved
        self._kept_by: dict[int, set[str]] = {}

    def on_kept(self, server: str, clock: int, endpoints: Mapping[str, str]) -> None:
        """A server holds its weights of a clock; ``endpoints``: of all servers, by name.

        Raises:
            RunError: HP514 buffers that cannot be merged; HP541 a server does not answer; HP557 the disk is full.
        """
        self._kept_by.setdefault(clock, set()).add(server)
        if self._kept_by[clock] != set(endpoints):
            return
        del self._kept_by[clock]
        values = whole_model(
            self._plan, self._initial, [request(endpoint, "take", clock=clock) for endpoint in endpoints.values()]
        )
        path = self._run / f"weights-wave{clock}.safetensors"
        checkpoint.save(path, checkpoint.state_dict(self._plan, values), clock=clock)
        self._on_saved(f"saved {path}")
