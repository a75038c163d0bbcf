"""The kernel of `relaxation`: one pass over the tails backward (what can follow), or forward (what can stand before).

For one tail after the other a pass takes the sets where its first stage may have one border, hands the best of them
(`Borders`) from set to set along single nodes, and drops the sets where the stage cannot have its other border.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hetpipe_compiler.ir.blocks import FloatArray
from hetpipe_compiler.passes.kernels.arrays import (
    BoolArray,
    DeviceArrays,
    IntArray,
    MemoryArrays,
    NodeArrays,
    SetArrays,
    TailArrays,
)
from hetpipe_compiler.passes.kernels.compiled import compiled, inlined
from hetpipe_compiler.passes.kernels.stages import transfer_ms


class Relaxed(NamedTuple):
    """What does not change from pass to pass.

    Attributes:
        read_beyond_ms, made_beyond_ms: As in `crossing.Beyond`, of which they are ``read_ms`` and ``made_ms``.
        held: ``[slot, set]``: a stage holds at least the difference of its borders' bytes.
        limit_ms: The cap, and room for rounding.
        levels: Steps of transfer time up to the cap that are told apart (``overlapped``; else 1).
    """

    sets: SetArrays
    read_beyond_ms: FloatArray
    made_beyond_ms: FloatArray
    nodes: NodeArrays
    tails: TailArrays
    devices: DeviceArrays
    memory: MemoryArrays
    held: FloatArray
    limit_ms: float
    overlapped: bool
    levels: int


class States(NamedTuple):
    """What is possible, and the least bytes moved, per tail t and set s.

    Attributes:
        begins: ``[link, begin_at[t] + s - low[t]]``: whether the tail can begin at the set, receiving over the link.
        ends: ``[link, end_at[t] + s - rest_low[t]]``: whether its first stage can end there, returned to over the link.
        receives, returns: Least bytes, at the same places.
    """

    begin_at: IntArray
    end_at: IntArray
    begins: BoolArray
    ends: BoolArray
    receives: IntArray
    returns: IntArray


class Borders(NamedTuple):
    """What a pass knows of one tail's stages, per set s: the least of each row over the borders that a stage can have.

    Rows: computation; bytes held; then per level of transfer time computation (and transfer, if both add up). A border
    before the stage counts negative, so that the least is the best and two borders of a stage add up to what it takes.

    Attributes:
        offered: ``[set, row]``: set s as a border itself, then also the sets beyond it.
        best: ``[set, row]``: the sets above s (backward) or below it (forward).
    """

    offered: FloatArray
    best: FloatArray


#: Rows of `Borders`; those from COST on are the levels.
COMPUTE, HELD, COST = 0, 1, 2


@compiled
def _offer_ends(t: int, followed: BoolArray, states: States, about: Relaxed, offered: FloatArray) -> None:
    """Backward: offer the sets where what follows tail ``t``'s first stage may begin."""
    tails, devices, ends, overlapped, levels = about.tails, about.devices, states.ends, about.overlapped, about.levels
    low, high, first = tails.rest_low[t], tails.rest_high[t], states.end_at[t] - tails.rest_low[t]
    compute_ms, held = (
        about.sets.compute_ms[tails.first_class[t]],
        about.held[about.memory.slot_of[tails.stages[t] - 1]],
    )
    for s in range(low, high):
        at = first + s
        returned = states.returns[at]
        for out in range(ends.shape[0]):
            ends[out, at] &= followed[out, at]
            if not ends[out, at]:
                continue
            moved_ms = transfer_ms(returned, devices.bytes_per_ms[out], devices.latency_ms[out])
            if moved_ms > about.limit_ms:
                ends[out, at] = False
                continue
            offered[s, COMPUTE] = compute_ms[s]
            offered[s, HELD] = held[s] + (returned if about.memory.whole else 0)
            level = COST + (min(int(levels * moved_ms / about.limit_ms), levels - 1) if overlapped else 0)
            offered[s, level] = min(offered[s, level], compute_ms[s] + (0.0 if overlapped else moved_ms))


@compiled
def _hand_down(low: int, high: int, sets: SetArrays, borders: Borders) -> None:
    """Backward, for sets ``low`` to ``high - 1``."""
    offered, best, starts, grow_sets = borders.offered, borders.best, sets.grow_starts, sets.grow_sets
    for s in range(high - 1, low - 1, -1):
        best[s] = np.inf
        for at in range(starts[s], starts[s + 1]):
            above = grow_sets[at]
            if 0 <= above < high:
                for row in range(best.shape[1]):
                    best[s, row] = min(best[s, row], offered[above, row])
        for row in range(best.shape[1]):
            offered[s, row] = min(offered[s, row], best[s, row])


@compiled
def _hand_up(low: int, high: int, sets: SetArrays, borders: Borders) -> None:
    """Forward, for sets ``low`` to ``high - 1``."""
    offered, best, starts, grow_sets = borders.offered, borders.best, sets.grow_starts, sets.grow_sets
    best[low:high] = np.inf
    for s in range(low, high):
        for row in range(best.shape[1]):
            offered[s, row] = min(offered[s, row], best[s, row])
        if offered[s, COMPUTE] == np.inf:
            continue
        for at in range(starts[s], starts[s + 1]):
            above = grow_sets[at]
            if 0 <= above < high:
                for row in range(best.shape[1]):
                    best[above, row] = min(best[above, row], offered[s, row])


@inlined
def _within(best: FloatArray, compute_ms: float, moved_ms: float, about: Relaxed) -> bool:
    """Whether a stage between this border and one of the ``best`` beyond may be within the cap."""
    limit_ms = about.limit_ms
    if not about.overlapped:
        return bool(best[COST] + compute_ms + moved_ms <= limit_ms)
    for level in range(about.levels):
        if best[COST + level] + compute_ms <= limit_ms and level * limit_ms / about.levels + moved_ms <= limit_ms:
            return True
    return False


@compiled
def _keep_begins(t: int, followed: BoolArray, states: States, about: Relaxed, best: FloatArray) -> None:
    """Backward: drop the sets where tail ``t`` cannot begin; let the stages before it end at the others."""
    sets, tails, devices, begins = about.sets, about.tails, about.devices, states.begins
    a, slot = tails.first_class[t], about.memory.slot_of[tails.stages[t] - 1]
    low, high, first = tails.low[t], min(tails.high[t], tails.rest_high[t]), states.begin_at[t] - tails.low[t]
    begins[:, first + max(low, high) : states.begin_at[t + 1]] = False
    compute_ms, held, beyond_ms = about.sets.compute_ms[a], about.held[slot], about.read_beyond_ms[a]
    in_flight = about.memory.in_flight[slot] if about.memory.whole else 0
    for s in range(low, high):
        at, received = first + s, 0
        if best[s, COMPUTE] < np.inf:
            for entry in range(sets.cross_starts[s], sets.cross_starts[s + 1]):
                value = sets.cross_values[entry]
                if beyond_ms[value] < best[s, COMPUTE]:
                    received += about.nodes.forward_bytes[value]
        received = max(states.receives[at], received)
        states.receives[at] = received
        fits = best[s, HELD] - held[s] + received * in_flight <= devices.available[a] + 1
        for into in range(begins.shape[0]):
            if not begins[into, at]:
                continue
            moved_ms = transfer_ms(received, devices.bytes_per_ms[into], devices.latency_ms[into])
            begins[into, at] = fits and _within(best[s], -compute_ms[s], moved_ms, about)
            if not begins[into, at]:
                continue
            for b in range(tails.longer.shape[1]):
                longer = tails.longer[t, b]
                if longer < 0 or devices.link_between[b, a] != into:
                    continue
                if tails.rest_low[longer] <= s < tails.rest_high[longer]:
                    followed[into, states.end_at[longer] + s - tails.rest_low[longer]] = True


@compiled
def backward(states: States, borders: Borders, about: Relaxed) -> int:
    """Drop the states from which the last set cannot be reached; raise ``receives``. Returns the work done."""
    tails, work = about.tails, 0
    followed = np.zeros_like(states.ends)
    for t in range(tails.stages.shape[0]):
        if tails.stages[t] == 1:
            followed[:, states.end_at[t + 1] - 1] = True
        low, high = tails.low[t], tails.rest_high[t]
        borders.offered[low:high] = np.inf
        _offer_ends(t, followed, states, about, borders.offered)
        _hand_down(low, high, about.sets, borders)
        _keep_begins(t, followed, states, about, borders.best)
        work += max(0, high - low) * (1 + about.levels // 4)
    return work


@inlined
def _reached(t: int, s: int, into: int, states: States, tails: TailArrays, link_between: IntArray) -> bool:
    """Whether some stage can end where tail ``t`` would begin, over that link."""
    if s == 0:
        return into == 0
    for b in range(tails.longer.shape[1]):
        longer = tails.longer[t, b]
        if longer < 0 or link_between[b, tails.first_class[t]] != into:
            continue
        at = s - tails.rest_low[longer]
        if 0 <= at < tails.rest_high[longer] - tails.rest_low[longer] and states.ends[into, states.end_at[longer] + at]:
            return True
    return False


@compiled
def _offer_begins(t: int, states: States, about: Relaxed, offered: FloatArray) -> None:
    """Forward: offer the sets where tail ``t`` can begin, because a stage before it can end there."""
    tails, devices, begins, overlapped, levels = (
        about.tails, about.devices, states.begins, about.overlapped, about.levels,
    )  # fmt: skip
    a, slot = tails.first_class[t], about.memory.slot_of[tails.stages[t] - 1]
    compute_ms, held = about.sets.compute_ms[a], about.held[slot]
    in_flight = about.memory.in_flight[slot] if about.memory.whole else 0
    for s in range(tails.low[t], tails.high[t]):
        at = states.begin_at[t] + s - tails.low[t]
        for into in range(begins.shape[0]):
            if not begins[into, at]:
                continue
            moved_ms = transfer_ms(states.receives[at], devices.bytes_per_ms[into], devices.latency_ms[into])
            begins[into, at] = moved_ms <= about.limit_ms and _reached(t, s, into, states, tails, devices.link_between)
            if not begins[into, at]:
                continue
            offered[s, COMPUTE] = -compute_ms[s]
            offered[s, HELD] = states.receives[at] * in_flight - held[s]
            level = COST + (min(int(levels * moved_ms / about.limit_ms), levels - 1) if overlapped else 0)
            offered[s, level] = min(offered[s, level], (0.0 if overlapped else moved_ms) - compute_ms[s])


@compiled
def _keep_ends(t: int, states: States, about: Relaxed, best: FloatArray) -> None:
    """Forward: drop the sets where tail ``t``'s first stage cannot end."""
    sets, tails, devices, ends = about.sets, about.tails, about.devices, states.ends
    a, slot = tails.first_class[t], about.memory.slot_of[tails.stages[t] - 1]
    low, high, first = max(tails.low[t], tails.rest_low[t]), tails.rest_high[t], states.end_at[t] - tails.rest_low[t]
    ends[:, states.end_at[t] : first + min(low, high)] = False
    compute_ms, held, beyond_ms = about.sets.compute_ms[a], about.held[slot], about.made_beyond_ms[a]
    for s in range(low, high):
        at, returned = first + s, 0
        if best[s, COMPUTE] < np.inf:
            for entry in range(sets.cross_starts[s], sets.cross_starts[s + 1]):
                value = sets.cross_values[entry]
                if beyond_ms[value] > -best[s, COMPUTE]:
                    returned += about.nodes.backward_bytes[value]
        returned = max(states.returns[at], returned)
        states.returns[at] = returned
        needed = best[s, HELD] + held[s] + (returned if about.memory.whole else 0)
        fits = needed <= devices.available[a] + 1
        for out in range(ends.shape[0]):
            if ends[out, at]:
                moved_ms = transfer_ms(returned, devices.bytes_per_ms[out], devices.latency_ms[out])
                ends[out, at] = fits and _within(best[s], compute_ms[s], moved_ms, about)


@compiled
def forward(states: States, borders: Borders, about: Relaxed) -> int:
    """Drop the states that cannot be reached from the empty set; raise ``returns``. Returns the work done."""
    tails, work = about.tails, 0
    for t in range(tails.stages.shape[0] - 1, -1, -1):
        low, high = tails.low[t], tails.rest_high[t]
        borders.offered[low : max(high, tails.high[t])] = np.inf
        _offer_begins(t, states, about, borders.offered)
        _hand_up(low, high, about.sets, borders)
        _keep_ends(t, states, about, borders.best)
        work += max(0, high - low) * (1 + about.levels // 4)
    return work
