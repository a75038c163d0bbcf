"""Partitioners of the user's own: found, asked, checked; costed as our own stages are."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from planner_cases import FAST, MIB, SLOW, chain_of, chains, cluster_of, clusters, kind

from hetpipe_compiler.errors import ClusterError, PlanningError
from hetpipe_compiler.passes.allocate import Allocation, Group
from hetpipe_compiler.passes.concurrency import choose_concurrency
from hetpipe_compiler.passes.own_partitioner import OwnPartitioner, load_partitioner

CLUSTER = cluster_of([[kind("a"), kind("a")], [kind("b", 100 * MIB)]], FAST, SLOW)
CHAIN = chain_of({"a": [1.0] * 6, "b": [2.0] * 6}, activation_bytes=1000, parameters=[MIB] * 6, saved=[10 * MIB] * 6)
ORDERED = ("n0:0", "n0:1", "n1:0")


def plan(function, *, nm=2, chain=CHAIN, cluster=CLUSTER, ordered=False, **options):
    allocation = Allocation("test", (Group(cluster.devices, ordered),), ())
    partitioner = OwnPartitioner("mine", function)
    (worker,) = choose_concurrency(chain, cluster, allocation, nm=nm, partitioner=partitioner, **options)
    return worker


def test_its_stages_are_costed_and_held_against_our_bound() -> None:
    worker = plan(lambda _: [("n1:0", [0]), ("n0:1", (1, 2, 3)), ("n0:0", range(4, 6))])
    assert [stage.device.kind.name for stage in worker.stages] == ["b", "a", "a"]
    assert [stage.blocks for stage in worker.stages] == [(0, 1), (1, 4), (4, 6)]
    assert [stage.forward_ms for stage in worker.stages] == [2.0, 3.0, 2.0]
    assert worker.bottleneck_ms == max(stage.stage_ms for stage in worker.stages)
    allocation = Allocation("test", (Group(CLUSTER.devices),), ())
    (ours,) = choose_concurrency(CHAIN, CLUSTER, allocation, nm=2)
    assert worker.lower_bound_ms == ours.lower_bound_ms
    assert ours.optimal
    assert not worker.optimal
    assert worker.gap == pytest.approx(worker.bottleneck_ms / ours.bottleneck_ms - 1)


@settings(max_examples=40, deadline=None)
@given(chains(most=6), clusters())
def test_our_own_answer_given_back_is_our_own_plan(chain, cluster) -> None:
    allocation = Allocation("test", (Group(cluster.devices),), ())
    try:
        (ours,) = choose_concurrency(chain, cluster, allocation, nm=2)
    except PlanningError:
        assume(False)

    def same(problem):
        for stage in ours.stages:
            blocks = [ours.order[b] for b in range(*stage.blocks)]
            neighbours = {s.device.id: s.device for s in ours.stages}
            assert problem.memory_bytes(blocks, stage.device, stage.in_flight) == stage.memory["total"]
            around = [None, *neighbours.values(), None]
            at = [*neighbours].index(stage.device.id) + 1
            assert problem.stage_ms(blocks, stage.device, around[at - 1], around[at + 1]) == stage.stage_ms
        return [(stage.device.id, [ours.order[b] for b in range(*stage.blocks)]) for stage in ours.stages]

    assert plan(same, chain=chain, cluster=cluster) == ours


def test_what_it_is_asked() -> None:
    seen = []

    def look(problem):
        seen.append(problem)
        return [("n0:0", range(6))]

    worker = plan(look, nm=None, staleness=1, objective="overlapped")
    assert [problem.nm for problem in seen] == list(range(1, len(seen) + 1))
    problem = seen[-1]
    assert [device.id for device in problem.devices] == list(ORDERED)
    assert problem.objective == "overlapped"
    assert problem.in_flight(3) == (problem.nm, min(2, problem.nm), 1)
    assert problem.reads(3) == (2,)
    assert problem.link(problem.devices[0], problem.devices[2]) == SLOW
    assert [device.id for device in worker.unused] == ["n0:1", "n1:0"]


@pytest.mark.parametrize(
    ("answer", "code", "message"),
    [
        (lambda _: 3, "HP311", "answered with 3, which is no list of stages"),
        (lambda _: [("n0:0", range(6)), 5], "HP311", "answered with the stage 5"),
        (lambda _: [("n0:0", [0], 1)], "HP311", "answered with the stage ('n0:0', [0], 1)"),
        (lambda _: [("n0:0", itertools.count())], "HP312", "block 6, which is none"),
        (
            lambda _: (("n0:0", itertools.repeat(0)) for _ in itertools.count()),
            "HP312",
            "block 0 (layer0) is in stage 0 and again in stage 0",
        ),
        (lambda: [], "HP311", "takes 0 positional arguments but 1 was given"),
        (lambda _: sys.exit(0), "HP311", "raised SystemExit: 0 (at "),
        (lambda p: p.nothing, "HP311", "test_own_partitioner.py:"),
        (lambda _: [], "HP311", "no stages"),
        (lambda _: [(0, range(6))], "HP311", "the device 0, which is no id"),
        (lambda _: [("n0:0", [0.5])], "HP311", "blocks of n0:0 that are no whole numbers"),
        (lambda _: [("n0:0", range(5))], "HP312", "block 5 (layer5) in no stage"),
        (lambda _: [("n0:0", [1, 2, 3, 4, 5]), ("n0:1", [0])], "HP313", "reads 'v0'"),
        (lambda _: [("n9:0", range(6))], "HP314", "'n9:0', which is not in the virtual worker"),
        (lambda _: [("n0:0", range(3)), ("n0:0", range(3, 6))], "HP314", "'n0:0' has stage 0 and stage 1"),
        (lambda _: [("n1:0", range(6))], "HP315", "stage 0 on n1:0 (b) is over its memory by"),
        (lambda _: None, "HP315", "found no stages that fit with Nm = 2"),
    ],
)
def test_answers_that_are_refused(answer, code, message) -> None:
    chain = chain_of({"a": [1.0] * 6, "b": [2.0] * 6}, activation_bytes=9, saved=[20 * MIB] * 6)
    with pytest.raises(PlanningError) as caught:
        plan(answer, chain=chain)
    assert (caught.value.code, caught.value.where) == (code, "--partitioner mine")
    assert message in caught.value.message
    assert caught.value.hint


def test_a_fixed_order_of_devices_is_kept() -> None:
    with pytest.raises(PlanningError) as caught:
        plan(lambda _: [("n0:1", range(3)), ("n0:0", range(3, 6))], ordered=True)
    assert caught.value.code == "HP314"
    assert len(plan(lambda _: [("n0:1", range(3)), ("n1:0", range(3, 6))], ordered=True).stages) == 2


def test_no_answer_for_more_in_flight_ends_the_search_for_nm() -> None:
    asked = []

    def up_to_three(problem):
        asked.append(problem.nm)
        return [("n0:0", range(3)), ("n0:1", range(3, 6))] if problem.nm <= 3 else None

    assert plan(up_to_three, nm=None).nm <= 3
    assert asked == sorted(set(asked))


def test_found_by_an_entry_point_and_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_partitioner.py").write_text("def whole(problem):\n    return None\n\nvalue = 3\n")
    info = tmp_path / "some_partitioner-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-partitioner\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[hetpipe_compiler.partitioners]\nwhole = some_partitioner:whole\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        for name in ("whole", "some_partitioner:whole"):
            found = load_partitioner(name)
            assert found.name == name
            assert found.function is sys.modules["some_partitioner"].whole
        for name, message in {
            "hole": "no partitioner 'hole'",
            "nowhere:whole": "No module named 'nowhere'",
            "some_partitioner:half": "has no attribute 'half'",
            "some_partitioner:value": "is no function",
            "some_partitioner:": "no partitioner 'some_partitioner:'",
        }.items():
            with pytest.raises(ClusterError) as caught:
                load_partitioner(name)
            assert caught.value.code == "HP223"
            assert message in caught.value.message
        with pytest.raises(ClusterError, match="no partitioner") as caught:
            load_partitioner("hole")
        assert "did you mean 'whole'?" in str(caught.value.hint)
    finally:
        sys.modules.pop("some_partitioner", None)
