"""Partition: cut the block chain into stages for one virtual worker's devices.

Rule:
    1. A stage is the difference of two nested closed sets of blocks (what a block reads is in the same stage or an
       earlier one) on one device. Its time is forward + backward on that device's kind, plus the bytes received forward
       over the link to the previous stage, plus the gradient bytes received over the link to the next one; with the
       objective ``overlapped`` it is the longer of computation and transfers.
    2. The plan minimises the slowest stage's time over all cuts, and all orders and subsets of the devices (in a group
       with ``ordered``, subsets in the group's order).
    3. Every stage fits in its device's memory with its minibatches in flight; where it does not, and recomputing is
       allowed, it recomputes: its forward time counts twice, what autograd saves once (`stage_memory`).
    4. Ties: less communication, then less memory, then the chain's own order, then the cluster file's order.

Such stages are intervals of another topological order of the blocks, `Partition.order`; `BlockChain.permuted` makes the
chain of it. `partition_search` says how far the search is exact, `kernels.least_bottleneck` has the recurrence,
`stage_memory` the memory formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetpipe_compiler.ir.blocks import BlockChain, FloatArray
from hetpipe_compiler.ir.cluster import Cluster, Device
from hetpipe_compiler.passes.allocate import Group
from hetpipe_compiler.passes.device_classes import device_classes
from hetpipe_compiler.passes.in_flight import InFlightRule
from hetpipe_compiler.passes.infeasible import does_not_fit
from hetpipe_compiler.passes.orders import MAX_SETS
from hetpipe_compiler.passes.partition_search import BUDGET, Found, Search, search
from hetpipe_compiler.passes.split import split_boundaries
from hetpipe_compiler.passes.stage_memory import MemoryRule, Recompute, stage_memory

#: Sums in another order differ by less.
_EQUAL = 1e-9


@dataclass(frozen=True)
class PlannedStage:
    """One stage of a plan. Times are milliseconds of one minibatch.

    Attributes:
        blocks: Half-open interval of the plan's order of the blocks.
        receive_ms: Receiving activations from the previous stage and gradients from the next.
        stage_ms: What the partitioner balances: forward + backward + receive (``overlapped``: the longer of the two).
        receives_bytes: Activations and gradients received.
        memory: `stage_memory.stage_memory`'s parts.
        in_flight: w_s.
        recompute: Whether it runs its forward again before its backward; ``backward_ms`` contains that.
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
    recompute: bool = False


class Bounded:
    """What has a bottleneck and a proven bound on it."""

    bottleneck_ms: float
    lower_bound_ms: float

    @property
    def gap(self) -> float:
        """By what share of the bound the bottleneck may exceed the least there is."""
        return relative_gap(self.bottleneck_ms, self.lower_bound_ms)

    @property
    def optimal(self) -> bool:
        """Whether the bottleneck is proven to be the least."""
        return self.gap == 0.0


@dataclass(frozen=True)
class Partition(Bounded):
    """The partition of one virtual worker.

    Attributes:
        order: The chain's blocks in the order of the stages, which are intervals of it.
        bottleneck_ms: The slowest stage's ``stage_ms``.
        lower_bound_ms: Proven: no partition under the same constraints can have a smaller bottleneck.
        unused: Devices of the group that no stage uses.
    """

    stages: tuple[PlannedStage, ...]
    order: tuple[int, ...]
    bottleneck_ms: float
    lower_bound_ms: float
    unused: tuple[Device, ...]


def relative_gap(bottleneck_ms: float, lower_bound_ms: float) -> float:
    """``bottleneck / bound - 1``; 0.0 where they are equal but for rounding."""
    if bottleneck_ms <= lower_bound_ms * (1 + _EQUAL):
        return 0.0
    return bottleneck_ms / lower_bound_ms - 1.0 if lower_bound_ms > 0 else float("inf")


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
    objective: str = "hetpipe",
    recompute: Recompute = Recompute.NEVER,
    max_sets: int = MAX_SETS,
    budget: int = BUDGET,
) -> Partition:
    """The best partition with ``nm`` minibatches in flight on the first stage and ``in_flight_rule`` on the others.

    Args:
        staleness, reproducible: D, and whether the run will be reproducible: both count in memory.
        split: Where stages begin (see `split`); then only the order of the devices is searched.
        objective: ``hetpipe`` or ``overlapped``.
        recompute: Which stages keep their inputs only and take their forward time twice.
        max_sets, budget: See `partition_search.search`.

    Raises:
        PlanningError: HP301 nothing fits, HP302 too many orders to search, HP303 or HP306 a wrong ``split``, HP304 no
            times for a device kind, HP308 nothing found, but not everything searched.
    """
    rule = MemoryRule.of(chain, staleness, reproducible, recompute)
    boundaries = split_boundaries(chain, split) if split is not None else None
    space = search(
        chain,
        device_classes(group, cluster, chain),
        rule,
        boundaries,
        overlapped=objective == "overlapped",
        max_sets=max_sets,
        budget=budget,
    )
    found = space.fastest(nm, in_flight_rule)
    if found is None:
        raise does_not_fit(chain, space, nm, by_hand=split is not None, in_flight_rule=in_flight_rule)
    stages = planned_stages(space, found, in_flight_rule.vector(nm, len(found.stages)), nm)
    used = {stage.device.id for stage in stages}
    unused = tuple(device for device in group.devices if device.id not in used)
    bottleneck_ms = max(stage.stage_ms for stage in stages)
    return Partition(stages, found.order, bottleneck_ms, min(found.lower_bound, bottleneck_ms), unused)


def planned_stages(
    space: Search, found: Found, in_flight: Sequence[int], nm: int, recompute: Sequence[bool] | None = None
) -> tuple[PlannedStage, ...]:
    """The stages of ``found`` with devices, times and memory; which of them ``recompute`` (None: as the rule says)."""
    recompute = recompute or space.recompute_flags(found, tuple(in_flight), nm)
    devices = space.classes.assign(found.classes)
    stages = []
    for index, (blocks, device, w) in enumerate(zip(found.stages, devices, in_flight, strict=True)):
        sums = space.sums(blocks)
        forward_ms, backward_ms = sums.forward_ms[device.kind.name], sums.backward_ms[device.kind.name]
        backward_ms += forward_ms if recompute[index] else 0.0
        receive_ms = _neighbour_ms(space, found.classes, index, index - 1, sums.received)
        receive_ms += _neighbour_ms(space, found.classes, index, index + 1, sums.returned)
        compute_ms = forward_ms + backward_ms
        stages.append(
            PlannedStage(
                device=device,
                blocks=found.cuts[index],
                forward_ms=forward_ms,
                backward_ms=backward_ms,
                receive_ms=receive_ms,
                stage_ms=max(compute_ms, receive_ms) if space.line.overlapped else compute_ms + receive_ms,
                receives_bytes=sums.received + sums.returned,
                memory=stage_memory(sums, w, device.kind, space.memory_rule, nm, recompute=recompute[index]),
                in_flight=w,
                recompute=recompute[index],
            )
        )
    return tuple(stages)


def slowest_ms(space: Search, found: Found, in_flight: Sequence[int], nm: int) -> float:
    """The bottleneck of ``found`` with these minibatches in flight."""
    return max(stage.stage_ms for stage in planned_stages(space, found, in_flight, nm))


def _neighbour_ms(space: Search, classes: tuple[int, ...], stage: int, neighbour: int, n_bytes: int) -> float:
    if not n_bytes or not 0 <= neighbour < len(classes):
        return 0.0
    link = int(space.classes.link_between[classes[stage], classes[neighbour]])
    return space.classes.links[link].ms(n_bytes)


def message_ms(chain: BlockChain, stages: Sequence[PlannedStage], cluster: Cluster) -> tuple[FloatArray, FloatArray]:
    """Every real message: ``[i, j]`` milliseconds of the activations, and of the gradients, from stage i to stage j.

    ``chain``: in the plan's order of blocks (`BlockChain.permuted`).
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
