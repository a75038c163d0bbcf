"""Train with a plan in one process and virtual time: the reference semantics of a run.

All stages of all virtual workers execute their programs on the same engine as the distributed workers. Computations,
messages, pushes and pulls take their predicted times on a virtual clock; the stage that can go on first goes first
(ties: the lower virtual worker, then the lower stage). So a run is deterministic, in free-running mode too. Only sends
are not as in a distributed run: they never wait for their receiver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.ir.schedule import Instruction, Op
from hetpipe_compiler.runtime.batches import BatchSource
from hetpipe_compiler.runtime.initial import WEIGHTS_FILE, load_constants, load_weights
from hetpipe_compiler.runtime.memory_channels import MemoryLink, MemoryMailbox, Post, Servers, VirtualClock
from hetpipe_compiler.runtime.programs import complete_programs
from hetpipe_compiler.runtime.stage import StageEngine

if TYPE_CHECKING:
    from torch import Tensor

    from hetpipe_compiler.frontend.load import LoadedWorkload
    from hetpipe_compiler.ir.plan import Plan


@dataclass(frozen=True)
class InterpretResult:
    """What a run leaves.

    Attributes:
        weights: The servers' parameters and the merged buffers, by the model's names (frozen ones included).
        losses: Per virtual worker: minibatch -> loss.
        events: In order of execution; see `interpret`.
        elapsed_ms: Virtual time of the whole run.
    """

    weights: dict[str, Tensor]
    losses: tuple[dict[int, float], ...]
    events: tuple[dict[str, Any], ...]
    elapsed_ms: float


@dataclass
class _Runner:
    """A stage with what is left of its program; the last item, None, is `StageEngine.finish`."""

    engine: StageEngine
    mailbox: MemoryMailbox
    link: MemoryLink
    program: list[Instruction | None]
    forward_ms: float
    backward_ms: float
    position: int = 0
    free_ms: float = 0.0
    samples: dict[int, int] = field(default_factory=dict)

    def start_ms(self) -> float | None:
        """When the next instruction can start; None: not before another stage goes on."""
        instruction = self.program[self.position]
        ready: float | None = 0.0
        if instruction is not None and instruction.op in (Op.RECEIVE_ACTIVATIONS, Op.RECEIVE_GRADIENTS):
            ready = self.mailbox.arrival_ms(instruction)
        elif instruction is not None and instruction.op is Op.PULL:
            ready = self.link.arrival_ms(instruction.index + 1)
        return None if ready is None else max(self.free_ms, ready)

    def step(self, start_ms: float) -> None:
        """Execute the next instruction."""
        instruction = self.program[self.position]
        self.position += 1
        self.free_ms = start_ms
        if instruction is None:
            self.engine.finish()
            return
        samples = self.engine.samples
        self.engine.execute(instruction)
        if instruction.op is Op.FORWARD:
            self.free_ms += self.forward_ms
            self.samples[instruction.index] = self.engine.samples - samples
        elif instruction.op is Op.BACKWARD:
            self.free_ms += self.backward_ms

    @property
    def waits_at(self) -> str:
        """Its place and next instruction."""
        return f"vw{self.engine.vw}/stage{self.engine.index} at {self.program[self.position]}"

    @property
    def done(self) -> bool:
        return self.position == len(self.program)


@dataclass
class _Log:
    """Stamps events with the virtual time and passes them on."""

    clock: VirtualClock
    listener: Callable[[dict[str, Any]], None] | None
    events: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, event: dict[str, Any]) -> None:
        stamped = {"t_ms": self.clock.now_ms, **event}
        self.events.append(stamped)
        if self.listener is not None:
            self.listener(stamped)


def interpret(
    plan: Plan,
    folder: Path,
    workload: LoadedWorkload,
    *,
    minibatches: int,
    seed: int,
    reproducible: bool,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    weights: Mapping[str, Tensor] | None = None,
    device: str = "cpu",
    lengths: tuple[int, ...] | None = None,
) -> InterpretResult:
    """Run ``minibatches`` of every virtual worker.

    Args:
        on_event: Gets each event, a dict with ``t_ms`` (virtual) and ``event``: those of `StageEngine` and
            `ParameterShard`; ``{"event": "instruction", "vw", "stage", "token", "end_ms"}`` per instruction;
            ``{"event": "loss", "vw", "minibatch", "loss", "samples"}`` per minibatch; ``{"event": "note", "text"}``.
        weights: Initial parameters and buffers by name; default: those in the folder.
        device: Where everything computes.
        lengths: Batches in each shard, if they are counted already.

    Raises:
        ArtifactError: HP415-HP417, HP420-HP421, HP436-HP437 the folder is incomplete or its schedule wrong.
        RunError: HP513-HP516 data or values that do not fit.
    """
    clock = VirtualClock()
    log = _Log(clock, on_event)
    if weights is None:
        weights = load_weights(plan, folder / WEIGHTS_FILE)
    constants = load_constants(plan, folder)
    servers = Servers(plan, weights, reproducible, log)
    runners = _make_runners(
        plan, folder, workload, minibatches, seed, reproducible, weights, constants, device, log, servers, lengths
    )
    running = list(runners)
    while running:
        starts = [(start, i) for i, r in enumerate(running) if (start := r.start_ms()) is not None]
        # The placement of messages refuses schedules under which stages wait in a circle.
        assert starts, "no stage can go on: " + ", ".join(r.waits_at for r in running)
        start, index = min(starts)
        runner = running[index]
        clock.now_ms = start
        instruction = runner.program[runner.position]
        runner.step(start)
        if instruction is not None:
            _report(log, runner, instruction)
        if runner.done:
            del running[index]
    losses = _losses(plan, runners)
    return InterpretResult(servers.result(), losses, tuple(log.events), max(r.free_ms for r in runners))


def _make_runners(
    plan: Plan,
    folder: Path,
    workload: LoadedWorkload,
    minibatches: int,
    seed: int,
    reproducible: bool,
    weights: Mapping[str, Tensor],
    constants: Mapping[str, Tensor],
    device: str,
    log: _Log,
    servers: Servers,
    lengths: tuple[int, ...] | None,
) -> list[_Runner]:
    cluster = Cluster.from_dict(plan.cluster)
    programs = complete_programs(plan, folder, cluster, minibatches)
    clock = log.clock
    runners = []
    for vw, worker in enumerate(plan.virtual_workers):
        post = Post(worker, cluster)
        source = BatchSource(plan, vw, workload, seed, lengths, lambda text: log({"event": "note", "text": text}))
        lengths = source.lengths
        for k, stage in enumerate(worker.stages):
            mailbox = MemoryMailbox(post, k, clock)
            link = servers.link(vw, k, cluster, clock)
            engine = StageEngine(
                plan,
                folder,
                vw,
                k,
                workload=workload,
                mailbox=mailbox,
                link=link,
                weights=weights,
                constants=constants,
                batches=source if k == 0 else None,
                seed=seed,
                device=device,
                reproducible=reproducible,
                on_event=log,
            )
            runners.append(
                _Runner(engine, mailbox, link, [*programs[vw][k], None], stage.forward_ms, stage.backward_ms)
            )
    return runners


def _report(log: _Log, runner: _Runner, instruction: Instruction) -> None:
    engine = runner.engine
    place = {"vw": engine.vw, "stage": engine.index}
    log({"event": "instruction", **place, "token": str(instruction), "end_ms": runner.free_ms})
    if instruction.op is Op.UPDATE:
        samples = runner.samples.pop(instruction.index)
        loss = engine.losses.get(instruction.index)
        if loss is not None:
            log({"event": "loss", "vw": engine.vw, "minibatch": instruction.index, "loss": loss, "samples": samples})


def _losses(plan: Plan, runners: list[_Runner]) -> tuple[dict[int, float], ...]:
    last = {vw: len(worker.stages) - 1 for vw, worker in enumerate(plan.virtual_workers)}
    return tuple(r.engine.losses for r in runners if r.engine.index == last[r.engine.vw])
