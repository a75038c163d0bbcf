"""What the two processes of `test_process_group` do: scenarios that run on both ranks, each in a group of its own."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgpack
import torch
import torch.distributed as dist

from hetpipe_compiler.runtime.channels import MessageKind
from hetpipe_compiler.runtime.transport.process_group import ProcessGroupMailbox
from hetpipe_compiler.runtime.waits import Activity

A, G = MessageKind.ACTIVATIONS, MessageKind.GRADIENTS


def every_type() -> dict[str, Any]:
    """A value of every kind that a message may hold."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 4, generator=generator)
    return {
        "float": values,
        "bf16": values.bfloat16(),
        "double": values.double(),
        "mask": values > 0,
        "ids": torch.arange(5),
        "byte": torch.arange(3, dtype=torch.uint8),
        "transposed": values.t(),
        "zero_dim": torch.tensor(2.5),
        "empty": torch.empty(0, 7),
        "none": None,
        "size": 7,
        "scale": 0.5,
        "flag": True,
    }


def types(rank: int) -> Any:
    box = ProcessGroupMailbox(vw=0, stage=rank)
    if rank == 0:
        box.send(A, 1, 1, every_type())
        box.flush()
        return None
    return box.receive(A, 1, 0, tuple(every_type()))


def changing(rank: int) -> Any:
    """Shapes, dtypes, scalars and None change from message to message; the layout travels only when it does."""
    messages: list[dict[str, Any]] = [
        {"x": torch.ones(4, 2), "n": 4},
        {"x": torch.ones(4, 2) * 2, "n": 4},
        {"x": torch.ones(3, 2), "n": 3},
        {"x": None, "n": 3},
        {"x": torch.ones(3, 2).bfloat16(), "n": True},
        {"x": torch.ones(3, 2).bfloat16(), "n": 1},
    ]
    box = ProcessGroupMailbox(vw=0, stage=rank)
    for p, message in enumerate(messages, start=1):
        if rank == 0:
            box.send(A, p, 1, message)
        else:
            got = box.receive(A, p, 0, ("x", "n"))
            want = message["x"]
            same = got["x"] is None if want is None else got["x"].dtype == want.dtype and torch.equal(got["x"], want)
            assert same, (p, got)
            assert got["n"] == message["n"], (p, got)
            assert type(got["n"]) is type(message["n"]), (p, got)
    box.flush()
    return len(messages)


def both_send_first(rank: int) -> Any:
    """16 MB each way, both send before they receive; the sender's tensor is dropped at once."""
    box = ProcessGroupMailbox(vw=0, stage=rank)
    peer, out, back = 1 - rank, (A, G)[rank], (G, A)[rank]
    for p in range(1, 4):
        box.send(out, p, peer, {"x": torch.full((4_000_000,), float(10 * rank + p))})
    sums = [float(box.receive(back, p, peer, ("x",))["x"].mean()) for p in range(1, 4)]
    box.flush()
    return sums


def wrong(send: tuple[MessageKind, int, dict[str, Any]], want: tuple[int, tuple[str, ...]]) -> Callable[[int], Any]:
    def scenario(rank: int) -> Any:
        box = ProcessGroupMailbox(vw=3, stage=rank)
        if rank == 0:
            box.send(send[0], send[1], 1, send[2])
            return None
        return box.receive(A, want[0], 0, want[1])

    return scenario


def unannounced(rank: int) -> Any:
    """The second message has another shape, and its sender forgets to say so."""
    box = ProcessGroupMailbox(vw=0, stage=rank)
    if rank == 0:
        box.send(A, 1, 1, {"x": torch.ones(4)})
        layout = dict(box._sent_layout)
        box.send(A, 2, 1, {"x": torch.ones(4)})
        box._sent_layout = {key: _longer(value) for key, value in layout.items()}
        box.send(A, 3, 1, {"x": torch.ones(5)})
        return None
    return [box.receive(A, p, 0, ("x",)) for p in (1, 2, 3)]


def _longer(layout: bytes) -> bytes:
    ((name, dtype, shape),) = msgpack.unpackb(layout)
    return bytes(msgpack.packb([[name, dtype, [shape[0] + 1]]]))


def garbage(rank: int) -> Any:
    if rank == 0:
        return dist.isend(torch.arange(8), 1, tag=0).wait()
    return ProcessGroupMailbox(vw=0, stage=1).receive(A, 1, 0, ("x",))


def emulated(rank: int) -> Any:
    """1000 bytes at 1 MB/s with 300 ms on top."""
    activity = Activity()
    box = ProcessGroupMailbox(
        vw=0, stage=rank, activity=activity, transfer_ms=lambda peer, size: 300 + size / 1000 + 1000 * peer
    )
    dist.barrier()
    start = time.monotonic()
    if rank == 0:
        box.send(A, 1, 1, {"x": torch.zeros(250)})
        box.flush()
        return None
    box.receive(A, 1, 0, ("x",))
    return time.monotonic() - start, activity.waited_s


def lost(rank: int) -> Any:
    box = ProcessGroupMailbox(vw=0, stage=rank)
    if rank == 0:
        os._exit(0)
    return box.receive(G, 4, 0, ("x",))


def held_back(rank: int) -> Any:
    """A sender that may be two minibatches ahead; the receiver says how far it came before and after taking one."""
    box = ProcessGroupMailbox(vw=0, stage=rank)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        for p in range(1, 6):
            box.send(A, p, 1, {"x": torch.ones(4)})
            store.set("sent", str(p))
            store.set(f"sent {p}", "")
            box.hold_back(2)
        box.flush()
        return None
    seen = []
    for p in range(1, 6):
        store.wait([f"sent {min(p + 2, 5)}"])
        time.sleep(0.1)
        seen.append(int(store.get("sent")))
        box.receive(A, p, 0, ("x",))
    return seen


SCENARIOS: dict[str, Callable[[int], Any]] = {
    "types": types,
    "changing": changing,
    "both_send_first": both_send_first,
    "wrong_minibatch": wrong((A, 2, {"x": torch.ones(2)}), (1, ("x",))),
    "wrong_names": wrong((A, 1, {"x": torch.ones(2), "z": 1}), (1, ("x", "y"))),
    "unannounced": unannounced,
    "garbage": garbage,
    "held_back": held_back,
    "emulated": emulated,
    "lost": lost,
}


def main(rank: int, folder: Path) -> None:
    """Run all scenarios as one rank; results or errors go to files."""
    torch.set_num_threads(1)
    # A file, no port: one that was free a moment ago may be another test's by now.
    store = dist.FileStore(str(folder / "store"), 2)
    for name, scenario in SCENARIOS.items():
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=2, timeout=timedelta(seconds=30)
        )
        try:
            result = scenario(rank)
        except Exception as error:
            result = {"type": type(error).__name__, "code": getattr(error, "code", None), "text": str(error)}
        torch.save(result, folder / f"{name}.{rank}.pt")
        if name != "lost":
            dist.barrier()
            dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
