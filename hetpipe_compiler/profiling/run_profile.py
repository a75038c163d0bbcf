"""Measure every distinct operator of a model, and keep what was measured when interrupted."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hetpipe_compiler.errors import ClusterError
from hetpipe_compiler.frontend.capture import capture
from hetpipe_compiler.frontend.load import LoadedWorkload
from hetpipe_compiler.ir.cluster import Cluster, Device, DeviceKind, Link, Node
from hetpipe_compiler.ir.costs import NodeCost
from hetpipe_compiler.ir.profile_file import Operator, Profile, resumed
from hetpipe_compiler.passes.annotate_cost import NodeCall, count_calls
from hetpipe_compiler.passes.base import Compilation
from hetpipe_compiler.passes.normalize import Normalize
from hetpipe_compiler.profiling.measure import Effort, bytes_needed, measure_call

#: Seconds between two saves.
_SAVE_EVERY_S = 2.0


@dataclass(frozen=True)
class ProfileOptions:
    """How to measure.

    Attributes:
        kind: Name of the device kind in cluster files.
        device: ``cpu``, ``cuda`` or ``cuda:1``.
        threads: CPU threads.
        again: Whether to measure what the file has already.
        on_progress: Told (done, all, key) before each operator.
    """

    kind: str
    device: str = "cpu"
    threads: int = 1
    effort: Effort = field(default_factory=Effort)
    again: bool = False
    on_progress: Callable[[int, int, str], Any] = lambda _done, _all, _key: None


def calls_of(loaded: LoadedWorkload, opaque: Sequence[str] = ()) -> tuple[dict[str, NodeCost], dict[str, NodeCall]]:
    """Costs of the nodes, and one call for each distinct key, of the graph that hetpipe-compile would cut.

    Submodules that are kept whole (``opaque``) have no call: made-up arguments would say nothing of what depends on
    values.
    """
    compilation = Compilation(_any_cluster())
    compilation.captured = capture(loaded, opaque=opaque)
    Normalize().run(compilation)
    return count_calls(compilation.captured)


def _any_cluster() -> Cluster:
    """`Compilation` wants a cluster; what is looked at here does not depend on it."""
    link = Link("none", 1.0, 0.0)
    kind = DeviceKind("any", 1, 1.0, None, None, None, 1.0, 1.0, 1.0, 0.0, 0, "")
    return Cluster("any", (Node("n0", (Device("n0:0", "n0", kind),), link),), link)


def profile_calls(calls: Mapping[str, NodeCall], out: Path, options: ProfileOptions) -> Profile:
    """Measure ``calls`` and write ``out``, adding to a profile that is there.

    Interrupted, the file holds what was measured; called again, it goes on there.

    Raises:
        ClusterError: HP230-HP232 the file that is there; HP233 no such device here.
        ArtifactError: HP411 ``out`` cannot be written.
    """
    device = usable_device(options.device)
    with cpu_threads(options.threads):
        threads = torch.get_num_threads() if device.type == "cpu" else 0
        fresh = Profile(
            kind=options.kind,
            device=hardware_name(device),
            backend=device.type,
            torch=torch.__version__.split("+")[0],
            threads=threads,
        )
        profile = resumed(out, fresh)
        wanted = [key for key in calls if options.again or key not in profile.operators]
        saved_at = time.monotonic()
        try:
            for done, key in enumerate(wanted):
                options.on_progress(done, len(wanted), key)
                profile.operators[key] = _measured(calls[key], device, options.effort)
                if time.monotonic() - saved_at > _SAVE_EVERY_S:
                    profile.save(out)
                    saved_at = time.monotonic()
            options.on_progress(len(wanted), len(wanted), "")
        finally:
            profile.save(out)
    return profile


def _measured(call: NodeCall, device: torch.device, effort: Effort) -> Operator:
    needed, free = bytes_needed(call), free_bytes(device)
    if needed > free:
        return Operator(skipped=f"needs {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free")
    try:
        times = measure_call(call, device, effort)
    except torch.OutOfMemoryError:
        return Operator(skipped="does not fit in memory")
    except Exception as error:
        # Made-up arguments that an operator refuses are no reason to lose the others.
        lines = str(error).splitlines() or [""]
        return Operator(skipped=f"{type(error).__name__}: {lines[0][:200]}")
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return Operator(
        forward_ms=times.forward.median_ms,
        backward_ms=times.backward.median_ms,
        forward_spread=round(times.forward.spread, 4),
        backward_spread=round(times.backward.spread, 4),
        saved_bytes=times.saved_bytes,
        peak_bytes=times.peak_bytes,
        runs=times.runs,
    )


def usable_device(name: str) -> torch.device:
    """The device called ``name``. Raises `ClusterError` HP233 if this machine or this torch has none."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    here = ["cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))]
    if device is None or device.type not in ("cpu", "cuda") or (device.type == "cuda" and not _has(device)):
        raise ClusterError("HP233", f"no device '{name}' here", where="--device", hint=f"one of {', '.join(here)}")
    return device


def _has(device: torch.device) -> bool:
    return torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Compute with ``count`` CPU threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def hardware_name(device: torch.device) -> str:
    """What the hardware calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken; where the system does not tell, more than any operator needs."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        lines = []
    kib = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return next(kib, 1 << 50) * 1024


def total_bytes(device: torch.device) -> int:
    """All the device's memory; 0 where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")), 0)
