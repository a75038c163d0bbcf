"""The Chrome trace: every computation once, nothing overlapping on a stage, arrows that start and end inside slices."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from handmade_plans import equal_distribution, node_partition, with_cluster

from hetpipe_compiler.codegen.timeline import exchange_ms, idle_text, load_schedule, plan_timeline, timeline_json
from hetpipe_compiler.errors import ArtifactError
from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.ir.plan import Plan
from hetpipe_compiler.ir.schedule import Schedule
from hetpipe_compiler.passes.schedules.wsp import wsp_program


def schedule_of(plan: Plan) -> Schedule:
    programs = [wsp_program([s.in_flight for s in w.stages], plan.nm, plan.staleness) for w in plan.virtual_workers]
    return Schedule(plan.nm, plan.staleness, tuple(programs))


def trace_of(plan: Plan, **options: int) -> dict[str, Any]:
    plan = with_cluster(plan)
    loaded: dict[str, Any] = json.loads(timeline_json(plan_timeline(plan, schedule_of(plan)), **options))
    return loaded


def test_every_computation_is_one_slice_and_slices_of_a_stage_never_overlap() -> None:
    plan = node_partition()
    slices = [e for e in trace_of(plan)["traceEvents"] if e["ph"] == "X"]
    computed = Counter((e["pid"], e["tid"], e["name"]) for e in slices if e["cat"] != "wait")
    expected = {
        (w.index, s.index, f"{op}{p}")
        for w in plan.virtual_workers
        for s in w.stages
        for op in "FB"
        for p in range(1, 13)
    }
    assert set(computed) == expected
    assert set(computed.values()) == {1}
    by_stage = defaultdict(list)
    for e in slices:
        by_stage[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    for spans in by_stage.values():
        spans.sort()
        assert all(end <= start + 0.01 for (_, end), (start, _) in itertools.pairwise(spans))


def test_arrows_bind_to_the_computations_at_their_ends() -> None:
    events = trace_of(node_partition())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]

    def around(end: dict[str, Any]) -> list[str]:
        """Names of the slices on that thread that hold this instant."""
        here = (e for e in slices if (e["pid"], e["tid"]) == (end["pid"], end["tid"]))
        return [e["name"] for e in here if e["ts"] <= end["ts"] < e["ts"] + e["dur"]]

    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    # Virtual worker 0: 1 cut; 1: 3 cuts and a skip; both ways, 12 minibatches each.
    assert len(starts) == 12 * 2 * (1 + 4)
    for number, start in starts.items():
        assert around(start) == around(ends[number])
        assert around(start)[0][0] == ("F" if start["name"] == "activations" else "B")
        assert start["ts"] <= ends[number]["ts"]


def test_counters_never_pass_the_plan_and_end_at_zero() -> None:
    plan = equal_distribution()
    counts = defaultdict(list)
    for e in trace_of(plan)["traceEvents"]:
        if e["ph"] == "C":
            counts[e["pid"], e["tid"]].append(e["args"]["minibatches"])
    for worker in plan.virtual_workers:
        for stage in worker.stages:
            assert max(counts[worker.index, stage.index]) == stage.in_flight
            assert counts[worker.index, stage.index][-1] == 0


def test_async_slices_pair_up() -> None:
    events = trace_of(equal_distribution())["traceEvents"]
    assert Counter(e["id"] for e in events if e["ph"] == "b") == Counter(e["id"] for e in events if e["ph"] == "e")
    assert {e["name"] for e in events if e["ph"] == "b"} >= {"activations 0 to 1", "activations 0 to 3", "push 2"}


def test_one_virtual_worker_on_request() -> None:
    trace = trace_of(node_partition(), vw=1)
    assert {e["pid"] for e in trace["traceEvents"]} == {1}
    assert all(name.startswith("vw1/") for name in trace["otherData"]["idle_percent"])


def test_idle_shares_follow_from_the_period() -> None:
    plan = with_cluster(node_partition())
    run = plan_timeline(plan, schedule_of(plan))
    period_ms = 1000 * plan.batch_size / min(worker.samples_per_s for worker in plan.virtual_workers)
    assert run.steady_idle[1, 0] == pytest.approx(1 - (22.0 + 47.0) / period_ms)
    assert run.idle[1, 0] > run.steady_idle[1, 0]
    assert idle_text(run).count("\n") == 1
    assert "virtual worker 0" not in idle_text(run, 1)


def test_exchange_takes_the_node_s_own_link_or_the_network() -> None:
    plan = with_cluster(node_partition())
    cluster = Cluster.from_dict(plan.cluster)
    held = plan.virtual_workers[0].stages[0]
    names = plan.servers[0].parameters[:2] + plan.servers[1].parameters[:1]
    stage = held.model_copy(update={"device": "n0:0", "parameters": names})
    expected = max(cluster.node("n0").link.ms(8_000_000), cluster.network.ms(4_000_000))
    assert exchange_ms(plan, cluster, stage) == pytest.approx(expected)


def test_a_missing_schedule_is_refused(tmp_path: Path) -> None:
    plan = with_cluster(node_partition())
    with pytest.raises(ArtifactError) as caught:
        load_schedule(plan, tmp_path)
    assert caught.value.code == "HP449"
    (tmp_path / "schedule.csv").write_text(schedule_of(plan).to_csv())
    assert load_schedule(plan, tmp_path) == schedule_of(plan)
