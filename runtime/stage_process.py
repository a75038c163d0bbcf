"""What every process of a stage does, training or evaluating: joins its virtual worker, reports, keeps the time.

The processes of a virtual worker are a process group (rank = stage), so one virtual worker is nothing to another. On an
emulated cluster a forward or backward takes at least its predicted time, and a message as long as its link takes.
"""

from __future__ import annotations

import argparse
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hetpipe_compiler.frontend.load import load_workload
from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.ir.plan import Plan, Stage
from hetpipe_compiler.ir.schedule import Instruction, StageProgram
from hetpipe_compiler.passes.place_communication import buffered_instructions, stage_instructions
from hetpipe_compiler.passes.simulate.costs import PipelineCosts
from hetpipe_compiler.runtime.child import child_process
from hetpipe_compiler.runtime.events import EventSender, StatusThread
from hetpipe_compiler.runtime.job import Job, worker_name
from hetpipe_compiler.runtime.transport.process_group import PeerLostError, ProcessGroupMailbox
from hetpipe_compiler.runtime.waits import Activity

if TYPE_CHECKING:
    from hetpipe_compiler.frontend.load import LoadedWorkload

#: Waits inside torch.distributed have no end of their own: the launcher's watchdog, which knows more, ends a run.
_FOREVER = timedelta(days=30)


class StageProcess(ABC):
    """The parts of a stage's process, from a job.

    Attributes:
        time_scale: Of an emulated cluster; None: no emulation.
        device: Where it computes.
        store: The launcher's; from `run` on.
    """

    def __init__(self, job: Job, plan: Plan, vw: int, stage: int, events: EventSender) -> None:
        self.job, self.plan, self.vw, self.index = job, plan, vw, stage
        self.events = events
        self.activity = Activity()
        self.worker = plan.virtual_workers[vw]
        self.stage: Stage = self.worker.stages[stage]
        self.is_last = stage == len(self.worker.stages) - 1
        self.cluster = Cluster.from_dict(plan.cluster)
        emulate = self.cluster.emulate
        self.time_scale = emulate.time_scale if emulate is not None and job.backend == "cpu" else None
        self.device = self._choose_device()
        self.store: Any = None

    @abstractmethod
    def work(self, loaded: LoadedWorkload, mailbox: ProcessGroupMailbox) -> None:
        """Everything between joining the others and leaving together with them."""

    def run(self) -> None:
        """Do the stage's part to the end."""
        status = StatusThread(self.events, self.activity, lambda: {"vw": self.vw, "stage": self.index})
        status.start()
        self.activity.begin("loading the workload")
        loaded = load_workload(self.job.workload, self.job.settings)
        self.store = self._join()
        mailbox = ProcessGroupMailbox(
            vw=self.vw,
            stage=self.index,
            device=self.device,
            activity=self.activity,
            transfer_ms=self.emulated(self._stage_ms),
        )
        self.work(loaded, mailbox)
        mailbox.flush()
        with self._with_peers("the end of the run"):
            dist.barrier()  # nobody leaves while a peer may still talk to it
        dist.destroy_process_group()
        status.stop()

    def ready(self) -> None:
        """Tell the launcher that everything is loaded, and was of one plan: it may be compiled again from here on."""
        self.job.load_plan()
        self.events.send("ready")

    def instructions(self, programs: Sequence[StageProgram]) -> Iterator[Instruction]:
        """The stage's own, messages included, from the programs of its virtual worker; `Activity` is told of each."""
        costs = PipelineCosts.of_plan(self.worker, self.cluster)
        # NCCL runs a pair's messages one by one on one stream, so both sides need one order; Gloo's sends return.
        place = stage_instructions if self.job.backend == "cuda" else buffered_instructions
        for instruction in place(programs, costs, self.job.minibatches, self.index):
            self.activity.begin(str(instruction))
            yield instruction

    def pace(self, start: float, predicted_ms: float) -> None:
        """On an emulated cluster: sleep until ``predicted_ms`` after ``start`` (monotonic seconds)."""
        if self.time_scale is not None:
            self.activity.pace(start + predicted_ms * self.time_scale / 1e3 - time.monotonic())

    def emulated(self, transfer_ms: Callable[[Any, int], float]) -> Callable[[Any, int], float] | None:
        """The times of messages as the emulated cluster has them; None without one."""
        scale = self.time_scale
        return None if scale is None else lambda peer, n_bytes: scale * transfer_ms(peer, n_bytes)

    def _choose_device(self) -> torch.device:
        if self.job.backend == "cpu":
            return torch.device("cpu")
        before = sum(len(worker.stages) for worker in self.plan.virtual_workers[: self.vw])
        device = torch.device("cuda", before + self.index)
        torch.cuda.set_device(device)
        return device

    def _join(self) -> Any:
        """Make the process group of this virtual worker on the launcher's store."""
        host, _, port = self.job.store.rpartition(":")
        self.activity.begin("joining")
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, int(port), is_master=False, wait_for_workers=False, timeout=_FOREVER
        )
        with self._with_peers("the start"):
            dist.init_process_group(
                "nccl" if self.device.type == "cuda" else "gloo",
                store=dist.PrefixStore(f"vw{self.vw}/0", store),  # type: ignore[attr-defined]
                rank=self.index,
                world_size=len(self.worker.stages),
                timeout=_FOREVER,
                device_id=self.device if self.device.type == "cuda" else None,
            )
        return store

    @contextmanager
    def _with_peers(self, what: str) -> Iterator[None]:
        """Around what all stages of this virtual worker do together; an error there comes from a peer that is gone."""
        with self.activity.waiting(what, f"the other stages of vw{self.vw}"):
            try:
                yield
            except RuntimeError as error:
                raise PeerLostError(
                    "HP531", f"lost the other stages at {what}: {error}", where=worker_name(self.vw, self.index)
                ) from error

    def _stage_ms(self, peer: int, n_bytes: int) -> float:
        ends = (self.cluster.device(self.worker.stages[peer].device), self.cluster.device(self.stage.device))
        return self.cluster.link_between(*ends).ms(n_bytes)


def stage_main(process: type[StageProcess]) -> None:
    """Entry point of a stage's process: ``python -m MODULE --run DIR --vw N --stage S``."""
    parser = argparse.ArgumentParser(prog="hetpipe-stage")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--vw", type=int, required=True)
    parser.add_argument("--stage", type=int, required=True)
    arguments = parser.parse_args()
    job = Job.load(arguments.run)
    with child_process(job, worker_name(arguments.vw, arguments.stage)) as events:
        process(job, job.load_plan(), arguments.vw, arguments.stage, events).run()
