"""Stages between two closed sets: which there are from one set on, what they move and hold, and cost on a class.

What a stage moves and holds follows from its two borders. It receives of what crosses the first border what one of its
nodes reads, is returned what crosses the second one and was made after the first, and holds what the second border's
nodes do and the first one's do not, and of what both hold in part what a node of its own holds.
"""

from __future__ import annotations

import numpy as np

from hetpipe_compiler.passes.kernels.arrays import (
    ALWAYS,
    WHERE_NEEDED,
    BoolArray,
    DeviceArrays,
    IntArray,
    MemoryArrays,
    NodeArrays,
    Reached,
    SetArrays,
    Stages,
    TailArrays,
    WordArray,
)
from hetpipe_compiler.passes.kernels.compiled import compiled, inlined

#: Work of looking at a stage's sums, where looking at its borders is 1.
_SUMS_WORK = 12


@inlined
def transfer_ms(n_bytes: int, bytes_per_ms: float, latency_ms: float) -> float:
    """Of one message; nothing is sent where there are no bytes."""
    return latency_ms + n_bytes / bytes_per_ms if n_bytes > 0 else 0.0


@inlined
def _has(words: WordArray, node: int) -> bool:
    return bool((words[node >> 6] >> np.uint64(node & 63)) & np.uint64(1))


@compiled
def _any_between(nodes: IntArray, before: WordArray, after: WordArray) -> bool:
    """Whether one of the nodes is in the second set and not in the first."""
    for node in nodes:  # noqa: SIM110 (numba)
        if _has(after, node) and not _has(before, node):
            return True
    return False


@compiled
def _is_subset(words: WordArray, of: WordArray) -> bool:
    for word in range(words.shape[0]):  # noqa: SIM110 (numba)
        if words[word] & ~of[word]:
            return False
    return True


@compiled
def mark_usable(start: int, tails: TailArrays, usable: BoolArray) -> tuple[int, int]:
    """Mark the classes that have a tail which may begin at set ``start``; where its first stage may end, from and to.

    (0, 0) if there is none.
    """
    low, high = tails.beyond[start], 0
    for a in range(usable.shape[0]):
        usable[a] = False
        for t in tails.by_class[tails.class_starts[a] : tails.class_starts[a + 1]]:
            if tails.low[t] <= start < tails.high[t]:
                usable[a] = True
                low, high = min(low, tails.rest_low[t]), max(high, tails.rest_high[t])
    return low, min(high, tails.beyond[start])


@compiled
def _first_from(ends: IntArray, count: int, low: int) -> int:
    """Where in ``ends[:count]``, descending, the least is that is not below ``low``; -1 if none is."""
    first, last = 0, count
    while first < last:
        middle = (first + last) // 2
        if ends[middle] >= low:
            first = middle + 1
        else:
            last = middle
    return first - 1


@compiled
def stages_from(
    start: int,
    window: tuple[int, int],
    known: int,
    sets: SetArrays,
    nodes: NodeArrays,
    memory: MemoryArrays,
    most_available: int,
    usable: BoolArray,
    cap: float,
    reached: Reached,
) -> tuple[int, int]:
    """The stages from ``start`` to one of the first ``known`` ends that some class can compute within ``cap``.

    Returns how many, ascending by their ends, and the work done. Some that fit on no device are left out.
    """
    low, high = window
    count, work, listed = 0, 0, False
    words, own_sums = sets.words, memory.own_sums.min()
    for at in range(_first_from(reached.ends, known, low), -1, -1):
        end = reached.ends[at]
        if end >= high:
            break
        work += 1
        within = False
        for a in range(usable.shape[0]):
            if usable[a] and sets.compute_ms[a, end] - sets.compute_ms[a, start] <= cap:
                within = True
                break
        if not within or not _is_subset(words[start], words[end]):
            continue
        sums = reached.sums[count]
        for category in range(3):
            sums[3 + category] = sets.held[category, end] - sets.held[category, start]
        if sums[3] * (2 + own_sums) + sums[4] + sums[5] > most_available:
            continue
        if not listed:
            _list_outside(words[start], nodes, reached.outside)
            listed = True
        _add_borders(start, end, sets, nodes, sums)
        for quantity in range(2):
            sums[6 + quantity] = _most(quantity, words[end], nodes, reached.outside)
        reached.end[count] = end
        count += 1
    return count, work + _SUMS_WORK * count


@compiled
def _list_outside(inside: WordArray, nodes: NodeArrays, outside: IntArray) -> None:
    for quantity in range(outside.shape[0]):
        count = 0
        for node in nodes.most_first[quantity]:
            if not _has(inside, node):
                outside[quantity, count] = node
                count += 1
        if count < outside.shape[1]:
            outside[quantity, count] = -1


@compiled
def _most(quantity: int, inside: WordArray, nodes: NodeArrays, outside: IntArray) -> int:
    """The largest of a quantity among the stage's nodes: the first in order of size that is inside its end."""
    for node in outside[quantity]:
        if node < 0 or nodes.most[quantity, node] == 0:
            break
        if _has(inside, node):
            return int(nodes.most[quantity, node])
    return 0


@compiled
def _add_borders(start: int, end: int, sets: SetArrays, nodes: NodeArrays, sums: IntArray) -> None:
    """What the stage receives, is returned and sends back; and add what it holds and the set before it holds too."""
    before, after = sets.words[start], sets.words[end]
    received = returned = sent_back = 0
    for value in sets.cross_values[sets.cross_starts[start] : sets.cross_starts[start + 1]]:
        if _any_between(nodes.value_nodes[nodes.value_starts[value] : nodes.value_starts[value + 1]], before, after):
            received += nodes.forward_bytes[value]
            sent_back += nodes.backward_bytes[value]
    for value in sets.cross_values[sets.cross_starts[end] : sets.cross_starts[end + 1]]:
        if not _has(before, nodes.value_nodes[nodes.value_starts[value]]):
            returned += nodes.backward_bytes[value]
    for item in sets.part_items[sets.part_starts[start] : sets.part_starts[start + 1]]:
        if _any_between(nodes.item_nodes[nodes.item_starts[item] : nodes.item_starts[item + 1]], before, after):
            sums[3 + nodes.item_category[item]] += nodes.item_bytes[item]
    sums[0], sums[1], sums[2] = received, returned, sent_back


@inlined
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


@compiled
def on_class(
    a: int,
    start: int,
    count: int,
    sets: SetArrays,
    devices: DeviceArrays,
    memory: MemoryArrays,
    cap: float,
    overlapped: bool,
    overflow: bool,
    reached: Reached,
    stages: Stages,
) -> int:
    """Cost the reached stages on class ``a``; keeps those within the cap that fit with some in-flight count."""
    kept = 0
    always = memory.recompute == ALWAYS and memory.whole
    where_needed = memory.recompute == WHERE_NEEDED and memory.whole
    for entry in range(count):
        end = reached.end[entry]
        compute = sets.compute_ms[a, end] - sets.compute_ms[a, start]
        if compute > cap:
            continue
        again = compute + sets.forward_ms[a, end] - sets.forward_ms[a, start]
        slots, plain = 0, 0
        for slot in range(memory.in_flight.shape[0]):
            w = memory.in_flight[slot]
            total = _total(reached.sums, entry, slot, w, devices.on_cpu[a], memory)
            recompute = w > 1 and (always or (where_needed and total > devices.available[a]))
            if recompute:
                less = _total(reached.sums, entry, slot, 1, devices.on_cpu[a], memory)
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
            back = transfer_ms(reached.sums[entry, 1], devices.bytes_per_ms[out], devices.latency_ms[out])
            for into in range(links):
                moved = back + transfer_ms(reached.sums[entry, 0], devices.bytes_per_ms[into], devices.latency_ms[into])
                stages.moved_ms[into * links + out, kept] = moved
                stages.stage_ms[into * links + out, kept] = max(compute, moved) if overlapped else compute + moved
                stages.again_ms[into * links + out, kept] = max(again, moved) if overlapped else again + moved
        kept += 1
    return kept
