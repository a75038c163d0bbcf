"""The second sweep over closed sets: of all plans within a bottleneck, the least (communication, memory).

Its recurrence is that of `least_bottleneck`, with sums in place of the largest.
"""

from __future__ import annotations

import numpy as np

from hetpipe_compiler.passes.kernels.arrays import Choices, Stages, Sweep, TailArrays, new_choices
from hetpipe_compiler.passes.kernels.compiled import compiled
from hetpipe_compiler.passes.kernels.least_bottleneck import open_links
from hetpipe_compiler.passes.kernels.stages import mark_usable, on_class, stages_from


@compiled
def _least_moved(
    tail: int,
    slot: int,
    kept: int,
    tails: TailArrays,
    stages: Stages,
    available: int,
    rest: Choices,
    bound: float,
    overflow: bool,
    best: Choices,
) -> None:
    """``best[l]``: least (communication, memory) of the tail over link l, for links whose ``moved_ms`` is infinite."""
    low, size = tails.rest_low[tail], tails.rest_high[tail] - tails.rest_low[tail]
    links = best.moved_ms.shape[0]
    for into in range(links):
        least, least_held = best.moved_ms[into], best.memory[into]
        if least == -np.inf:
            continue
        for out in range(links):
            base = tails.rest_at[tail] + out * size
            times, again = stages.stage_ms[into * links + out], stages.again_ms[into * links + out]
            transfers = stages.moved_ms[into * links + out]
            for s in range(kept):
                at = stages.end[s] - low
                if stages.slots[s] <= slot or at < 0 or at >= size:
                    continue
                moved = transfers[s] + rest.moved_ms[base + at]
                if moved > least or moved == np.inf:
                    continue
                mine = times[s] if slot < stages.plain[s] else again[s]
                if (float(stages.total[slot, s] - available) if overflow else mine) > bound:
                    continue
                held = stages.total[slot, s] + rest.memory[base + at]
                if moved < least or held < least_held:
                    least, least_held = moved, held
                    best.end[into], best.out[into] = stages.end[s], out
        best.moved_ms[into], best.memory[into] = least, least_held


@compiled
def least_communication(
    sweep: Sweep, rest: Choices, bound: float, budget: int
) -> tuple[int, int, int, float, int, int]:
    """Among plans whose every stage's objective is at most ``bound``: least (communication ms, memory, order).

    ``rest.moved_ms`` is infinite on entry. Returns the tail that is the whole plan, where its first stage ends, the
    link that follows, its communication and memory, and the work done (more than ``budget``: given up). The rest of the
    plan stands in ``rest``.
    """
    sets, nodes, tails, devices, memory, reached, stages, exact_stages, overlapped, overflow = sweep
    last = sets.held.shape[1] - 1
    usable = np.zeros(devices.available.shape[0], dtype=np.bool_)
    best = new_choices(devices.bytes_per_ms.shape[0])
    most_available = 1 << 62 if overflow else int(devices.available.max())
    limit = np.inf if overflow else bound
    root, root_end, root_out, root_moved, root_memory, work, known = -1, -1, -1, np.inf, 0, 0, 1
    reached.ends[0] = last
    for t in range(tails.stages.shape[0]):
        if tails.stages[t] == 1:
            at = tails.rest_at[t] + last - tails.rest_low[t]
            rest.moved_ms[at], rest.memory[at], rest.following[at] = 0.0, 0, -1
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
                open_links(best.moved_ms, start, devices.receives_over[a])
                best.memory[:] = 1 << 62
                _least_moved(t, slot, kept, tails, stages, devices.available[a], rest, bound, overflow, best)
                work += kept
                if start == 0:
                    moved, held = best.moved_ms[0], best.memory[0]
                    if exact_stages in (0, length) and (
                        moved < root_moved or (moved == root_moved and moved < np.inf and held < root_memory)
                    ):
                        root, root_end, root_out, root_moved, root_memory = t, best.end[0], best.out[0], moved, held
                    continue
                for b in range(usable.shape[0]):
                    longer = tails.longer[t, b]
                    if longer < 0:
                        continue
                    link = devices.link_between[b, a]
                    low, high = tails.rest_low[longer], tails.rest_high[longer]
                    if best.moved_ms[link] == np.inf or not low <= start < high:
                        continue
                    at = tails.rest_at[longer] + link * (high - low) + start - low
                    if best.moved_ms[link] < rest.moved_ms[at] or (
                        best.moved_ms[link] == rest.moved_ms[at] and best.memory[link] < rest.memory[at]
                    ):
                        rest.moved_ms[at], rest.memory[at] = best.moved_ms[link], best.memory[link]
                        rest.following[at], rest.end[at], rest.out[at] = t, best.end[link], best.out[link]
                        useful = True
        if useful:
            reached.ends[known] = start
            known += 1
        if work > budget:
            break
    return root, root_end, root_out, root_moved, root_memory, work
