"""The predicted schedule as a Chrome trace: open it in https://ui.perfetto.dev or chrome://tracing.

==============  =========================================================================================
in the trace    is
==============  =========================================================================================
process         a virtual worker
thread          a stage, named with its device and the share of time that it idles
slice           a forward ``F3``, a backward ``B3`` (its local update included), or waiting for a message or a wave
arrow           a message, from the computation that made it to the one that needs it
async track     messages and pushes on their way
counter         minibatches in flight on a stage
==============  =========================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetpipe_compiler.errors import ArtifactError
from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.ir.plan import Plan, Stage, VirtualWorker
from hetpipe_compiler.ir.schedule import Op, Schedule
from hetpipe_compiler.passes.simulate.costs import PipelineCosts
from hetpipe_compiler.passes.simulate.timeline import (
    StageKey,
    TimelineEvent,
    idle_shares,
    same_parameters,
    simulate_run,
)
from hetpipe_compiler.passes.verify import verify_schedule

#: Waves that a timeline shows unless told otherwise; the drain comes after.
WAVES = 3
#: Reserved colour names of Chrome's viewer. Perfetto colours by name: all forwards alike, all backwards alike.
_COLOURS = {"F": "thread_state_running", "B": "rail_animation", "wait": "grey"}
_TITLES = {"a>": "activations", "g>": "gradients", "^": "push"}


@dataclass(frozen=True)
class Timeline:
    """A simulated run.

    Attributes:
        events: By start time.
        idle: Per stage, the share of its virtual worker's run in which it computes nothing, fill and drain included.
        steady_idle: The same in the steady state: 1 - (forward + backward) / period.
    """

    plan: Plan
    minibatches: int
    events: Sequence[TimelineEvent]
    idle: dict[StageKey, float]
    steady_idle: dict[StageKey, float]


def plan_timeline(plan: Plan, schedule: Schedule, *, waves: int = WAVES) -> Timeline:
    """Simulate ``waves`` waves of all virtual workers and the drain."""
    cluster = Cluster.from_dict(plan.cluster)
    workers = plan.virtual_workers
    minibatches = waves * plan.nm
    exchange = [[exchange_ms(plan, cluster, stage) for stage in worker.stages] for worker in workers]
    events = simulate_run(
        [PipelineCosts.of_plan(worker, cluster) for worker in workers],
        schedule,
        minibatches,
        exchange,
        exchange,
        same_parameters(workers) if plan.servers else None,
    )
    idle: dict[StageKey, float] = {}
    for worker in workers:
        own = [event for event in events if event.vw == worker.index]
        idle.update(idle_shares(own, 0.0, max(event.end_ms for event in own if event.op in ("F", "B"))))
    # All virtual workers keep the pace of the slowest: none may be more than D waves ahead.
    period_ms = 1000.0 * plan.batch_size * len(workers) / plan.samples_per_s
    steady = {
        (worker.index, stage.index): max(0.0, 1 - (stage.forward_ms + stage.backward_ms) / period_ms)
        for worker in workers
        for stage in worker.stages
    }
    return Timeline(plan, minibatches, events, idle, steady)


def load_schedule(plan: Plan, folder: Path) -> Schedule:
    """The plan folder's ``schedule.csv``, proved.

    Raises:
        ArtifactError: HP449, there is none; HP420-HP421, it cannot be read; HP430-HP438, it does not hold.
    """
    path = folder / "schedule.csv"
    if not path.is_file():
        raise ArtifactError("HP449", "no schedule.csv here", where=str(folder), hint="compile again")
    schedule = Schedule.read(path, nm=plan.nm, staleness=plan.staleness)
    cluster = Cluster.from_dict(plan.cluster)
    costs = [PipelineCosts.of_plan(worker, cluster) for worker in plan.virtual_workers]
    verify_schedule(schedule, costs, [[s.in_flight for s in worker.stages] for worker in plan.virtual_workers])
    return schedule


def exchange_ms(plan: Plan, cluster: Cluster, stage: Stage) -> float:
    """Time for a stage's trainable parameters to reach their servers; the new weights take as long to come back.

    What goes to the server of the stage's own node takes that node's link, beside it the rest takes the network.
    """
    node = cluster.node(cluster.device(stage.device).node)
    sizes = {tensor.name: tensor.bytes for tensor in plan.parameters if tensor.trainable}
    home_bytes = away_bytes = 0
    for server in plan.servers:
        count = sum(sizes.get(name, 0) for name in set(server.parameters).intersection(stage.parameters))
        if server.node == node.name:
            home_bytes += count
        else:
            away_bytes += count
    return max(node.link.ms(home_bytes), cluster.network.ms(away_bytes))


def timeline_json(timeline: Timeline, *, vw: int | None = None) -> str:
    """The trace; ``vw``: of one virtual worker only."""
    workers = [w for w in timeline.plan.virtual_workers if vw is None or w.index == vw]
    shown = {worker.index for worker in workers}
    events = [event for event in timeline.events if event.vw in shown]
    trace = [*_names(timeline, workers), *_slices(events), *_journeys(events), *_arrows(events), *_in_flight(events)]
    plan = timeline.plan
    facts = {
        "model": plan.name,
        "samples_per_s": plan.samples_per_s,
        "nm": plan.nm,
        "staleness": plan.staleness,
        "minibatches": timeline.minibatches,
        "idle_percent": {f"vw{n}/stage{s}": round(100 * x, 1) for (n, s), x in timeline.idle.items() if n in shown},
        "steady_idle_percent": {
            f"vw{n}/stage{s}": round(100 * x, 1) for (n, s), x in timeline.steady_idle.items() if n in shown
        },
    }
    return json.dumps({"displayTimeUnit": "ms", "otherData": facts, "traceEvents": trace}, separators=(",", ":")) + "\n"


def idle_text(timeline: Timeline, vw: int | None = None) -> str:
    """One line per virtual worker: how much each stage idles in the steady state (and with fill and drain)."""
    lines = []
    for worker in timeline.plan.virtual_workers:
        if vw in (None, worker.index):
            parts = [
                f"stage {s.index} {_percent(timeline.steady_idle[worker.index, s.index])}"
                f" ({_percent(timeline.idle[worker.index, s.index])})"
                for s in worker.stages
            ]
            lines.append(f"virtual worker {worker.index} idles, with fill and drain in brackets: {', '.join(parts)}")
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _names(timeline: Timeline, workers: Sequence[VirtualWorker]) -> Iterator[dict[str, Any]]:
    for worker in workers:
        pid = worker.index
        yield _meta("process_name", pid, 0, name=f"virtual worker {pid}: {worker.samples_per_s:.1f} samples/s")
        yield _meta("process_sort_index", pid, 0, sort_index=pid)
        for stage in worker.stages:
            idle = _percent(timeline.steady_idle[pid, stage.index])
            mark = ", bottleneck" if stage.index == worker.bottleneck_stage else ""
            mark += ", B runs F again" if stage.recompute else ""
            name = f"stage {stage.index}: {stage.device} {stage.kind}, idle {idle}{mark}"
            yield _meta("thread_name", pid, stage.index, name=name)
            yield _meta("thread_sort_index", pid, stage.index, sort_index=stage.index)


def _meta(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _slices(events: Sequence[TimelineEvent]) -> Iterator[dict[str, Any]]:
    for event in events:
        if event.op not in _COLOURS:
            continue
        name = f"{event.op}{event.index}" if event.op != "wait" else f"wait {event.instruction}"
        yield {
            "ph": "X",
            "name": name,
            "cat": {"F": "forward", "B": "backward", "wait": "wait"}[event.op],
            "cname": _COLOURS[event.op],
            **_at(event, event.start_ms),
            "dur": round(_us(event.end_ms) - _us(event.start_ms), 3),
            "args": {"wave" if event.instruction.op is Op.PULL else "minibatch": event.index},
        }


def _journeys(events: Sequence[TimelineEvent]) -> Iterator[dict[str, Any]]:
    """Messages and pushes as async slices: they overlap each other."""
    for number, event in enumerate(events):
        if event.op not in _TITLES:
            continue
        to = "" if event.instruction.peer is None else f" to {event.instruction.peer}"
        common = {"cat": "transfer", "id": number, "name": f"{_TITLES[event.op]} {event.stage}{to}"}
        what = "wave" if event.op == "^" else "minibatch"
        yield {"ph": "b", **common, **_at(event, event.start_ms), "args": {what: event.index}}
        yield {"ph": "e", **common, **_at(event, event.end_ms)}


def _arrows(events: Sequence[TimelineEvent]) -> Iterator[dict[str, Any]]:
    """A flow binds to the slices around its ends: it leaves just before the sender's end, arrives just inside."""
    computations: dict[tuple[int, int, str, int], TimelineEvent] = {
        (e.vw, e.stage, e.op, e.index): e for e in events if e.op in ("F", "B")
    }
    for number, event in enumerate(events):
        peer = event.instruction.peer
        if event.op not in ("a>", "g>") or peer is None:
            continue
        op = "F" if event.op == "a>" else "B"
        made, read = computations[event.vw, event.stage, op, event.index], computations[event.vw, peer, op, event.index]
        common = {"cat": "message", "id": number, "name": _TITLES[event.op]}
        yield {"ph": "s", **common, **_at(made, _inside(made, 0.99))}
        yield {"ph": "f", "bp": "e", **common, **_at(read, _inside(read, 0.01))}


def _inside(event: TimelineEvent, share: float) -> float:
    return event.start_ms + share * (event.end_ms - event.start_ms)


def _in_flight(events: Sequence[TimelineEvent]) -> Iterator[dict[str, Any]]:
    steps = [(e.start_ms, 1, e) for e in events if e.op == "F"] + [(e.end_ms, -1, e) for e in events if e.op == "B"]
    live: dict[StageKey, int] = {}
    for ms, change, event in sorted(steps, key=lambda step: step[:2]):
        key = (event.vw, event.stage)
        live[key] = live.get(key, 0) + change
        args = {"minibatches": live[key]}
        yield {"ph": "C", "name": f"in flight on stage {event.stage}", **_at(event, ms), "args": args}


def _at(event: TimelineEvent, ms: float) -> dict[str, Any]:
    return {"pid": event.vw, "tid": event.stage, "ts": _us(ms)}


def _us(ms: float) -> float:
    return round(1000.0 * ms, 3)
