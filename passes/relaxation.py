"""Which plans a cap leaves possible, by a relaxation of the search that needs no stage's exact cost.

In `sweep`'s recurrence the cost of a stage depends on both its borders, I and J, so every pair of nested sets is looked
at. Here it is bounded from below by a sum of a part for each border::

    T_a(J \\ I)  >=  (ms_a(J) + returns(t, J) / bandwidth)  -  (ms_a(I) - receives(t, I) / bandwidth)

with ms_a a set's computation on class a, and the least bytes that tail t's first stage receives if it begins at I, and
has returned if it ends at J. Whether some J above I keeps the stage within the cap is then a question for the least
first part among the sets above I: one number, handed down from each set to those that lack one node of it. All tails
together take a step per tail and set, not per tail and pair of sets. Memory is treated alike: what a stage holds is at
least the difference of what the sets hold.

``receives`` and ``returns`` follow from how far a stage must reach: see `crossing`. The less is possible, the further
that is, so passes backward (what can follow) and forward (what can stand before) alternate while they find more.

With the objective ``overlapped`` computation and transfers are bounded apart; the sets above I are told apart by what
they have returned, in `_LEVELS` steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numba
import numpy as np

from hetpipe_compiler.ir.blocks import FloatArray
from hetpipe_compiler.passes.block_graph import IntArray, NodeArrays
from hetpipe_compiler.passes.crossing import Crossing
from hetpipe_compiler.passes.sweep import BoolArray, DeviceArrays, MemoryArrays, SetArrays, TailArrays, transfer_ms

#: Steps of transfer times that the objective ``overlapped`` tells apart.
_LEVELS = 16
#: Rounds of a backward and a forward pass at most.
_ROUNDS = 4
#: Sums in another order differ by less, relative to the cap.
_ROUNDING = 1e-11


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


class Bounds(NamedTuple):
    """What a pass keeps per set for one tail: the best over the sets above it (backward) or below it (forward).

    Attributes:
        compute_ms: Of a stage's other border.
        held: Bytes.
        cost_ms: ``[level, set]``: computation and, if they add up, transfer.
    """

    compute_ms: FloatArray
    held: FloatArray
    cost_ms: FloatArray


@dataclass(frozen=True)
class Possible:
    """Where stages can begin in plans that the relaxation allows.

    Attributes:
        low, high: Per tail, first and last + 1 set at which it can begin (``low >= high``: nowhere).
        begins: Per set, whether any stage can begin there.
    """

    low: IntArray
    high: IntArray
    begins: BoolArray


def possible(
    sets: SetArrays,
    crosses: Crossing,
    nodes: NodeArrays,
    tails: TailArrays,
    devices: DeviceArrays,
    memory: MemoryArrays,
    cap_ms: float,
    *,
    overlapped: bool,
) -> tuple[Possible | None, int]:
    """What may be part of a plan within ``cap_ms`` (finite), None if there is no such plan; and the work done."""
    links, count = len(devices.bytes_per_ms), sets.compute_ms.shape[1]
    begin_at, end_at = _offsets(tails.high - tails.low), _offsets(tails.rest_high - tails.rest_low)
    states = States(
        begin_at,
        end_at,
        np.ones((links, begin_at[-1]), dtype=np.bool_),
        np.ones((links, end_at[-1]), dtype=np.bool_),
        np.zeros(begin_at[-1], dtype=np.int64),
        np.zeros(end_at[-1], dtype=np.int64),
    )
    levels = _LEVELS if overlapped else 1
    bounds = Bounds(np.empty(count), np.empty(count), np.empty((levels, count)))
    held = _held(sets, memory)
    inputs = sets, crosses, nodes, tails, devices, memory, states, bounds, held, cap_ms, overlapped
    work, before = 0, -1
    for _ in range(_ROUNDS):
        work += _backward(*inputs)
        if not states.begins[0, begin_at[:-1][tails.low == 0]].any():
            return None, work
        work += _forward(*inputs)
        left = int(np.count_nonzero(states.begins))
        if left == before:
            break
        before = left
    return _where(tails, states, count), work


def _offsets(lengths: IntArray) -> IntArray:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _held(sets: SetArrays, memory: MemoryArrays) -> FloatArray:
    """``[slot, set]``: bytes that a stage holds at least are differences of these (`stage_memory`'s formula)."""
    parameters, frozen, saved = sets.held.astype(np.float64)
    if not memory.whole:
        return np.tile(frozen, (len(memory.in_flight), 1))
    in_flight = memory.in_flight[:, None]
    versions = np.where(in_flight > 1, in_flight, 0) + 2 + memory.own_sums + memory.optimizer_factor
    return parameters * versions + frozen + saved * in_flight


def _where(tails: TailArrays, states: States, sets: int) -> Possible:
    anywhere = states.begins.any(axis=0)
    low, high, begins = tails.low.copy(), tails.high.copy(), np.zeros(sets, dtype=np.bool_)
    for tail in range(len(low)):
        mine = np.flatnonzero(anywhere[states.begin_at[tail] : states.begin_at[tail + 1]]) + tails.low[tail]
        low[tail], high[tail] = (mine[0], mine[-1] + 1) if len(mine) else (0, 0)
        begins[mine] = True
    return Possible(low, high, begins)


@numba.njit(cache=True, inline="always")
def _level(moved_ms: float, cap_ms: float, levels: int) -> int:
    return min(int(levels * moved_ms / cap_ms), levels - 1) if cap_ms > 0 else 0


@numba.njit(cache=True)
def _backward(
    sets: SetArrays,
    crosses: Crossing,
    nodes: NodeArrays,
    tails: TailArrays,
    devices: DeviceArrays,
    memory: MemoryArrays,
    states: States,
    bounds: Bounds,
    held: FloatArray,
    cap_ms: float,
    overlapped: bool,
) -> int:
    """Drop the states from which the last set cannot be reached; raise ``receives``."""
    links, limit, work = states.begins.shape[0], cap_ms * (1 + _ROUNDING), 0
    levels = bounds.cost_ms.shape[0]
    followed = np.zeros_like(states.ends)
    last = sets.compute_ms.shape[1] - 1
    for t in range(tails.stages.shape[0]):
        a, low, high, rest_low, rest_high = (
            tails.first_class[t], tails.low[t], tails.high[t], tails.rest_low[t], tails.rest_high[t],
        )  # fmt: skip
        slot = memory.slot_of[tails.stages[t] - 1]
        in_flight = memory.in_flight[slot] if memory.whole else 0
        if tails.stages[t] == 1:
            followed[:, states.end_at[t] + last - rest_low] = True
        states.begins[:, states.begin_at[t] + max(0, min(high, rest_high) - low) : states.begin_at[t + 1]] = False
        for s in range(rest_high - 1, low - 1, -1):
            work += 1 + levels // 4
            compute, mine = np.inf, np.inf
            bounds.cost_ms[:, s] = np.inf
            for at in range(sets.grow_starts[s], sets.grow_starts[s + 1]):
                above = sets.grow_sets[at]
                if 0 <= above < rest_high:
                    compute = min(compute, bounds.compute_ms[above])
                    mine = min(mine, bounds.held[above])
                    for level in range(levels):
                        bounds.cost_ms[level, s] = min(bounds.cost_ms[level, s], bounds.cost_ms[level, above])
            if s < high:
                at = states.begin_at[t] + s - low
                received = 0
                if compute < np.inf:
                    for value in crosses.values[crosses.starts[s] : crosses.starts[s + 1]]:
                        if crosses.read_beyond_ms[a, value] < compute:
                            received += nodes.forward_bytes[value]
                states.receives[at] = max(states.receives[at], received)
                received = states.receives[at]
                fits = mine - held[slot, s] + received * in_flight <= devices.available[a] + 1
                for into in range(links):
                    if not states.begins[into, at]:
                        continue
                    moved = transfer_ms(received, devices.bytes_per_ms[into], devices.latency_ms[into])
                    within = False
                    for level in range(levels):
                        spent = bounds.cost_ms[level, s] - sets.compute_ms[a, s]
                        if overlapped:
                            within |= spent <= limit and level * cap_ms / levels + moved <= limit
                        else:
                            within |= spent + moved <= limit
                    states.begins[into, at] = within and fits
                    for b in range(devices.link_between.shape[0] if within and fits else 0):
                        longer = tails.longer[t, b]
                        if longer >= 0 and devices.link_between[b, a] == into:
                            if tails.rest_low[longer] <= s < tails.rest_high[longer]:
                                followed[into, states.end_at[longer] + s - tails.rest_low[longer]] = True
            if s >= rest_low:
                at = states.end_at[t] + s - rest_low
                for out in range(links):
                    states.ends[out, at] &= followed[out, at]
                    if not states.ends[out, at]:
                        continue
                    moved = transfer_ms(states.returns[at], devices.bytes_per_ms[out], devices.latency_ms[out])
                    if moved > limit:
                        states.ends[out, at] = False
                        continue
                    compute = min(compute, sets.compute_ms[a, s])
                    mine = min(mine, held[slot, s] + (states.returns[at] if memory.whole else 0))
                    level = _level(moved, cap_ms, levels)
                    cost = sets.compute_ms[a, s] + (0.0 if overlapped else moved)
                    bounds.cost_ms[level, s] = min(bounds.cost_ms[level, s], cost)
            bounds.compute_ms[s], bounds.held[s] = compute, mine
    return work


@numba.njit(cache=True)
def _forward(
    sets: SetArrays,
    crosses: Crossing,
    nodes: NodeArrays,
    tails: TailArrays,
    devices: DeviceArrays,
    memory: MemoryArrays,
    states: States,
    bounds: Bounds,
    held: FloatArray,
    cap_ms: float,
    overlapped: bool,
) -> int:
    """Drop the states that cannot be reached from the empty set; raise ``returns``."""
    links, limit, work = states.begins.shape[0], cap_ms * (1 + _ROUNDING), 0
    levels = bounds.cost_ms.shape[0]
    for t in range(tails.stages.shape[0] - 1, -1, -1):
        a, low, high, rest_low, rest_high = (
            tails.first_class[t], tails.low[t], tails.high[t], tails.rest_low[t], tails.rest_high[t],
        )  # fmt: skip
        slot = memory.slot_of[tails.stages[t] - 1]
        in_flight = memory.in_flight[slot] if memory.whole else 0
        if low >= rest_high:
            states.ends[:, states.end_at[t] : states.end_at[t + 1]] = False
            continue
        bounds.compute_ms[low:rest_high] = -np.inf
        bounds.held[low:rest_high] = -np.inf
        bounds.cost_ms[:, low:rest_high] = -np.inf
        states.ends[:, states.end_at[t] : states.end_at[t] + max(0, low - rest_low)] = False
        for s in range(low, rest_high):
            work += 1 + levels // 4
            compute, mine = bounds.compute_ms[s], bounds.held[s]
            if s >= rest_low:
                at = states.end_at[t] + s - rest_low
                returned = 0
                if compute > -np.inf:
                    for value in crosses.values[crosses.starts[s] : crosses.starts[s + 1]]:
                        if crosses.made_beyond_ms[a, value] > compute:
                            returned += nodes.backward_bytes[value]
                states.returns[at] = max(states.returns[at], returned)
                returned = states.returns[at]
                fits = held[slot, s] - mine + (returned if memory.whole else 0) <= devices.available[a] + 1
                for out in range(links):
                    if not states.ends[out, at]:
                        continue
                    moved = transfer_ms(returned, devices.bytes_per_ms[out], devices.latency_ms[out])
                    within = False
                    for level in range(levels):
                        spent = sets.compute_ms[a, s] - bounds.cost_ms[level, s]
                        if overlapped:
                            within |= spent <= limit and level * cap_ms / levels + moved <= limit
                        else:
                            within |= spent + moved <= limit
                    states.ends[out, at] = within and fits
            if s < high:
                at = states.begin_at[t] + s - low
                for into in range(links):
                    if not states.begins[into, at]:
                        continue
                    came = s == 0 and into == 0
                    for b in range(devices.link_between.shape[0] if s > 0 else 0):
                        longer = tails.longer[t, b]
                        if longer >= 0 and devices.link_between[b, a] == into:
                            if tails.rest_low[longer] <= s < tails.rest_high[longer]:
                                came |= states.ends[into, states.end_at[longer] + s - tails.rest_low[longer]]
                    moved = transfer_ms(states.receives[at], devices.bytes_per_ms[into], devices.latency_ms[into])
                    states.begins[into, at] = came and moved <= limit
                    if not states.begins[into, at]:
                        continue
                    compute = max(compute, sets.compute_ms[a, s])
                    mine = max(mine, held[slot, s] - states.receives[at] * in_flight)
                    level = _level(moved, cap_ms, levels)
                    cost = sets.compute_ms[a, s] - (0.0 if overlapped else moved)
                    bounds.cost_ms[level, s] = max(bounds.cost_ms[level, s], cost)
            if compute == -np.inf:
                continue
            for at in range(sets.grow_starts[s], sets.grow_starts[s + 1]):
                above = sets.grow_sets[at]
                if 0 <= above < rest_high:
                    bounds.compute_ms[above] = max(bounds.compute_ms[above], compute)
                    bounds.held[above] = max(bounds.held[above], mine)
                    for level in range(levels):
                        bounds.cost_ms[level, above] = max(bounds.cost_ms[level, above], bounds.cost_ms[level, s])
    return work
