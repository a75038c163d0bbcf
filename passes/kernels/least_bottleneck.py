"""The first sweep over closed sets, from the last stage to the first: the least bottleneck.

A *tail* is the rest of a pipeline: the devices it uses and the class of its first stage (`device_classes.Tails`); l is
the link over which that stage receives, I the closed set of nodes before it. With t' what follows t::

    V[t, l, I] = min over J > I, t' of  max( T_a(J \\ I, l, link(a, class of t')),  R[t, link(a, class of t'), J] )
    R[t, l, J] = min over t' that can follow t over l of V[t', l, J]

T_a is the stage's time on a device of class a, infinite where memory is exceeded. Only R is stored, and only where
prices of devices (`work_bound`) leave a plan within the cap possible: an interval of the sets, which are sorted by
worth. From each I only those J are looked at where some tail was found to begin. `least_communication` is a second
sweep of the same shape.

Where a device has no room for a stage, the stage may *recompute*: it takes its forward time once more and keeps what
autograd saves of one minibatch instead of w. Never faster, that is tried only where the plain stage does not fit, so
the search stays exact.
"""

from __future__ import annotations

import numpy as np

from hetpipe_compiler.ir.blocks import FloatArray
from hetpipe_compiler.passes.kernels.arrays import BoolArray, Stages, Sweep, TailArrays
from hetpipe_compiler.passes.kernels.compiled import compiled
from hetpipe_compiler.passes.kernels.stages import mark_usable, on_class, stages_from


@compiled
def _least_time(
    tail: int,
    slot: int,
    kept: int,
    tails: TailArrays,
    stages: Stages,
    available: int,
    rest: FloatArray,
    cap: float,
    overflow: bool,
    best: FloatArray,
) -> None:
    """``best[l]`` = V[tail, l, the set where ``stages`` begin], for the links whose ``best`` is not -infinite."""
    low, size = tails.rest_low[tail], tails.rest_high[tail] - tails.rest_low[tail]
    links = best.shape[0]
    for into in range(links):
        if best[into] == -np.inf:
            continue
        least = np.inf
        for out in range(links):
            base = tails.rest_at[tail] + out * size
            times, again = stages.stage_ms[into * links + out], stages.again_ms[into * links + out]
            for s in range(kept):
                at = stages.end[s] - low
                if stages.slots[s] <= slot or at < 0 or at >= size:
                    continue
                mine = times[s] if slot < stages.plain[s] else again[s]
                if overflow:
                    mine = float(stages.total[slot, s] - available)
                least = min(least, max(mine, rest[base + at]))
        best[into] = least if least <= cap else np.inf


@compiled
def open_links(best: FloatArray, start: int, receives_over: BoolArray) -> None:
    """Reset ``best``: infinite for the links over which a stage may receive, else closed (-infinite)."""
    for into in range(best.shape[0]):
        best[into] = np.inf if (receives_over[into] if start > 0 else into == 0) else -np.inf


@compiled
def least_bottleneck(sweep: Sweep, rest: FloatArray, cap: float, budget: int) -> tuple[float, int]:
    """The least bottleneck of a plan within ``cap``, infinite if there is none; and the work done.

    Args:
        rest: R, filled with infinity.
        budget: Gives up (work > budget, the result means nothing) when it is spent.
    """
    sets, nodes, tails, devices, memory, reached, stages, exact_stages, overlapped, overflow = sweep
    last = sets.held.shape[1] - 1
    usable = np.zeros(devices.available.shape[0], dtype=np.bool_)
    best = np.empty(devices.bytes_per_ms.shape[0])
    most_available = 1 << 62 if overflow else int(devices.available.max())
    limit = np.inf if overflow else cap
    answer, work, known = np.inf, 0, 1
    reached.ends[0] = last
    for t in range(tails.stages.shape[0]):
        if tails.stages[t] == 1:
            rest[tails.rest_at[t] + last - tails.rest_low[t]] = -np.inf
    for start in range(last - 1, -1, -1):
        if not tails.begins[start]:
            continue
        window, useful = mark_usable(start, tails, usable), False
        count, steps = stages_from(start, window, known, sets, nodes, memory, most_available, usable, limit, reached)
        work += steps
        if count == 0:
            continue
        for a in range(usable.shape[0]):
            if not usable[a]:
                continue
            kept = on_class(a, start, count, sets, devices, memory, limit, overlapped, overflow, reached, stages)
            if kept == 0:
                continue
            for t in tails.by_class[tails.class_starts[a] : tails.class_starts[a + 1]]:
                if not tails.low[t] <= start < tails.high[t]:
                    continue
                length = tails.stages[t]
                slot = memory.slot_of[length - 1] if start > 0 or length == 1 else memory.first_slot
                open_links(best, start, devices.receives_over[a])
                _least_time(t, slot, kept, tails, stages, devices.available[a], rest, cap, overflow, best)
                work += kept
                if start == 0:
                    if exact_stages in (0, length):
                        answer = min(answer, best[0])
                    continue
                for b in range(usable.shape[0]):
                    longer = tails.longer[t, b]
                    if longer < 0:
                        continue
                    link = devices.link_between[b, a]
                    low, high = tails.rest_low[longer], tails.rest_high[longer]
                    if best[link] < np.inf and low <= start < high:
                        at = tails.rest_at[longer] + link * (high - low) + start - low
                        rest[at] = min(rest[at], best[link])
                        useful = True
        if useful:
            reached.ends[known] = start
            known += 1
        if work > budget:
            break
    return answer, work


@compiled
def first_stage_within(
    start: int, tail: int, into: int, sweep: Sweep, rest: FloatArray, bound: float
) -> tuple[int, int]:
    """After `least_bottleneck`: where a first stage of ``tail`` can end and the link after it, all within ``bound``.

    Of several the one that moves least, (-1, -1) if there is none.
    """
    sets, nodes, tails, devices, memory, reached, stages, _, overlapped, _ = sweep
    a, length = tails.first_class[tail], tails.stages[tail]
    usable = np.zeros(devices.available.shape[0], dtype=np.bool_)
    usable[a] = True
    window = tails.rest_low[tail], min(tails.rest_high[tail], tails.beyond[start])
    known = max(0, window[1] - max(start + 1, window[0]))
    for at in range(known):
        reached.ends[at] = window[1] - 1 - at
    most_available = int(devices.available.max())
    count, _ = stages_from(start, window, known, sets, nodes, memory, most_available, usable, bound, reached)
    kept = on_class(a, start, count, sets, devices, memory, bound, overlapped, False, reached, stages)
    slot = memory.slot_of[length - 1] if start > 0 or length == 1 else memory.first_slot
    low, size = tails.rest_low[tail], tails.rest_high[tail] - tails.rest_low[tail]
    links = devices.bytes_per_ms.shape[0]
    end, after, least = -1, -1, np.inf
    for out in range(links):
        for s in range(kept):
            at = stages.end[s] - low
            if stages.slots[s] <= slot or at < 0 or at >= size:
                continue
            pair = into * links + out
            mine = stages.stage_ms[pair, s] if slot < stages.plain[s] else stages.again_ms[pair, s]
            fits = mine <= bound and rest[tails.rest_at[tail] + out * size + at] <= bound
            if fits and stages.moved_ms[pair, s] < least:
                end, after, least = stages.end[s], out, stages.moved_ms[pair, s]
    return end, after
