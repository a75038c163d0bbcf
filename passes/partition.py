"""Partition: cut the block chain into stages for one virtual worker's devices (spec section 4).

Rule:
    1. A stage is an interval of the chain on one device. Its time is forward + backward on that device's kind, plus the
       bytes received forward over the link to the previous stage, plus the gradient bytes received over the link to the
       next one.
    2. The plan minimises the slowest stage's time over all cuts, and all orders and subsets of the devices (in a group
       with ``ordered``, subsets in the group's order).
    3. Every stage fits in its device's memory with its minibatches in flight.
    4. Ties: less communication, then less memory, then the first in the cluster file's order.

`partition_search` has the recurrence, `stage_memory` the memory formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetpipe_compiler.ir.blocks import BlockChain, FloatArray
from hetpipe_compiler.ir.cluster import Cluster, Device
from hetpipe_compiler.passes.allocate import Group
from hetpipe_compiler.passes.chain_tables import chain_tables
from hetpipe_compiler.passes.device_classes import device_classes
from hetpipe_compiler.passes.in_flight import InFlightRule
from hetpipe_compiler.passes.infeasible import does_not_fit
from hetpipe_compiler.passes.partition_search import Found, Search, search
from hetpipe_compiler.passes.split import split_boundaries
from hetpipe_compiler.passes.stage_memory import MemoryRule, stage_memory


@dataclass(frozen=True)
class PlannedStage:
    """One stage of a plan. Times are milliseconds of one minibatch.

    Attributes:
        blocks: Half-open interval of the chain.
        receive_ms: Receiving activations from the previous stage and gradients from the next.
        stage_ms: forward + backward + receive: what the partitioner balances.
        receives_bytes: Activations and gradients received.
        memory: `stage_memory.stage_memory`'s parts.
        in_flight: w_s.
    """

    device: Device
    blocks: tuple[int, int]
    forward_ms: float
    backward_ms: float
    receive_ms: float
    stage_ms: float
    receives_bytes: int
    memory: dict[str, int]
    in_flight: int


@dataclass(frozen=True)
class Partition:
    """The partition of one virtual worker, its slowest stage's time, a bound below that, and the devices left idle."""

    stages: tuple[PlannedStage, ...]
    bottleneck_ms: float
    lower_bound_ms: float
    unused: tuple[Device, ...]


def partition(
    chain: BlockChain,
    group: Group,
    cluster: Cluster,
    *,
    nm: int,
    in_flight_rule: InFlightRule,
    staleness: int = 0,
    reproducible: bool = False,
    split: Sequence[str | int] | None = None,
) -> Partition:
    """The best partition with ``nm`` minibatches in flight on the first stage and ``in_flight_rule`` on the others.

    Args:
        staleness, reproducible: D, and whether the run will be reproducible: both count in memory.
        split: Where stages begin (see `split`); then only the order of the devices is searched.

    Raises:
        PlanningError: HP301 nothing fits, HP302 too many orders to search, HP303 or HP306 a wrong ``split``, HP304 no
            times for a device kind.
    """
    rule = MemoryRule(chain.optimizer_factor, staleness, reproducible)
    boundaries = split_boundaries(chain, split) if split is not None else None
    space = search(chain_tables(chain), device_classes(group, cluster, chain), rule, boundaries)
    found = space.fastest(nm, in_flight_rule)
    if found is None:
        raise does_not_fit(chain, space, nm, by_hand=split is not None)
    stages = planned_stages(space, found, in_flight_rule.vector(nm, len(found.cuts)))
    used = {stage.device.id for stage in stages}
    unused = tuple(device for device in group.devices if device.id not in used)
    return Partition(stages, max(stage.stage_ms for stage in stages), space.lower_bound_ms, unused)


def planned_stages(space: Search, found: Found, in_flight: Sequence[int]) -> tuple[PlannedStage, ...]:
    """The stages of ``found`` with devices, times and memory."""
    devices = space.classes.assign(found.classes)
    tables = space.tables
    stages = []
    for index, ((lo, hi), device, w) in enumerate(zip(found.cuts, devices, in_flight, strict=True)):
        forward, backward = tables.forward_ms[device.kind.name], tables.backward_ms[device.kind.name]
        forward_ms, backward_ms = float(forward[hi] - forward[lo]), float(backward[hi] - backward[lo])
        receive_ms = _neighbour_ms(space, found.classes, index, index - 1, int(tables.received[lo, hi]))
        receive_ms += _neighbour_ms(space, found.classes, index, index + 1, int(tables.returned[lo, hi]))
        stages.append(
            PlannedStage(
                device=device,
                blocks=(lo, hi),
                forward_ms=forward_ms,
                backward_ms=backward_ms,
                receive_ms=receive_ms,
                stage_ms=forward_ms + backward_ms + receive_ms,
                receives_bytes=int(tables.received[lo, hi] + tables.returned[lo, hi]),
                memory=stage_memory(tables, (lo, hi), w, device.kind, space.memory_rule),
                in_flight=w,
            )
        )
    return tuple(stages)


def _neighbour_ms(space: Search, classes: tuple[int, ...], stage: int, neighbour: int, n_bytes: int) -> float:
    if not n_bytes or not 0 <= neighbour < len(classes):
        return 0.0
    link = int(space.classes.link_between[classes[stage], classes[neighbour]])
    return space.classes.links[link].ms(n_bytes)


def message_ms(chain: BlockChain, stages: Sequence[PlannedStage], cluster: Cluster) -> tuple[FloatArray, FloatArray]:
    """Every real message: ``[i, j]`` milliseconds of the activations, and of the gradients, from stage i to stage j.

    NaN where none is sent. Unlike `PlannedStage.receive_ms` a value that skips stages goes straight over its own link.
    """
    count = len(stages)
    starts = [stage.blocks[0] for stage in stages]
    activation_bytes, gradient_bytes = np.full((count, count), -1), np.full((count, count), -1)
    for value in chain.values:
        source = int(np.searchsorted(starts, value.producer, side="right")) - 1
        readers = {int(stage) - 1 for stage in np.searchsorted(starts, value.consumers, side="right")}
        for reader in readers - {source}:
            activation_bytes[source, reader] = max(0, activation_bytes[source, reader]) + value.forward_bytes
            if value.backward_bytes:
                gradient_bytes[reader, source] = max(0, gradient_bytes[reader, source]) + value.backward_bytes
    return _ms(activation_bytes, stages, cluster), _ms(gradient_bytes, stages, cluster)


def _ms(n_bytes: npt.NDArray[np.int64], stages: Sequence[PlannedStage], cluster: Cluster) -> FloatArray:
    table = np.full(n_bytes.shape, np.nan)
    for i, j in zip(*np.nonzero(n_bytes >= 0), strict=True):
        table[i, j] = cluster.link_between(stages[i].device, stages[j].device).ms(int(n_bytes[i, j]))
    return table
