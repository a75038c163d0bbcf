"""Measure a link: messages of growing size to and fro between two processes, and the latency and bandwidth that fit.

The messages go through torch.distributed with Gloo, as the runtime's do between CPUs. Both processes may be here (a
node's own link), or one on each of two nodes. Of many messages of a size the lower quartile counts: what is above it is
other programs' work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from hetpipe_compiler.errors import ClusterError
from hetpipe_compiler.profiling.rendezvous import meet

#: Bytes of the messages, 1 KiB to 64 MiB.
SIZES = tuple(1 << power for power in range(10, 27, 2))
_WAIT = timedelta(seconds=60)


@dataclass(frozen=True)
class LinkFit:
    """What was measured between two processes.

    Attributes:
        latency_us, bandwidth_gb_s: Of the fitted line: milliseconds = latency + bytes / bandwidth.
        bytes, quartile_ms: The points, one way.
        error: Largest relative distance of a point from the line.
    """

    latency_us: float
    bandwidth_gb_s: float
    bytes: tuple[int, ...]
    quartile_ms: tuple[float, ...]
    error: float

    def to_yaml(self) -> str:
        """For a cluster file, as ``link:`` or ``network:``."""
        return f"{{bandwidth_gb_s: {self.bandwidth_gb_s:.3g}, latency_us: {self.latency_us:.3g}}}"


def fit_link(n_bytes: Sequence[int], quartile_ms: Sequence[float]) -> LinkFit:
    """Least squares of the relative distances, so that small messages count as much as large ones."""
    sizes, times = np.asarray(n_bytes, dtype=float), np.asarray(quartile_ms, dtype=float)
    rows = np.stack([1.0 / times, sizes / times], axis=1)
    (latency_ms, ms_per_byte), *_ = np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)
    if latency_ms < 0:
        latency_ms, ms_per_byte = 0.0, 1.0 / np.mean(sizes / times)
    ms_per_byte = max(float(ms_per_byte), 1e-15)
    predicted = latency_ms + sizes * ms_per_byte
    return LinkFit(
        latency_us=float(latency_ms) * 1e3,
        bandwidth_gb_s=1.0 / (ms_per_byte * 1e6),
        bytes=tuple(int(size) for size in n_bytes),
        quartile_ms=tuple(float(t) for t in quartile_ms),
        error=float(np.max(np.abs(predicted - times) / times)),
    )


def measure_local(sizes: Sequence[int] = SIZES) -> LinkFit:
    """Between two processes of this machine. Raises `ClusterError` HP237."""
    context = mp.get_context("spawn")
    answer = context.SimpleQueue()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(target=_local_end, args=(rank, store.port, tuple(sizes), answer), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes) or answer.empty():
        raise ClusterError("HP237", "the two processes could not talk to each other", where="--links", hint="see above")
    times: list[float] = answer.get()
    return fit_link(sizes, times)


def measure_between(
    rank: int, coordinator: str, sizes: Sequence[int] = SIZES, *, on_wait: Callable[[str], object] = lambda _: None
) -> LinkFit | None:
    """This process's end of a link between two nodes: rank 0 listens at ``coordinator`` and gets the result.

    Raises:
        ClusterError: HP237, the other end did not come, or left.
    """
    try:
        store = meet(rank, coordinator, _WAIT.total_seconds(), on_wait)
        times = _ping_pong(rank, store, sizes)
    except (RuntimeError, TimeoutError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ClusterError(
            "HP237",
            f"the connection with rank {1 - rank} was lost: {reason}",
            where=f"--coordinator {coordinator}",
            hint="start both ranks again; rank 0 and rank 1 once each",
        ) from error
    return fit_link(sizes, times) if rank == 0 else None


def _local_end(rank: int, port: int, sizes: tuple[int, ...], answer: mp.SimpleQueue[list[float]]) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False)
    times = _ping_pong(rank, store, sizes)
    if rank == 0:
        answer.put(times)


def _ping_pong(rank: int, store: Store, sizes: Sequence[int]) -> list[float]:
    """Milliseconds one way for each size."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=_WAIT)
    try:
        return [_quartile_ms(rank, size) for size in sizes]
    finally:
        dist.destroy_process_group()


def _quartile_ms(rank: int, size: int) -> float:
    buffer = torch.zeros(size, dtype=torch.uint8)
    runs = max(5, min(100, (64 << 20) // size))
    samples = []
    for run in range(runs + 3):
        begin = time.perf_counter()
        if rank == 0:
            dist.send(buffer, 1)
            dist.recv(buffer, 1)
        else:
            dist.recv(buffer, 0)
            dist.send(buffer, 0)
        if run >= 3:
            samples.append((time.perf_counter() - begin) * 1e3 / 2)
    return statistics.quantiles(samples, n=4)[0]
