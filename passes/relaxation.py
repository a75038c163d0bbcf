"""Which plans a cap leaves possible, by a relaxation of the search that needs no stage's exact cost.

In the recurrence of `kernels.least_bottleneck` the cost of a stage depends on both its borders, I and J, so every pair
of nested sets is looked at. Here it is bounded from below by a sum of a part for each border::

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

import numpy as np

from hetpipe_compiler.ir.blocks import FloatArray
from hetpipe_compiler.passes.crossing import Beyond
from hetpipe_compiler.passes.kernels.arrays import (
    NEVER,
    BoolArray,
    DeviceArrays,
    IntArray,
    MemoryArrays,
    NodeArrays,
    SetArrays,
    TailArrays,
)
from hetpipe_compiler.passes.kernels.relaxed import COST, Borders, Relaxed, States, backward, forward

#: Steps of transfer times that the objective ``overlapped`` tells apart.
_LEVELS = 16
#: Rounds of a backward and a forward pass at most.
_ROUNDS = 4
#: Sums in another order differ by less, relative to the cap.
_ROUNDING = 1e-11


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
    beyond: Beyond,
    nodes: NodeArrays,
    tails: TailArrays,
    devices: DeviceArrays,
    memory: MemoryArrays,
    cap_ms: float,
    *,
    overlapped: bool,
) -> tuple[Possible | None, int]:
    """What may be part of a plan within ``cap_ms`` (finite, above 0), None if there is none; and the work done."""
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
    borders = Borders(np.empty((count, COST + levels)), np.empty((count, COST + levels)))
    limit_ms = cap_ms * (1 + _ROUNDING)
    about = Relaxed(sets, *beyond, nodes, tails, devices, memory, _held(sets, memory), limit_ms, overlapped, levels)
    work, before = 0, -1
    for _ in range(_ROUNDS):
        work += backward(states, borders, about)
        if not states.begins[0, begin_at[:-1][tails.low == 0]].any():
            return None, work
        work += forward(states, borders, about)
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
    held = np.tile(frozen, (len(memory.in_flight), 1))
    for slot, in_flight in enumerate(memory.in_flight if memory.whole else ()):
        versions = int(in_flight) if in_flight > 1 else 0
        held[slot] += parameters * (versions + 2 + memory.own_sums[slot] + memory.optimizer_factor)
        held[slot] += saved * (in_flight if memory.recompute == NEVER else 1)
    return held


def _where(tails: TailArrays, states: States, sets: int) -> Possible:
    anywhere: BoolArray = np.logical_or.reduce(states.begins)
    low, high, begins = tails.low.copy(), tails.high.copy(), np.zeros(sets, dtype=np.bool_)
    for tail in range(len(low)):
        mine = np.flatnonzero(anywhere[states.begin_at[tail] : states.begin_at[tail + 1]]) + tails.low[tail]
        low[tail], high[tail] = (mine[0], mine[-1] + 1) if len(mine) else (0, 0)
        begins[mine] = True
    return Possible(low, high, begins)
