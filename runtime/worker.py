"""One stage of one virtual worker: ``python -m hetpipe_compiler.runtime.worker --run DIR --vw N --stage S``.

Joins the process group of its virtual worker (rank = stage, so one group is nothing to another), then executes its
instructions one after the other. On an emulated cluster a forward or backward takes at least its predicted time.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hetpipe_compiler.frontend.load import load_workload
from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.ir.plan import Plan, Stage
from hetpipe_compiler.ir.schedule import Instruction, Op
from hetpipe_compiler.passes.place_communication import buffered_instructions, stage_instructions
from hetpipe_compiler.passes.simulate.costs import PipelineCosts
from hetpipe_compiler.runtime.batches import BatchSource
from hetpipe_compiler.runtime.child import child_process
from hetpipe_compiler.runtime.events import EventSender, StatusThread
from hetpipe_compiler.runtime.initial import load_constants, load_weights
from hetpipe_compiler.runtime.instruction_times import InstructionTimes
from hetpipe_compiler.runtime.job import Job, worker_name
from hetpipe_compiler.runtime.placement import buffer_node, parameter_nodes
from hetpipe_compiler.runtime.programs import load_schedule
from hetpipe_compiler.runtime.stage import StageEngine
from hetpipe_compiler.runtime.transport.parameter_link import ZmqParameterLink
from hetpipe_compiler.runtime.transport.process_group import PeerLostError, ProcessGroupMailbox
from hetpipe_compiler.runtime.waits import Activity

if TYPE_CHECKING:
    from hetpipe_compiler.frontend.load import LoadedWorkload

#: Waits inside torch.distributed have no end of their own: the launcher's watchdog, which knows more, ends a run.
_FOREVER = timedelta(days=30)
SERVERS_KEY = "servers"


class Worker:
    """The parts of a worker process, from a job.

    Attributes:
        time_scale: Of an emulated cluster; None: no emulation.
    """

    def __init__(self, job: Job, plan: Plan, vw: int, stage: int, events: EventSender) -> None:
        self.job, self.plan, self.vw, self.index = job, plan, vw, stage
        self.events = events
        self.activity = Activity()
        self.stage: Stage = plan.virtual_workers[vw].stages[stage]
        self.cluster = Cluster.from_dict(plan.cluster)
        emulate = self.cluster.emulate
        self.time_scale = emulate.time_scale if emulate is not None and job.backend == "cpu" else None
        self.device = self._choose_device()
        self._samples: dict[int, int] = {}
        self._times = InstructionTimes()

    def run(self) -> None:
        """Train to the end."""
        status = StatusThread(self.events, self.activity, lambda: {"vw": self.vw, "stage": self.index})
        status.start()
        self.activity.begin("loading the workload")
        loaded = load_workload(self.job.workload, self.job.settings)
        store = self._join()
        mailbox = ProcessGroupMailbox(
            vw=self.vw,
            stage=self.index,
            device=self.device,
            activity=self.activity,
            transfer_ms=self._emulated(self._stage_ms),
        )
        link = self._link(store)
        self.activity.begin("loading the stage")
        engine = self._engine(loaded, mailbox, link)
        self.events.send("ready")
        self.activity.start_counting()
        for instruction in self._instructions():
            clock = self._clock_of(instruction)
            start = clock()
            self._execute(engine, instruction)
            self._times.add(instruction, (clock() - start) * 1e3)
        self.activity.begin("finish")
        engine.finish()
        self.events.send("times", vw=self.vw, stage=self.index, times=self._times.summary())
        mailbox.flush()
        with self._with_peers("the end of the run"):
            dist.barrier()  # nobody leaves while a peer may still talk to it
        link.close()
        dist.destroy_process_group()
        status.stop()

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

    # --- parts -----------------------------------------------------------------------------------------------------

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
                world_size=len(self.plan.virtual_workers[self.vw].stages),
                timeout=_FOREVER,
                device_id=self.device if self.device.type == "cuda" else None,
            )
        return store

    def _link(self, store: Any) -> ZmqParameterLink:
        with self.activity.waiting("the addresses of the servers", "launcher"):
            endpoints: dict[str, str] = json.loads(store.get(SERVERS_KEY))
        placement = parameter_nodes(self.plan, self.stage.parameters)
        home = buffer_node(self.plan, self.cluster.device(self.stage.device).node)
        nodes = {*placement.values(), home}
        return ZmqParameterLink(
            vw=self.vw,
            stage=self.index,
            servers={node: endpoint for node, endpoint in endpoints.items() if node in nodes},
            placement=placement,
            buffer_node=home,
            activity=self.activity,
            transfer_ms=self._emulated(self._server_ms),
        )

    def _engine(self, loaded: LoadedWorkload, mailbox: ProcessGroupMailbox, link: ZmqParameterLink) -> StageEngine:
        job, plan = self.job, self.plan
        batches = None
        if self.index == 0:
            batches = BatchSource(
                plan,
                self.vw,
                loaded,
                job.seed,
                job.shard_lengths,
                on_note=lambda text: self.events.send("note", text=text),
            )
        return StageEngine(
            plan,
            job.plan,
            self.vw,
            self.index,
            loaded,
            mailbox,
            link,
            load_weights(plan, job.weights, (*self.stage.parameters, *self.stage.buffers)),
            load_constants(plan, job.plan),
            batches,
            job.seed,
            self.device,
            job.reproducible,
            on_event=lambda event: self.events.send(event.pop("event"), **event),
        )

    def _instructions(self) -> Iterator[Instruction]:
        worker = self.plan.virtual_workers[self.vw]
        programs = load_schedule(self.plan, self.job.plan).programs[self.vw]
        costs = PipelineCosts.of_plan(worker, self.cluster)
        # NCCL runs a pair's messages one by one on one stream, so both sides need one order; Gloo's sends return.
        place = stage_instructions if self.job.backend == "cuda" else buffered_instructions
        return place(programs, costs, self.job.minibatches, self.index)

    # --- work ------------------------------------------------------------------------------------------------------

    def _execute(self, engine: StageEngine, instruction: Instruction) -> None:
        self.activity.begin(str(instruction))
        start = time.monotonic()
        before = engine.samples
        engine.execute(instruction)
        if instruction.op is Op.FORWARD:
            self._pace(start, self.stage.forward_ms)
            self._samples[instruction.index] = engine.samples - before
        elif instruction.op is Op.BACKWARD:
            self._pace(start, self.stage.backward_ms)
        elif instruction.op is Op.UPDATE:
            samples = self._samples.pop(instruction.index)
            loss = engine.losses.pop(instruction.index, None)
            if self.index == len(self.plan.virtual_workers[self.vw].stages) - 1:
                known = loss if loss is not None and math.isfinite(loss) else None
                self.events.send("minibatch", vw=self.vw, minibatch=instruction.index, loss=known, samples=samples)

    def _clock_of(self, instruction: Instruction) -> Callable[[], float]:
        """Seconds: where one CPU thread does all computing, its own time, so that other programs count for nothing.

        Profiles are measured so too. A pace is kept by waiting: it shows on a clock only.
        """
        alone = self.device.type == "cpu" and self.job.threads == 1 and self.time_scale is None
        computes = instruction.op in (Op.FORWARD, Op.BACKWARD)
        return time.thread_time if alone and computes else time.perf_counter

    def _pace(self, start: float, predicted_ms: float) -> None:
        if self.time_scale is not None:
            self.activity.pace(start + predicted_ms * self.time_scale / 1e3 - time.monotonic())

    def _emulated(self, transfer_ms: Callable[[Any, int], float]) -> Callable[[Any, int], float] | None:
        scale = self.time_scale
        return None if scale is None else lambda peer, n_bytes: scale * transfer_ms(peer, n_bytes)

    def _stage_ms(self, peer: int, n_bytes: int) -> float:
        other = self.plan.virtual_workers[self.vw].stages[peer]
        ends = (self.cluster.device(other.device), self.cluster.device(self.stage.device))
        return self.cluster.link_between(*ends).ms(n_bytes)

    def _server_ms(self, node: str, n_bytes: int) -> float:
        here = self.cluster.device(self.stage.device).node
        return (self.cluster.node(node).link if node == here else self.cluster.network).ms(n_bytes)


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="hetpipe-worker")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--vw", type=int, required=True)
    parser.add_argument("--stage", type=int, required=True)
    arguments = parser.parse_args()
    job = Job.load(arguments.run)
    with child_process(job, worker_name(arguments.vw, arguments.stage)) as events:
        Worker(job, Plan.load(job.plan), arguments.vw, arguments.stage, events).run()


if __name__ == "__main__":
    main()
