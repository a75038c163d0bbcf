"""Messages between the stages of one virtual worker over torch.distributed: Gloo for CPU, NCCL for CUDA tensors.

A message is a header of eight int64, a layout where it differs from the channel's previous one, and one payload per
tensor:

* header: magic, kind, minibatch, source stage, sent at (us since the epoch), layout follows (0/1), layout bytes,
  payload bytes
* layout: msgpack list of [name, dtype, shape] for a tensor, [name, value] for None, int, float and bool
* payload: the tensor's bytes (Gloo knows no bool); nothing for a tensor without elements

The receiver checks the header and the layout before it posts a payload's receive, because Gloo takes a message of the
wrong dtype or length in silence. Sends do not block: their tensors are held until the peer has taken them.

Only the Gloo half has run: this code has not been tried on a GPU. With NCCL headers travel as CUDA tensors too, tags
are ignored, and what keeps the two kinds of message apart is that each flows in one direction only.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgpack
import torch
import torch.distributed as dist

from hetpipe_compiler.errors import RunError
from hetpipe_compiler.runtime.channels import MessageKind
from hetpipe_compiler.runtime.transport.frames import as_bytes, dtype_name, dtype_of
from hetpipe_compiler.runtime.waits import Activity

if TYPE_CHECKING:
    from torch import Tensor

_MAGIC = 0x48455450495045  # "HETPIPE"
_HEADER_FIELDS = 8
_POLL_S = 0.001
_KINDS = (MessageKind.ACTIVATIONS, MessageKind.GRADIENTS)


class PeerLostError(RunError):
    """The connection to another stage broke: a consequence, the cause is in that stage."""


def arrow(kind: MessageKind, minibatch: int, way: str, peer: int) -> str:
    """The schedule's token of a message, such as ``a3<1``."""
    return f"{kind.value}{minibatch}{way}{peer}"


class ProcessGroupMailbox:
    """A `Mailbox` over an initialised process group whose ranks are the stages.

    Args:
        group: The process group; None is the default one.
        vw: Index of the virtual worker, for messages to people.
        device: Where received tensors go.
        activity: Told about every wait.
        transfer_ms: For emulation: ``(peer, payload bytes) -> ms``; a receive ends no earlier than that after the send.
    """

    def __init__(
        self,
        *,
        vw: int,
        stage: int,
        group: dist.ProcessGroup | None = None,
        device: str | torch.device = "cpu",
        activity: Activity | None = None,
        transfer_ms: Callable[[int, int], float] | None = None,
    ) -> None:
        self._vw = vw
        self._stage = stage
        self._group = group
        self._device = torch.device(device)
        self._activity = activity or Activity()
        self._transfer_ms = transfer_ms
        self._sent_layout: dict[tuple[MessageKind, int], bytes] = {}
        self._known_layout: dict[tuple[MessageKind, int], list[list[Any]]] = {}
        self._sends = _Sends(threaded=self._device.type != "cuda")
        self._untaken: deque[Callable[[], None]] = deque()

    # sending

    def send(self, kind: MessageKind, minibatch: int, peer: int, values: Mapping[str, Any]) -> None:
        """See `Mailbox.send`. Raises `PeerLostError` HP531 when an earlier message could not be delivered."""
        tensors = {n: v.detach().contiguous() for n, v in values.items() if isinstance(v, torch.Tensor)}
        layout = msgpack.packb([_describe(name, value) for name, value in values.items()])
        changed = self._sent_layout.get((kind, peer)) != layout
        self._sent_layout[kind, peer] = layout
        payload_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
        header = [_MAGIC, _KINDS.index(kind), minibatch, self._stage, time.time_ns() // 1000]
        header += [int(changed), len(layout) if changed else 0, payload_bytes]
        parts = [(torch.tensor(header, dtype=torch.int64), _tag(kind, 0))]
        if changed:
            parts.append((torch.frombuffer(bytearray(layout), dtype=torch.uint8), _tag(kind, 1)))
        parts += [(as_bytes(t), _tag(kind, 2)) for t in tensors.values() if t.numel()]
        what = arrow(kind, minibatch, ">", peer)
        self._sends.check(self._lost, what)
        try:
            for part, tag in parts:
                on_device = part.to(self._device)
                self._sends.add(dist.isend(on_device, peer, group=self._group, tag=tag), on_device, peer)
        except RuntimeError as error:
            raise self._lost(what, peer, error) from error

    def hold_back(self, most: int) -> None:
        """Call after each minibatch's sends: waits until the messages of all but the last ``most`` have been taken.

        For programs in which nothing comes back from the later stages: without it a fast stage would fill the memory
        with what a slow one has not taken yet. Raises `PeerLostError` HP531.
        """
        self._untaken.append(self._sends.mark())
        if len(self._untaken) > most:
            with self._activity.waiting("room for more messages", "the later stages"):
                self._untaken.popleft()()
            self._sends.check(self._lost, "earlier messages")

    def flush(self) -> None:
        """Wait until every message has been taken."""
        with self._activity.waiting("delivery of all messages", f"vw{self._vw}"):
            self._sends.flush()
        self._sends.check(self._lost, "the last messages")

    # receiving

    def receive(self, kind: MessageKind, minibatch: int, peer: int, names: tuple[str, ...]) -> dict[str, Any]:
        """See `Mailbox.receive`.

        Raises:
            RunError: HP530 something else came than the schedule says.
            PeerLostError: HP531 the connection to the peer broke.
        """
        what = arrow(kind, minibatch, "<", peer)
        self._sends.check(self._lost, what)
        with self._activity.waiting(what, f"vw{self._vw}/stage{peer}"):
            try:
                return self._receive(kind, minibatch, peer, names)
            except RuntimeError as error:
                raise self._lost(what, peer, error) from error

    def _receive(self, kind: MessageKind, minibatch: int, peer: int, names: tuple[str, ...]) -> dict[str, Any]:
        header = self._take(torch.empty(_HEADER_FIELDS, dtype=torch.int64, device=self._device), peer, _tag(kind, 0))
        magic, kind_index, got_minibatch, source, sent_us, changed, layout_bytes, payload_bytes = header.tolist()
        expected = arrow(kind, minibatch, "<", peer)
        if magic != _MAGIC or not 0 <= kind_index < len(_KINDS):
            raise self._mismatch(expected, f"{header.tolist()}, which is no header of ours", peer)
        if (_KINDS[kind_index], got_minibatch, source) != (kind, minibatch, peer):
            raise self._mismatch(expected, arrow(_KINDS[kind_index], got_minibatch, "<", source), peer)
        if changed:
            raw = self._take(torch.empty(layout_bytes, dtype=torch.uint8, device=self._device), peer, _tag(kind, 1))
            self._known_layout[kind, peer] = msgpack.unpackb(raw.cpu().numpy().tobytes())
        layout = self._known_layout.get((kind, peer))
        if layout is None:
            raise self._mismatch(expected, "the first message of this channel without a layout", peer)
        got_names = tuple(entry[0] for entry in layout)
        if got_names != names:
            raise self._mismatch(f"{expected} with {_list(names)}", f"{expected} with {_list(got_names)}", peer)
        if payload_bytes != sum(_payload_bytes(entry) for entry in layout):
            raise self._mismatch(
                f"{expected} with {sum(_payload_bytes(e) for e in layout)} bytes", f"{payload_bytes} bytes", peer
            )
        values = {entry[0]: self._value(entry, kind, peer) for entry in layout}
        if self._transfer_ms is not None:
            due = sent_us / 1e6 + self._transfer_ms(peer, payload_bytes) / 1e3
            self._activity.pace(due - time.time())
        return values

    def _value(self, entry: list[Any], kind: MessageKind, peer: int) -> Any:
        if len(entry) == 2:
            return entry[1]
        _, dtype, shape = entry
        tensor = torch.empty(tuple(shape), dtype=dtype_of(dtype), device=self._device)
        if tensor.numel():
            self._take(tensor.view(-1).view(torch.uint8), peer, _tag(kind, 2))
        return tensor

    def _take(self, buffer: Tensor, peer: int, tag: int) -> Tensor:
        work = dist.irecv(buffer, peer, group=self._group, tag=tag)
        if work is not None:
            work.wait()
        return buffer

    # errors

    def _mismatch(self, expected: str, came: str, peer: int) -> RunError:
        return RunError(
            "HP530",
            f"expected {expected} from stage {peer}, but {came} came",
            where=f"vw{self._vw}/stage{self._stage}",
            hint="the stages do not run the same schedule: compile again, give every process the same folder",
        )

    def _lost(self, what: str, peer: int, error: BaseException) -> PeerLostError:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        return PeerLostError(
            "HP531",
            f"lost the connection to stage {peer} at {what}: {first_line}",
            where=f"vw{self._vw}/stage{self._stage}",
            hint=f"see the log of vw{self._vw}/stage{peer}",
        )


class _Sends:
    """Messages under way: holds their tensors until they are taken, and notices those that never will be.

    Gloo's handles say that they are done only to whoever waits on them, hence the thread; NCCL's can be asked.
    """

    def __init__(self, *, threaded: bool) -> None:
        self._threaded = threaded
        self._queue: queue.SimpleQueue[tuple[Any, Tensor, int] | threading.Event] = queue.SimpleQueue()
        self._held: deque[tuple[Any, Tensor, int]] = deque()
        self._failed: tuple[int, BaseException] | None = None
        if threaded:
            threading.Thread(target=self._reap, name="sends", daemon=True).start()

    def add(self, work: Any, tensor: Tensor, peer: int) -> None:
        if work is None:
            return
        if self._threaded:
            self._queue.put((work, tensor, peer))
            return
        while self._held and self._held[0][0].is_completed():
            self._held.popleft()
        self._held.append((work, tensor, peer))

    def mark(self) -> Callable[[], None]:
        """Returns what waits, when called, until all that was added up to now has been taken."""
        if self._threaded:
            reached = threading.Event()
            self._queue.put(reached)

            def wait() -> None:
                reached.wait()

            return wait
        works = [work for work, _, _ in self._held]

        def poll() -> None:
            while not all(work.is_completed() for work in works):  # wait() would hold up the stream, not this thread
                time.sleep(_POLL_S)

        return poll

    def flush(self) -> None:
        if self._threaded:
            self.mark()()
        while self._held:
            self._held.popleft()[0].wait()

    def check(self, lost: Callable[[str, int, BaseException], PeerLostError], what: str) -> None:
        if self._failed is not None:
            peer, error = self._failed
            raise lost(what, peer, error) from error

    def _reap(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            work, _, peer = item
            try:
                work.wait()
            except RuntimeError as error:
                self._failed = self._failed or (peer, error)
            del work, item


def _tag(kind: MessageKind, part: int) -> int:
    """``part``: 0 header, 1 layout, 2 payload."""
    return part * len(_KINDS) + _KINDS.index(kind)


def _describe(name: str, value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [name, dtype_name(value.dtype), list(value.shape)]
    if value is None or isinstance(value, (bool, int, float)):
        return [name, value]
    raise TypeError(f"'{name}' is {type(value).__name__}; a message holds tensors, None, int, float and bool")


def _payload_bytes(entry: list[Any]) -> int:
    if len(entry) == 2:
        return 0
    count = 1
    for size in entry[2]:
        count *= size
    return count * dtype_of(entry[1]).itemsize


def _list(names: tuple[str, ...]) -> str:
    return "[" + ", ".join(names) + "]"
