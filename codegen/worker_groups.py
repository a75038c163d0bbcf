"""Virtual workers that are alike are shown, drawn and exported once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from hetpipe_compiler.codegen.quantities import number_ranges
from hetpipe_compiler.ir.plan import Plan, VirtualWorker


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Virtual workers that are alike; ``first`` stands for all of them."""

    first: VirtualWorker
    members: tuple[VirtualWorker, ...]

    @property
    def title(self) -> str:
        """``virtual worker 2`` or ``virtual workers 0-3``."""
        plural = "s" if len(self.members) > 1 else ""
        return f"virtual worker{plural} {number_ranges(w.index for w in self.members)}"

    def devices(self, stage: int) -> tuple[str, ...]:
        """Device ids that run this stage, one per member."""
        return tuple(worker.stages[stage].device for worker in self.members)


def alike(plan: Plan, vw: int | None = None) -> tuple[WorkerGroup, ...]:
    """Groups of virtual workers whose stages equal each other in everything but the device's id.

    ``vw``: only that virtual worker, alone; raises `ArtifactError` HP441 if there is none.
    """
    return _group(
        _chosen(plan, vw), lambda w: w.model_dump_json(exclude={"index": True, "stages": {"__all__": {"device"}}})
    )


def same_cuts(plan: Plan, vw: int | None = None) -> tuple[WorkerGroup, ...]:
    """Groups of virtual workers that cut the model at the same places and run the parts on the same kinds."""
    return _group(_chosen(plan, vw), lambda w: tuple((s.kind, s.nodes) for s in w.stages))


def _chosen(plan: Plan, vw: int | None) -> tuple[VirtualWorker, ...]:
    return plan.virtual_workers if vw is None else (plan.worker(vw),)


def _group(all_workers: Sequence[VirtualWorker], key: Callable[[VirtualWorker], Hashable]) -> tuple[WorkerGroup, ...]:
    members: dict[Hashable, list[VirtualWorker]] = {}
    for worker in all_workers:
        members.setdefault(key(worker), []).append(worker)
    return tuple(WorkerGroup(workers[0], tuple(workers)) for workers in members.values())
