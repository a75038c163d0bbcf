"""What the kernels read and fill: closed sets, tails, devices, memory, and scratch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetpipe_compiler.ir.blocks import FloatArray
from hetpipe_compiler.passes.kernels.compiled import compiled

#: Whether a stage may recompute.
NEVER, WHERE_NEEDED, ALWAYS = 0, 1, 2

IntArray = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
WordArray = npt.NDArray[np.uint64]
BoolArray = npt.NDArray[np.bool_]
ByteArray = npt.NDArray[np.int8]


class NodeArrays(NamedTuple):
    """What kernels need to tell what a stage moves and holds. ``X_starts[i]:X_starts[i + 1]`` are i's entries.

    Attributes:
        value_starts, value_nodes: The node that makes a value, then those that read it.
        forward_bytes, backward_bytes: Per value.
        item_starts, item_nodes: Of a thing that several nodes hold and that counts once a stage, these nodes.
        item_category, item_bytes: Per thing.
        most: ``[quantity, node]``: workspace and largest parameter; the largest of a stage's nodes counts.
        most_first: ``[quantity, rank]``: all nodes, those with the most first.
    """

    value_starts: IntArray
    value_nodes: IntArray
    forward_bytes: IntArray
    backward_bytes: IntArray
    item_starts: IntArray
    item_nodes: IntArray
    item_category: IntArray
    item_bytes: IntArray
    most: IntArray
    most_first: IntArray


class SetArrays(NamedTuple):
    """Closed sets in order of worth.

    Attributes:
        words: ``[set, word]``: bit b of word w is node 64 w + b.
        grow_starts, grow_sets: As in `ClosedSets`.
        compute_ms: ``[class, set]``, forward and backward; ``forward_ms`` of it.
        replay: Per set, bytes that its nodes need to run their forward again.
        held: ``[category, set]``: bytes that its nodes hold; what several of them hold counts once.
        cross_starts, cross_values: ``cross_values[cross_starts[s]:cross_starts[s + 1]]`` cross set s.
        part_starts, part_items: Likewise the items that nodes in the set and nodes outside hold.
    """

    words: WordArray
    grow_starts: IntArray
    grow_sets: Int32Array
    compute_ms: FloatArray
    forward_ms: FloatArray
    replay: IntArray
    held: IntArray
    cross_starts: IntArray
    cross_values: Int32Array
    part_starts: IntArray
    part_items: Int32Array


class TailArrays(NamedTuple):
    """Tails, with the sets where each may begin.

    Attributes:
        by_class: Tails by ``first_class``: those of class a are ``by_class[class_starts[a]:class_starts[a + 1]]``.
        longer: ``[tail, class]``: the tail made by a stage of that class before it, -1 where there is none.
        low, high: First and last + 1 set before the tail.
        rest_low, rest_high: The same for what follows its first stage.
        rest_at: R of tail t is stored at ``rest_at[t]:rest_at[t + 1]``.
        begins: Per set, whether any tail may begin there.
        beyond: Per set, the first one that no stage from it can reach.
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
    beyond: IntArray


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


@compiled
def new_choices(entries: int) -> Choices:
    """Nothing chosen yet."""
    return Choices(
        np.full(entries, np.inf),
        np.zeros(entries, dtype=np.int64),
        np.full(entries, -1, dtype=np.int32),
        np.zeros(entries, dtype=np.int32),
        np.zeros(entries, dtype=np.int8),
    )


class Reached(NamedTuple):
    """Scratch: the sets where stages from one set can end, with the stages' sums.

    Attributes:
        ends: Sets at which a tail begins, descending: those found so far.
        end: Per entry, the set where the stage ends.
        sums: ``[entry, :]``: received, returned, sent back, parameters, frozen, saved, workspace, largest parameter.
        outside: ``[quantity, rank]``: the nodes outside of the stage's first border in the order of
            `NodeArrays.most_first`.
    """

    ends: IntArray
    end: IntArray
    sums: IntArray
    outside: IntArray


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


class Sweep(NamedTuple):
    """What a sweep over closed sets reads, and its scratch.

    A kernel unpacks it first of all: to reach into it from inside a loop takes twice the time.

    Attributes:
        exact_stages: Only pipelines with so many stages count; 0: any.
        overlapped: A stage's time is the longer of computation and transfers, not their sum.
        overflow: A stage's objective is the bytes by which it exceeds its device, and memory is no constraint.
    """

    sets: SetArrays
    nodes: NodeArrays
    tails: TailArrays
    devices: DeviceArrays
    memory: MemoryArrays
    reached: Reached
    stages: Stages
    exact_stages: int
    overlapped: bool
    overflow: bool


def new_reached(sets: int, nodes: int) -> Reached:
    """Scratch for so many sets and nodes."""
    return Reached(
        np.zeros(sets, dtype=np.int64),
        np.zeros(sets, dtype=np.int64),
        np.zeros((sets, 8), dtype=np.int64),
        np.zeros((2, nodes), dtype=np.int64),
    )


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
