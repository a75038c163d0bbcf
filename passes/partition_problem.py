"""What a partitioner of one's own (``--partitioner``) is asked: the public interface of the planner.

A partitioner is a function of one `PartitionProblem`. It returns the stages of one virtual worker in order, each as
(id of its device, its blocks), or None if it finds none that fit::

    def even(problem):
        cuts = [len(problem.chain) * i // len(problem.devices) for i in range(len(problem.devices) + 1)]
        return [(device.id, range(a, b)) for device, a, b in zip(problem.devices, cuts, cuts[1:])]

It decides nothing but the stages: they are checked, then costed, given their minibatches in flight, scheduled and
verified as those of our search are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from hetpipe_compiler.ir.blocks import BlockChain
from hetpipe_compiler.ir.cluster import Cluster, Device, Link
from hetpipe_compiler.passes.allocate import Group
from hetpipe_compiler.passes.in_flight import InFlightRule
from hetpipe_compiler.passes.stage_memory import MemoryRule, stage_memory
from hetpipe_compiler.passes.stage_sums import stage_sums

_ONE_F_ONE_B = InFlightRule(1.0)


@dataclass(frozen=True)
class PartitionProblem:
    """Where to cut ``chain`` for the devices of one virtual worker. Milliseconds and bytes are of one minibatch.

    Attributes:
        chain: The blocks in a topological order, their times per device kind, the values between them.
        cluster: With the links: ``cluster.link_between(device, device)``.
        group: Its devices; ``group.ordered``: stages must follow their order.
        nm: Minibatches in flight.
        objective: ``hetpipe`` or ``overlapped``: what `stage_ms` makes of computation and transfers.
        memory_rule: What beside the blocks counts in `memory_bytes`.
    """

    chain: BlockChain
    cluster: Cluster
    group: Group
    nm: int
    objective: str
    memory_rule: MemoryRule

    @property
    def devices(self) -> tuple[Device, ...]:
        """Ids, kinds (with ``memory_bytes``) and nodes; not all need be used."""
        return self.group.devices

    def in_flight(self, stages: int) -> tuple[int, ...]:
        """1F1B's minibatches in flight on each stage of a pipeline: a good guess of what there will be.

        What must fit is Nm on the first stage and one on each other. Of all vectors that fit, the fastest is taken.
        """
        return _ONE_F_ONE_B.vector(self.nm, stages)

    def link(self, a: Device, b: Device) -> Link:
        """Between two devices: ``link(a, b).ms(n_bytes)``."""
        return self.cluster.link_between(a, b)

    def reads(self, block: int) -> tuple[int, ...]:
        """The blocks whose values ``block`` reads: they belong in its own stage or an earlier one."""
        return tuple(sorted({value.producer for value in self.chain.values if block in value.consumers}))

    def memory_bytes(self, blocks: Collection[int], device: Device, in_flight: int) -> int:
        """Of such a stage, with the device's reserve; not to exceed ``device.kind.memory_bytes``.

        If ``memory_rule`` lets it, a stage that would exceed that recomputes: its forward time then counts twice.
        """
        return stage_memory(stage_sums(self.chain, blocks), in_flight, device.kind, self.memory_rule, self.nm)["total"]

    def stage_ms(
        self, blocks: Collection[int], device: Device, before: Device | None = None, after: Device | None = None
    ) -> float:
        """What the slowest stage is judged by: computation, and what comes from the stages ``before`` and ``after``."""
        sums, kind = stage_sums(self.chain, blocks), device.kind.name
        compute_ms = sums.forward_ms[kind] + sums.backward_ms[kind]
        receive_ms = self.link(device, before).ms(sums.received) if before is not None else 0.0
        receive_ms += self.link(device, after).ms(sums.returned) if after is not None else 0.0
        return max(compute_ms, receive_ms) if self.objective == "overlapped" else compute_ms + receive_ms


#: Stages in order, each (device id, blocks); None: nothing fits.
Answer = Iterable[tuple[str, Iterable[int]]] | None
Partitioner = Callable[[PartitionProblem], Answer]
