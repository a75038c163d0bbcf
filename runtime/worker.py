"""One stage of one virtual worker: ``python -m hetpipe_compiler.runtime.worker --run DIR --vw N --stage S``.

Executes the instructions of its stage one after the other, and reports what became of each minibatch.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hetpipe_compiler.ir.plan import Plan
from hetpipe_compiler.ir.schedule import Instruction, Op
from hetpipe_compiler.runtime.batches import BatchSource
from hetpipe_compiler.runtime.events import EventSender
from hetpipe_compiler.runtime.initial import load_constants, load_weights
from hetpipe_compiler.runtime.instruction_times import InstructionTimes
from hetpipe_compiler.runtime.job import Job
from hetpipe_compiler.runtime.placement import buffer_node, parameter_nodes
from hetpipe_compiler.runtime.programs import load_schedule
from hetpipe_compiler.runtime.stage import StageEngine
from hetpipe_compiler.runtime.stage_process import StageProcess, stage_main
from hetpipe_compiler.runtime.transport.parameter_link import ZmqParameterLink
from hetpipe_compiler.runtime.transport.process_group import ProcessGroupMailbox

if TYPE_CHECKING:
    from hetpipe_compiler.frontend.load import LoadedWorkload

SERVERS_KEY = "servers"


class Worker(StageProcess):
    """Trains a stage."""

    def __init__(self, job: Job, plan: Plan, vw: int, stage: int, events: EventSender) -> None:
        super().__init__(job, plan, vw, stage, events)
        self._samples: dict[int, int] = {}
        self._times = InstructionTimes()

    def work(self, loaded: LoadedWorkload, mailbox: ProcessGroupMailbox) -> None:
        """Train to the end."""
        link = self._link()
        self.activity.begin("loading the stage")
        engine = self._engine(loaded, mailbox, link)
        self.ready()
        self.activity.start_counting()
        for instruction in self.instructions(load_schedule(self.plan, self.job.plan).programs[self.vw]):
            clock = self._clock_of(instruction)
            start = clock()
            self._execute(engine, instruction)
            self._times.add(instruction, (clock() - start) * 1e3)
        self.activity.begin("finish")
        engine.finish()
        self.events.send("times", vw=self.vw, stage=self.index, times=self._times.summary())
        link.close()

    def _link(self) -> ZmqParameterLink:
        with self.activity.waiting("the addresses of the servers", "launcher"):
            endpoints: dict[str, str] = json.loads(self.store.get(SERVERS_KEY))
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
            transfer_ms=self.emulated(self._server_ms),
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
            workload=loaded,
            mailbox=mailbox,
            link=link,
            weights=load_weights(plan, job.weights, (*self.stage.parameters, *self.stage.buffers)),
            constants=load_constants(plan, job.plan),
            batches=batches,
            seed=job.seed,
            device=self.device,
            reproducible=job.reproducible,
            on_event=lambda event: self.events.send(event.pop("event"), **event),
        )

    def _execute(self, engine: StageEngine, instruction: Instruction) -> None:
        start = time.monotonic()
        before = engine.samples
        engine.execute(instruction)
        if instruction.op is Op.FORWARD:
            self.pace(start, self.stage.forward_ms)
            self._samples[instruction.index] = engine.samples - before
        elif instruction.op is Op.BACKWARD:
            self.pace(start, self.stage.backward_ms)
        elif instruction.op is Op.UPDATE:
            samples = self._samples.pop(instruction.index)
            loss = engine.losses.pop(instruction.index, None)
            if self.is_last:
                known = loss if loss is not None and math.isfinite(loss) else None
                self.events.send("minibatch", vw=self.vw, minibatch=instruction.index, loss=known, samples=samples)

    def _clock_of(self, instruction: Instruction) -> Callable[[], float]:
        """Seconds: where one CPU thread does all computing, its own time, so that other programs count for nothing.

        Profiles are measured so too. A pace is kept by waiting: it shows on a clock only.
        """
        alone = self.device.type == "cpu" and self.job.threads == 1 and self.time_scale is None
        computes = instruction.op in (Op.FORWARD, Op.BACKWARD)
        return time.thread_time if alone and computes else time.perf_counter

    def _server_ms(self, node: str, n_bytes: int) -> float:
        here = self.cluster.device(self.stage.device).node
        return (self.cluster.node(node).link if node == here else self.cluster.network).ms(n_bytes)


if __name__ == "__main__":
    stage_main(Worker)
