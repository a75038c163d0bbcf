"""Time one call of an operator, forward and backward, as it runs in training.

1. Arguments are made from their metadata: random numbers for floats; for integers 0 and 1, but row numbers of
   embeddings from the whole table.
2. Several sets of arguments take turns, so that together they outgrow the caches: in a model, weights and most
   activations come from memory. So do, on a CPU, the results: the next run writes to other addresses.
3. Forward runs with autograd recording. Backward is the call's own gradient, less what starting autograd's engine
   costs, which a stage pays once and not for every operator.
4. After a warm-up, runs repeat until they add up to a given time. The median counts; the spread is half the distance
   between the quartiles, relative to the median.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hetpipe_compiler.frontend.regions import enter
from hetpipe_compiler.ir.storage import storage_of
from hetpipe_compiler.passes.annotate_cost import NodeCall

#: Bytes that the sets of arguments are to reach together: more than any last-level cache share of a core.
_FOOTPRINT_BYTES = 96 << 20
_MAX_SETS = 8


@dataclass(frozen=True)
class Effort:
    """How long to measure a call: up to ``max_runs``, or from ``min_runs`` on until they add up to ``seconds``."""

    warmup: int = 2
    min_runs: int = 5
    max_runs: int = 200
    seconds: float = 0.1


@dataclass(frozen=True)
class Times:
    """Median milliseconds of runs, and their relative spread."""

    median_ms: float
    spread: float

    @classmethod
    def of(cls, samples_ms: list[float]) -> Times:
        """The summary of at least one sample."""
        median = statistics.median(samples_ms)
        if len(samples_ms) < 2 or median <= 0:
            return cls(median, 0.0)
        low, _, high = statistics.quantiles(samples_ms, n=4)
        return cls(median, (high - low) / 2 / median)


@dataclass(frozen=True)
class CallTimes:
    """What `measure_call` found.

    Attributes:
        saved_bytes: Kept from forward to backward, parameters excluded.
        peak_bytes: Most memory in use at once beyond the arguments; None on a CPU, which does not tell.
    """

    forward: Times
    backward: Times
    saved_bytes: int
    peak_bytes: int | None
    runs: int


def measure_call(call: NodeCall, device: torch.device, effort: Effort) -> CallTimes:
    """Time ``call`` on ``device``.

    Raises:
        Exception: Whatever the operator raises on made-up arguments, ``torch.OutOfMemoryError`` included.
    """
    sets = _argument_sets(call, device)
    written = _is_mutable(call)
    take_turns = itertools.cycle(sets)
    kept: deque[Any] = deque()
    forward_ms: list[float] = []
    backward_ms: list[float] = []
    saved_bytes = 0
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for run in range(effort.warmup + effort.max_runs):
            one = _run_once(call, next(take_turns), device, written, count_saved=run == 0)
            if run == 0:
                saved_bytes = one.saved_bytes
                kept = deque(maxlen=_results_kept(one.results, device, len(sets)))
            kept.append(one.results)
            if run >= effort.warmup:
                forward_ms.append(one.forward_ms)
                backward_ms.append(one.backward_ms)
                enough = sum(forward_ms) + sum(backward_ms) >= effort.seconds * 1e3
                if len(forward_ms) >= effort.min_runs and enough:
                    break
    finally:
        if collecting:
            gc.enable()
    peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None
    return CallTimes(Times.of(forward_ms), Times.of(backward_ms), saved_bytes, peak, len(forward_ms))


@dataclass(frozen=True)
class _Run:
    """One run; ``results``: what the forward made, the gradients of that, and those of the arguments."""

    forward_ms: float
    backward_ms: float
    saved_bytes: int
    results: tuple[Any, ...]


def _run_once(call: NodeCall, leaves: list[Any], device: torch.device, written: bool, *, count_saved: bool) -> _Run:
    given = [t.clone() if written and isinstance(t, torch.Tensor) else t for t in leaves]
    args, kwargs = pytree.tree_unflatten(given, call.spec)
    target: Any = call.target
    saved: dict[int, int] = {}
    own = {storage_of(t) for t in leaves if isinstance(t, torch.nn.Parameter)}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[storage_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.enable_grad(), enter(call.contexts):
        if count_saved:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                out = target(*args, **kwargs)
            forward_ms = 0.0
        else:
            clock = _clock(device)
            begin = clock()
            out = target(*args, **kwargs)
            forward_ms = clock() - begin
    outs = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    wanted = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
    backward_ms = 0.0
    results: tuple[Any, ...] = (out,)
    if outs and wanted:
        gradients = [torch.ones_like(t) for t in outs]
        clock = _clock(device)
        begin = clock()
        made = torch.autograd.grad(outs, wanted, gradients, allow_unused=True)
        backward_ms = max(0.0, clock() - begin - engine_start_ms(device))
        results = (out, gradients, made)
    return _Run(forward_ms, backward_ms, sum(size for key, size in saved.items() if key not in own), results)


def _results_kept(results: tuple[Any, ...], device: torch.device, sets: int) -> int:
    """Of how many runs the results stay: as of arguments. None on a GPU, where the peak is told of one run."""
    if device.type == "cuda":
        return 0
    size = sum(t.untyped_storage().nbytes() for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor))
    return min(sets, _FOOTPRINT_BYTES // max(1, size))


def _clock(device: torch.device) -> Callable[[], float]:
    """A clock in milliseconds that waits for what the device still has to do.

    With one CPU thread it is the thread's own time, so that other programs on the machine count for nothing.
    """
    if device.type == "cuda":

        def cuda_clock() -> float:
            torch.cuda.synchronize(device)
            return time.perf_counter() * 1e3

        return cuda_clock
    if torch.get_num_threads() == 1:
        return lambda: time.thread_time() * 1e3
    return lambda: time.perf_counter() * 1e3


@cache
def engine_start_ms(device: torch.device) -> float:
    """What one call of autograd costs beside its operators: the intercept of chains of views of two lengths."""
    short, long = _view_chain_ms(device, 1), _view_chain_ms(device, 33)
    return max(0.0, short - (long - short) / 32)


def _view_chain_ms(device: torch.device, length: int) -> float:
    leaf = torch.zeros(1, device=device, requires_grad=True)
    samples = []
    for _ in range(60):
        out = leaf
        for _ in range(length):
            out = out.view(1)
        gradient = torch.ones_like(out)
        clock = _clock(device)
        begin = clock()
        torch.autograd.grad(out, leaf, gradient)
        samples.append(clock() - begin)
    return statistics.median(samples)


def bytes_needed(call: NodeCall) -> int:
    """Memory for one set of arguments, their gradients, and about as much again for what the call makes."""
    return 3 * sum(t.numel() * t.element_size() for t in call.leaves if isinstance(t, torch.Tensor))


def _argument_sets(call: NodeCall, device: torch.device) -> list[list[Any]]:
    tensors = [t for t in call.leaves if isinstance(t, torch.Tensor)]
    size = sum(t.untyped_storage().nbytes() for t in tensors)
    count = max(1, min(_MAX_SETS, _FOOTPRINT_BYTES // max(1, size)))
    return [list(_arguments(call, device)) for _ in range(count)]


def _arguments(call: NodeCall, device: torch.device) -> Iterator[Any]:
    rows = _row_limit(call)
    for leaf in call.leaves:
        if isinstance(leaf, torch.device):
            yield device
        elif not isinstance(leaf, torch.Tensor):
            yield leaf
        else:
            yield _tensor_like(leaf, device, rows)


def _tensor_like(meta: torch.Tensor, device: torch.device, rows: int) -> torch.Tensor:
    """Of the same shape, strides and dtype. Expanded dimensions stay expanded."""
    extent = 1 + sum((n - 1) * s for n, s in zip(meta.shape, meta.stride(), strict=True)) if meta.numel() else 0
    if meta.dtype.is_floating_point or meta.dtype.is_complex:
        flat = torch.rand(extent, device=device, dtype=meta.dtype) if meta.dtype.itemsize > 1 else None
        if flat is None:
            flat = torch.zeros(extent, device=device, dtype=meta.dtype)
    elif meta.dtype == torch.bool:
        flat = torch.ones(extent, device=device, dtype=torch.bool)
    else:
        flat = torch.randint(0, rows, (extent,), device=device, dtype=meta.dtype)
    made = flat.as_strided(meta.shape, meta.stride())
    if meta.requires_grad:
        return torch.nn.Parameter(made) if isinstance(meta, torch.nn.Parameter) else made.detach().requires_grad_()
    return made


def _row_limit(call: NodeCall) -> int:
    """Integers below this are valid everywhere in the call: rows of an embedding's table, else 0 and 1."""
    name = call.target._schema.name if isinstance(call.target, torch._ops.OpOverload) else ""
    tensors = [t for t in call.leaves if isinstance(t, torch.Tensor)]
    if "embedding" in name and tensors and tensors[0].dim() == 2:
        return max(1, tensors[0].shape[0])
    return 2


def _is_mutable(call: NodeCall) -> bool:
    target = call.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
