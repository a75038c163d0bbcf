"""The kernel of the partition search: one sweep over closed sets, from the last stage to the first.

A *tail* is the rest of a pipeline: the devices it uses and the class of its first stage (`device_classes.Tails`); l is
the link over which that stage receives, I the closed set of nodes before it. With t' what follows t::

    V[t, l, I] = min over J > I, t' of  max( T_a(J \\ I, l, link(a, class of t')),  R[t, link(a, class of t'), J] )
    R[t, l, J] = min over t' that can follow t over l of V[t', l, J]

T_a is the stage's time on a device of class a, infinite where memory is exceeded. A first sweep finds the least
bottleneck; a second one of the same shape, within that bound, the least (communication, memory). Only R is stored, and
only where prices of devices (`work_bound`) leave a plan within the cap possible: an interval of the sets, which are
sorted by worth.

Where a device has no room for a stage, the stage may *recompute*: it takes its forward time once more and keeps what
autograd saves of one minibatch instead of w. Never faster, that is tried only where the plain stage does not fit, so
the search stays exact.

From each I the sets J are reached by a depth-first walk that adds a node at a time and keeps the stage's sums up to
date. Computation only grows along the walk, so it turns back where no class can compute the stage within the cap.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from hetpipe_compiler.ir.blocks import FloatArray
from hetpipe_compiler.passes.block_graph import IntArray, NodeArrays
from hetpipe_compiler.passes.closed_sets import Int32Array

NEVER, WHERE_NEEDED, ALWAYS = 0, 1, 2

BoolArray = npt.NDArray[np.bool_]
ByteArray = npt.NDArray[np.int8]


class SetArrays(NamedTuple):
    """Closed sets in order of worth.

    Attributes:
        inside: ``[set, byte]`` bits of its nodes, little end first.
        compute_ms: ``[class, set]``, forward and backward; ``forward_ms`` of it.
        replay: Per set, bytes that its nodes need to run their forward again.
        held: ``[category, set]``: bytes that single nodes hold.
    """

    inside: npt.NDArray[np.uint8]
    grow_starts: IntArray
    grow_nodes: Int32Array
    grow_sets: Int32Array
    compute_ms: FloatArray
    forward_ms: FloatArray
    replay: IntArray
    held: IntArray


class TailArrays(NamedTuple):
    """Tails, with the sets where each may begin.

    Attributes:
        by_class: Tails by ``first_class``: those of class a are ``by_class[class_starts[a]:class_starts[a + 1]]``.
        longer: ``[tail, class]``: the tail made by a stage of that class before it, -1 where there is none.
        low, high: First and last + 1 set before the tail.
        rest_low, rest_high: The same for what follows its first stage.
        rest_at: R of tail t is stored at ``rest_at[t]:rest_at[t + 1]``.
        begins: Per set, whether any tail may begin there.
    """

    first_class: IntArray
    stages: IntArray
    by_class: IntArray
    class_starts: IntArray
    longer: IntArray
    low: IntArray
    high: IntArray
    rest_low: IntArray
    rest_high: IntArray
    rest_at: IntArray
    begins: BoolArray


class DeviceArrays(NamedTuple):
    """Per class: ``available`` bytes, and whether it is a CPU; per link its figures; which links join which classes."""

    available: IntArray
    on_cpu: BoolArray
    bytes_per_ms: FloatArray
    latency_ms: FloatArray
    link_between: IntArray
    receives_over: BoolArray


class MemoryArrays(NamedTuple):
    """The memory formula.

    Attributes:
        in_flight: Distinct counts, ascending; ``slot_of`` a tail's length, and ``first_slot`` of a first stage.
        optimizer_factor, step_factor, loop_factor: As in `stage_memory.MemoryRule`; own_sums, pulls: per count.
        recompute: Whether a stage may recompute: `NEVER`, `WHERE_NEEDED`, `ALWAYS`.
        whole: Whether the formula applies; else the held bytes are all.
    """

    in_flight: IntArray
    slot_of: IntArray
    first_slot: int
    optimizer_factor: float
    own_sums: IntArray
    pulls: BoolArray
    step_factor: float
    loop_factor: float
    recompute: int
    whole: bool


class Choices(NamedTuple):
    """What the second sweep stores per entry of R: communication, memory, the tail that follows, and its own choice."""

    moved_ms: FloatArray
    memory: IntArray
    following: Int32Array
    end: Int32Array
    out: ByteArray


class Walk(NamedTuple):
    """Scratch of the walk, and what it found: per reached set the stage's sums.

    Attributes:
        sums: ``[entry, :]``: received, returned, sent back, parameters, frozen, saved, workspace, largest
            parameter.
        path_most: ``[depth, quantity]``: the last two along the walk.
    """

    stamp: IntArray
    path_set: IntArray
    path_next: IntArray
    path_node: IntArray
    path_most: IntArray
    inside: BoolArray
    value_readers: IntArray
    item_holders: IntArray
    reached: IntArray
    sums: IntArray


def new_walk(sets: int, nodes: int, values: int, items: int) -> Walk:
    """Scratch for a graph of this size."""
    return Walk(
        stamp=np.full(sets, -1, dtype=np.int64),
        path_set=np.zeros(nodes + 2, dtype=np.int64),
        path_next=np.zeros(nodes + 2, dtype=np.int64),
        path_node=np.zeros(nodes + 2, dtype=np.int64),
        path_most=np.zeros((nodes + 2, 2), dtype=np.int64),
        inside=np.zeros(nodes, dtype=np.bool_),
        value_readers=np.zeros(values, dtype=np.int64),
        item_holders=np.zeros(items, dtype=np.int64),
        reached=np.zeros(sets, dtype=np.int64),
        sums=np.zeros((sets, 8), dtype=np.int64),
    )


@numba.njit(cache=True)
def _add(node: int, sign: int, nodes: NodeArrays, walk: Walk, now: IntArray) -> None:
    """Add ``node`` to the stage (sign 1), or take the node added last away again (-1)."""
    for at in range(nodes.read_starts[node], nodes.read_starts[node + 1]):
        value = nodes.reads[at]
        before = walk.value_readers[value] + (0 if sign > 0 else -1)
        walk.value_readers[value] += sign
        if walk.inside[nodes.producer[value]]:
            if before == 0:
                now[0] += sign * nodes.forward_bytes[value]
                now[2] += sign * nodes.backward_bytes[value]
        elif before + 1 == nodes.readers[value]:
            now[1] -= sign * nodes.backward_bytes[value]
    for at in range(nodes.made_starts[node], nodes.made_starts[node + 1]):
        now[1] += sign * nodes.backward_bytes[nodes.made[at]]
    for at in range(nodes.item_starts[node], nodes.item_starts[node + 1]):
        item = nodes.items[at]
        before = walk.item_holders[item] + (0 if sign > 0 else -1)
        walk.item_holders[item] += sign
        if before == 0:
            now[3 + nodes.item_category[item]] += sign * nodes.item_bytes[item]


@numba.njit(cache=True, inline="always")
def _total(sums: IntArray, entry: int, slot: int, saved_copies: int, on_cpu: bool, memory: MemoryArrays) -> int:
    """Memory of a stage without the reserve and what a replay needs: `stage_memory`'s formula."""
    if not memory.whole:
        return int(sums[entry, 4])
    parameters, in_flight = sums[entry, 3], memory.in_flight[slot]
    total = parameters * (2 + memory.own_sums[slot]) + np.int64(np.ceil(parameters * memory.optimizer_factor))
    if in_flight > 1:
        total += parameters * in_flight
    step = sums[entry, 7] * memory.loop_factor if on_cpu else parameters * memory.step_factor
    total += max(sums[entry, 6], np.int64(np.ceil(step)) - sums[entry, 5])
    if on_cpu and memory.pulls[slot]:
        total += parameters
    total += sums[entry, 4] + sums[entry, 5] * saved_copies + sums[entry, 0] * in_flight
    return int(total + sums[entry, 1] + sums[entry, 2])


@numba.njit(cache=True)
def _reach(
    start: int,
    sets: SetArrays,
    nodes: NodeArrays,
    memory: MemoryArrays,
    most_available: int,
    usable: BoolArray,
    cap: float,
    useful: BoolArray,
    walk: Walk,
) -> tuple[int, int]:
    """All useful sets above ``start`` whose stage some class can compute within ``cap``: (how many, steps walked)."""
    for node in range(walk.inside.shape[0]):
        walk.inside[node] = (sets.inside[start, node >> 3] >> (node & 7)) & 1
    now = np.zeros(6, dtype=np.int64)
    count, steps, depth = 0, 0, 0
    own_sums = memory.own_sums.min()
    walk.stamp[start] = start
    walk.path_set[0], walk.path_next[0] = start, sets.grow_starts[start]
    while depth >= 0:
        at = walk.path_next[depth]
        if at == sets.grow_starts[walk.path_set[depth] + 1]:
            if depth > 0:
                _add(walk.path_node[depth], -1, nodes, walk, now)
            depth -= 1
            continue
        walk.path_next[depth] += 1
        reached = sets.grow_sets[at]
        if reached < 0 or walk.stamp[reached] == start:
            continue
        walk.stamp[reached] = start
        steps += 1
        within = False
        for a in range(usable.shape[0]):
            if usable[a] and sets.compute_ms[a, reached] - sets.compute_ms[a, start] <= cap:
                within = True
        if not within:
            continue
        node = int(sets.grow_nodes[at])
        _add(node, 1, nodes, walk, now)
        parameters = now[3] + sets.held[0, reached] - sets.held[0, start]
        frozen = now[4] + sets.held[1, reached] - sets.held[1, start]
        saved = now[5] + sets.held[2, reached] - sets.held[2, start]
        # What only grows along the walk: without what crosses the stage's borders.
        if parameters * (2 + own_sums) + frozen + saved > most_available:
            _add(node, -1, nodes, walk, now)
            continue
        depth += 1
        for quantity in range(2):
            walk.path_most[depth, quantity] = max(walk.path_most[depth - 1, quantity], nodes.most[quantity, node])
        walk.path_set[depth], walk.path_next[depth] = reached, sets.grow_starts[reached]
        walk.path_node[depth] = node
        if useful[reached]:
            walk.reached[count] = reached
            walk.sums[count, 0], walk.sums[count, 1], walk.sums[count, 2] = now[0], now[1], now[2]
            walk.sums[count, 3], walk.sums[count, 4], walk.sums[count, 5] = parameters, frozen, saved
            walk.sums[count, 6], walk.sums[count, 7] = walk.path_most[depth, 0], walk.path_most[depth, 1]
            count += 1
    return count, steps


@numba.njit(cache=True, inline="always")
def transfer_ms(n_bytes: int, bytes_per_ms: float, latency_ms: float) -> float:
    return latency_ms + n_bytes / bytes_per_ms if n_bytes > 0 else 0.0


class Stages(NamedTuple):
    """Scratch: the stages that begin at one set, on one class.

    Attributes:
        slots: How many of the in-flight counts fit; ``plain``: how many without recomputing.
        total: ``[slot, stage]`` bytes.
        moved_ms, stage_ms: ``[link before * links + link after, stage]``: the transfers, and the stage's time.
        again_ms: The stage's time where it recomputes.
    """

    end: IntArray
    slots: IntArray
    plain: IntArray
    total: IntArray
    moved_ms: FloatArray
    stage_ms: FloatArray
    again_ms: FloatArray


def new_stages(sets: int, slots: int, links: int) -> Stages:
    """Scratch for so many sets, in-flight counts and links."""
    return Stages(
        np.zeros(sets, dtype=np.int64),
        np.zeros(sets, dtype=np.int64),
        np.zeros(sets, dtype=np.int64),
        np.zeros((slots, sets), dtype=np.int64),
        np.zeros((links * links, sets)),
        np.zeros((links * links, sets)),
        np.zeros((links * links, sets)),
    )


@numba.njit(cache=True)
def _on_class(
    a: int,
    start: int,
    count: int,
    sets: SetArrays,
    devices: DeviceArrays,
    memory: MemoryArrays,
    cap: float,
    overlapped: bool,
    overflow: bool,
    walk: Walk,
    stages: Stages,
) -> int:
    """Cost the reached stages on class ``a``; keeps those within the cap that fit with some in-flight count."""
    kept = 0
    always = memory.recompute == ALWAYS and memory.whole
    where_needed = memory.recompute == WHERE_NEEDED and memory.whole
    for entry in range(count):
        end = walk.reached[entry]
        compute = sets.compute_ms[a, end] - sets.compute_ms[a, start]
        if compute > cap:
            continue
        again = compute + sets.forward_ms[a, end] - sets.forward_ms[a, start]
        slots, plain = 0, 0
        for slot in range(memory.in_flight.shape[0]):
            w = memory.in_flight[slot]
            total = _total(walk.sums, entry, slot, w, devices.on_cpu[a], memory)
            recompute = w > 1 and (always or (where_needed and total > devices.available[a]))
            if recompute:
                less = _total(walk.sums, entry, slot, 1, devices.on_cpu[a], memory)
                less += w * (sets.replay[end] - sets.replay[start])
                recompute = less < total
                total = less if recompute else total
            plain = plain if recompute else slot + 1
            stages.total[slot, kept] = total
            if overflow or total <= devices.available[a]:
                slots = slot + 1
        if again > cap:
            slots = min(slots, plain)
        if slots == 0:
            continue
        stages.end[kept], stages.slots[kept], stages.plain[kept] = end, slots, plain
        links = devices.bytes_per_ms.shape[0]
        for out in range(links):
            back = transfer_ms(walk.sums[entry, 1], devices.bytes_per_ms[out], devices.latency_ms[out])
            for into in range(links):
                moved = back + transfer_ms(walk.sums[entry, 0], devices.bytes_per_ms[into], devices.latency_ms[into])
                stages.moved_ms[into * links + out, kept] = moved
                stages.stage_ms[into * links + out, kept] = max(compute, moved) if overlapped else compute + moved
                stages.again_ms[into * links + out, kept] = max(again, moved) if overlapped else again + moved
        kept += 1
    return kept


@numba.njit(cache=True)
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


@numba.njit(cache=True)
def _open(best: FloatArray, start: int, receives_over: BoolArray) -> None:
    """Reset ``best``: infinite for the links over which a stage may receive, else closed (-infinite)."""
    for into in range(best.shape[0]):
        best[into] = np.inf if (receives_over[into] if start > 0 else into == 0) else -np.inf


@numba.njit(cache=True)
def _mark_usable(start: int, tails: TailArrays, usable: BoolArray) -> bool:
    """Mark the classes that have a tail which may begin at set ``start``; whether there is any."""
    some = False
    for a in range(usable.shape[0]):
        usable[a] = False
        for t in tails.by_class[tails.class_starts[a] : tails.class_starts[a + 1]]:
            if tails.low[t] <= start < tails.high[t]:
                usable[a] = some = True
                break
    return some


@numba.njit(cache=True)
def least_bottleneck(
    sets: SetArrays,
    nodes: NodeArrays,
    tails: TailArrays,
    devices: DeviceArrays,
    memory: MemoryArrays,
    walk: Walk,
    stages: Stages,
    rest: FloatArray,
    exact_stages: int,
    cap: float,
    overlapped: bool,
    overflow: bool,
    budget: int,
) -> tuple[float, int]:
    """The least bottleneck of a plan within ``cap``, infinite if there is none; and the work done.

    Args:
        rest: R, filled with infinity.
        exact_stages: Only pipelines with so many stages count; 0: any.
        overflow: A stage's objective is the bytes by which it exceeds its device, and memory is no constraint.
        budget: Gives up (work > budget, the result means nothing) when it is spent.
    """
    last = sets.held.shape[1] - 1
    useful, usable = np.zeros(last + 1, dtype=np.bool_), np.zeros(devices.available.shape[0], dtype=np.bool_)
    useful[last] = True
    best = np.empty(devices.bytes_per_ms.shape[0])
    most_available = 1 << 62 if overflow else int(devices.available.max())
    answer, work = np.inf, 0
    walk.stamp[:] = -1
    for t in range(tails.stages.shape[0]):
        if tails.stages[t] == 1:
            rest[tails.rest_at[t] + last - tails.rest_low[t]] = -np.inf
    for start in range(last - 1, -1, -1):
        if not tails.begins[start] or not _mark_usable(start, tails, usable):
            continue
        limit = np.inf if overflow else cap
        count, steps = _reach(start, sets, nodes, memory, most_available, usable, limit, useful, walk)
        work += 4 * steps
        if count == 0:
            continue
        for a in range(usable.shape[0]):
            if not usable[a]:
                continue
            kept = _on_class(a, start, count, sets, devices, memory, limit, overlapped, overflow, walk, stages)
            if kept == 0:
                continue
            for t in tails.by_class[tails.class_starts[a] : tails.class_starts[a + 1]]:
                if not tails.low[t] <= start < tails.high[t]:
                    continue
                length = tails.stages[t]
                slot = memory.slot_of[length - 1] if start > 0 or length == 1 else memory.first_slot
                _open(best, start, devices.receives_over[a])
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
                        useful[start] = True
        if work > budget:
            break
    return answer, work


@numba.njit(cache=True)
def first_stage_within(
    start: int,
    tail: int,
    into: int,
    sets: SetArrays,
    nodes: NodeArrays,
    tails: TailArrays,
    devices: DeviceArrays,
    memory: MemoryArrays,
    walk: Walk,
    stages: Stages,
    rest: FloatArray,
    bound: float,
    overlapped: bool,
) -> tuple[int, int]:
    """After `least_bottleneck`: where a first stage of ``tail`` can end and the link after it, all within ``bound``.

    Of several the one that moves least, (-1, -1) if there is none.
    """
    a, length = tails.first_class[tail], tails.stages[tail]
    usable, useful = np.zeros(devices.available.shape[0], dtype=np.bool_), np.ones(walk.stamp.shape[0], dtype=np.bool_)
    usable[a] = True
    walk.stamp[:] = -1
    most_available = int(devices.available.max())
    count, _ = _reach(start, sets, nodes, memory, most_available, usable, bound, useful, walk)
    kept = _on_class(a, start, count, sets, devices, memory, bound, overlapped, False, walk, stages)
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


@numba.njit(cache=True)
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


@numba.njit(cache=True)
def least_communication(
    sets: SetArrays,
    nodes: NodeArrays,
    tails: TailArrays,
    devices: DeviceArrays,
    memory: MemoryArrays,
    walk: Walk,
    stages: Stages,
    rest: Choices,
    exact_stages: int,
    bound: float,
    overlapped: bool,
    overflow: bool,
    budget: int,
) -> tuple[int, int, int, float, int, int]:
    """Among plans whose every stage's objective is at most ``bound``: least (communication ms, memory, order).

    ``rest.moved_ms`` is infinite on entry. Returns the tail that is the whole plan, where its first stage ends, the
    link that follows, its communication and memory, and the work done (more than ``budget``: given up). The rest of the
    plan stands in ``rest``.
    """
    last = sets.held.shape[1] - 1
    useful, usable = np.zeros(last + 1, dtype=np.bool_), np.zeros(devices.available.shape[0], dtype=np.bool_)
    useful[last] = True
    links = devices.bytes_per_ms.shape[0]
    best = Choices(
        np.empty(links),
        np.empty(links, dtype=np.int64),
        np.empty(links, dtype=np.int32),
        np.empty(links, dtype=np.int32),
        np.empty(links, dtype=np.int8),
    )
    most_available = 1 << 62 if overflow else int(devices.available.max())
    root, root_end, root_out, root_moved, root_memory, work = -1, -1, -1, np.inf, 0, 0
    walk.stamp[:] = -1
    for t in range(tails.stages.shape[0]):
        if tails.stages[t] == 1:
            at = tails.rest_at[t] + last - tails.rest_low[t]
            rest.moved_ms[at], rest.memory[at], rest.following[at] = 0.0, 0, -1
    for start in range(last - 1, -1, -1):
        if not tails.begins[start] or not _mark_usable(start, tails, usable):
            continue
        limit = np.inf if overflow else bound
        count, steps = _reach(start, sets, nodes, memory, most_available, usable, limit, useful, walk)
        work += 4 * steps
        if count == 0:
            continue
        for a in range(usable.shape[0]):
            if not usable[a]:
                continue
            kept = _on_class(a, start, count, sets, devices, memory, limit, overlapped, overflow, walk, stages)
            if kept == 0:
                continue
            for t in tails.by_class[tails.class_starts[a] : tails.class_starts[a + 1]]:
                if not tails.low[t] <= start < tails.high[t]:
                    continue
                length = tails.stages[t]
                slot = memory.slot_of[length - 1] if start > 0 or length == 1 else memory.first_slot
                _open(best.moved_ms, start, devices.receives_over[a])
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
                        useful[start] = True
        if work > budget:
            break
    return root, root_end, root_out, root_moved, root_memory, work
