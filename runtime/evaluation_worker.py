"""One stage of an evaluation: ``python -m hetpipe_compiler.runtime.evaluation_worker --run DIR --vw N --stage S``.

Runs its stage forward only, in eval mode, on one minibatch after the other. Several are on their way at once: a stage
may be as many minibatches ahead of a later one as the virtual worker has stages. Stage 0 reports the samples of each
minibatch, the last stage its loss.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from hetpipe_compiler.ir.plan import Plan
from hetpipe_compiler.ir.schedule import Instruction, Op
from hetpipe_compiler.passes.schedules.forward_only import forward_only_programs
from hetpipe_compiler.runtime.channels import MessageKind
from hetpipe_compiler.runtime.eval_stage import EvalStage, own_leaf
from hetpipe_compiler.runtime.evaluation_data import EvaluationBatches
from hetpipe_compiler.runtime.events import EventSender
from hetpipe_compiler.runtime.initial import load_constants
from hetpipe_compiler.runtime.job import Job
from hetpipe_compiler.runtime.randomness import minibatch_seed, seed_torch
from hetpipe_compiler.runtime.stage_process import StageProcess, stage_main
from hetpipe_compiler.runtime.trained import load_trained
from hetpipe_compiler.runtime.transport.process_group import ProcessGroupMailbox

if TYPE_CHECKING:
    from hetpipe_compiler.frontend.load import LoadedWorkload


class EvaluationWorker(StageProcess):
    """Evaluates a stage."""

    def __init__(self, job: Job, plan: Plan, vw: int, stage: int, events: EventSender) -> None:
        super().__init__(job, plan, vw, stage, events)
        self._received: dict[int, dict[str, Any]] = {}
        self._outputs: dict[str, Any] = {}

    def work(self, loaded: LoadedWorkload, mailbox: ProcessGroupMailbox) -> None:
        """Run all minibatches forward."""
        self.activity.begin("loading the stage")
        stage, batches = self._load_stage(), self._batches(loaded)
        self.ready()
        self.activity.start_counting()
        stages = len(self.worker.stages)
        for instruction in self.instructions(forward_only_programs(stages)):
            if instruction.op is Op.FORWARD:
                mailbox.hold_back(stages)
                if batches is not None:
                    self._take_batch(instruction.index, batches)
                self._forward(stage, instruction.index)
            else:
                self._exchange(instruction, mailbox)
        self.activity.begin("finish")

    def _load_stage(self) -> EvalStage:
        job, plan = self.job, self.plan
        values = load_trained(plan, self.stage, job.weights, job.unsaved_buffers)
        return EvalStage(plan, job.plan, self.stage, {**values, **load_constants(plan, job.plan)}, self.device)

    def _batches(self, loaded: LoadedWorkload) -> EvaluationBatches | None:
        if self.index > 0:
            return None

        def report(minibatch: int, samples: int) -> None:
            self.events.send("batch", vw=self.vw, minibatch=minibatch, samples=samples)

        return EvaluationBatches(self.plan, self.vw, loaded, self.job.seed, self.job.minibatches, report)

    def _take_batch(self, minibatch: int, batches: EvaluationBatches) -> None:
        leaves = batches(minibatch)
        ports = [(port.name, port.batch_leaf) for port in self.stage.inputs if port.batch_leaf is not None]
        self._received[minibatch] = {name: own_leaf(leaves[leaf], self.device) for name, leaf in ports}

    def _forward(self, stage: EvalStage, minibatch: int) -> None:
        start = time.monotonic()
        seed_torch(minibatch_seed(self.job.seed, self.vw, minibatch, self.index))
        self._outputs = stage(self._received.pop(minibatch, {}))
        if self.is_last:
            loss = float(self._outputs[self.plan.loss or ""])
        self.pace(start, self.stage.forward_ms)
        if self.is_last:
            self.events.send("loss", vw=self.vw, minibatch=minibatch, loss=loss)

    def _exchange(self, instruction: Instruction, mailbox: ProcessGroupMailbox) -> None:
        minibatch, peer = instruction.index, instruction.peer
        assert peer is not None
        if instruction.op is Op.SEND_ACTIVATIONS:
            values = {name: self._outputs[name] for name in self.stage.sends[peer]}
            mailbox.send(MessageKind.ACTIVATIONS, minibatch, peer, values)
            return
        assert instruction.op is Op.RECEIVE_ACTIVATIONS, instruction
        names = tuple(port.name for port in self.stage.inputs if port.source == peer)
        values = mailbox.receive(MessageKind.ACTIVATIONS, minibatch, peer, names)
        self._received.setdefault(minibatch, {}).update(values)


if __name__ == "__main__":
    stage_main(EvaluationWorker)
