"""A plan's decisions give the same plan again; edits are costed as they stand, or refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planner_cases import FAST, MIB, SLOW, chain_of, chains, cluster_of, clusters, kind

from hetpipe_compiler.errors import HetpipeError, PlanningError
from hetpipe_compiler.ir.blocks import Block, CrossingValue
from hetpipe_compiler.ir.decisions import DecidedStage, DecidedWorker, Decisions
from hetpipe_compiler.passes.allocate import Allocation, Group, allocate
from hetpipe_compiler.passes.decided import decided_allocation, decided_workers, decisions_of
from hetpipe_compiler.passes.planning import PlannerOptions, plan_workers
from hetpipe_compiler.passes.stage_memory import Recompute


def decisions_for(chain, allocation, workers, options: PlannerOptions) -> Decisions:
    return decisions_of(
        chain, allocation, workers, partitioner="search", objective=options.objective,
        staleness=options.staleness, placement=options.placement, recompute=options.recompute,
        update_scale=None,
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    chains(most=6),
    clusters(),
    st.sampled_from(["NP", "ED", "HD", "ordered"]),
    st.builds(
        PlannerOptions,
        nm=st.none() | st.integers(1, 4),
        staleness=st.integers(0, 1),
        placement=st.sampled_from(["local", "round-robin"]),
        objective=st.sampled_from(["hetpipe", "overlapped"]),
        recompute=st.sampled_from(Recompute),
    ),
)
def test_a_plans_decisions_give_the_plan_again(chain, cluster, policy, options) -> None:
    if policy == "ordered":
        allocation = Allocation("groups.yaml", (Group(cluster.devices[::-1], True),), ())
    else:
        allocation = allocate(cluster, policy)
    try:
        workers = plan_workers(chain, cluster, allocation, options)
    except PlanningError:
        assume(False)
    decisions = decisions_for(chain, allocation, workers, options)
    again = decided_allocation(decisions, cluster)
    assert (again.policy, again.unused) == (allocation.policy, allocation.unused)
    assert again.groups == allocation.groups
    for mine, theirs in zip(decided_workers(chain, cluster, again, decisions), workers, strict=True):
        assert mine == theirs


CLUSTER = cluster_of([[kind("a"), kind("a")], [kind("b", 50 * MIB)]], FAST, SLOW)
#: Two branches between the first and the last block.
CHAIN = replace(
    chain_of(
        {"a": [1.0] * 6, "b": [2.0] * 6},
        values=[
            CrossingValue(name, producer, readers, 9, 9)
            for name, producer, readers in (
                ("x", 0, (1, 3)),
                ("y", 1, (2,)),
                ("z", 3, (4,)),
                ("u", 2, (5,)),
                ("v", 4, (5,)),
            )
        ],
        saved=[10 * MIB] * 6,
    ),
    blocks=tuple(Block(name, (f"op{at}",)) for at, name in enumerate(["in", "l.0", "l.1", "r.0", "r.1", "out"])),
)


def decided(*stages: DecidedStage, nm: int = 2, **more) -> Decisions:
    return Decisions(nm=nm, virtual_workers=(DecidedWorker(stages=stages),), **more)


def test_a_fixed_order_that_has_other_devices_is_refused() -> None:
    worker = DecidedWorker(stages=(DecidedStage(device="n0:0", in_flight=1),), ordered=("n0:0", "n0:1"))
    with pytest.raises(HetpipeError) as caught:
        decided_allocation(Decisions(nm=1, virtual_workers=(worker,)), CLUSTER)
    assert (caught.value.code, caught.value.where) == ("HP240", "--decisions: virtual_workers[0].ordered")


def plan(decisions: Decisions):
    return decided_workers(CHAIN, CLUSTER, decided_allocation(decisions, CLUSTER), decisions)


def test_an_edit_is_taken_as_it_stands() -> None:
    (worker,) = plan(
        decided(
            DecidedStage(device="n0:1", in_flight=1, begins_at="in"),
            DecidedStage(device="n0:0", in_flight=1, begins_at="r"),
        )
    )
    assert [stage.device.id for stage in worker.stages] == ["n0:1", "n0:0"]
    assert [stage.blocks for stage in worker.stages] == [(0, 3), (3, 6)]
    assert worker.in_flight == (1, 1)
    assert worker.lower_bound_ms <= worker.bottleneck_ms


def test_blocks_may_come_in_another_order_than_the_models() -> None:
    stages = [
        DecidedStage(device="n0:0", in_flight=2, blocks="0 3-4"),
        DecidedStage(device="n0:1", in_flight=1, blocks="1,2 5"),
    ]
    (worker,) = plan(decided(*stages))
    assert worker.order == (0, 3, 4, 1, 2, 5)
    allocation = Allocation("x", (Group(CLUSTER.devices[:2]),), ())
    (entry,) = decisions_for(CHAIN, allocation, (worker,), PlannerOptions()).virtual_workers
    assert [stage.blocks for stage in entry.stages] == ["0 3-4", "1-2 5"]


def stage(device="n0:0", w=1, **how) -> DecidedStage:
    return DecidedStage(device=device, in_flight=w, **how)


@pytest.mark.parametrize(
    ("stages", "code", "place", "message"),
    [
        ([stage("n7:0")], "HP212", "stages[0].device", "has no device 'n7:0'"),
        ([stage(), stage(begins_at="r")], "HP213", "stages[1].device",
         "'n0:0' is also virtual_workers[0].stages[0].device"),
        ([stage(), stage("n0:1")], "HP240", "stages[1].begins_at", "missing"),
        ([stage(blocks="0-2"), stage("n0:1", begins_at="r")], "HP240", "", "some stages say their blocks"),
        ([stage(blocks="0-x")], "HP240", "stages[0].blocks", "'0-x' is no range of blocks"),
        ([stage(blocks="9" * 5000)], "HP240", "stages[0].blocks", "9' is no range of blocks"),
        ([stage(blocks="0-99999999999")], "HP240", "stages[0].blocks", "'0-99999999999': the blocks are 0 to 5"),
        ([stage(blocks="5-0")], "HP240", "stages[0].blocks", "'5-0': the blocks are 0 to 5"),
        ([stage(), stage("n0:1", begins_at="s")], "HP303", "", "'s' is no node"),
        ([stage(), stage("n0:1", begins_at="in")], "HP303", "", "'in' begins at block 0"),
        ([stage(begins_at="l"), stage("n0:1", begins_at="r")], "HP303", "stages[0].begins_at", "not where the model"),
        ([stage(blocks="0-3")], "HP312", "", "block 4 (r.1) and 1 more in no stage"),
        ([stage(blocks="0-1 3-5"), stage("n0:1", blocks=2)], "HP313", "", "block 5 (out) in stage 0 reads 'u'"),
        ([stage(), stage("n0:1", 2, begins_at="r")], "HP316", "stages[1].in_flight", "2 minibatches in flight, and st"),
        ([stage(w=3), stage("n0:1", begins_at="r")], "HP316", "stages[0].in_flight", "3 minibatches in flight, and Nm"),
        ([stage("n1:0", begins_at="in")], "HP317", "stages[0]", "on n1:0 (b), which is"),
    ],
)  # fmt: skip
def test_edits_that_are_refused(stages, code, place, message) -> None:
    with pytest.raises(HetpipeError) as caught:
        plan(decided(*stages))
    where = "--decisions: virtual_workers[0]"
    assert (caught.value.code, caught.value.where) == (code, f"{where}.{place}" if place else where)
    assert message in caught.value.message
    assert caught.value.hint
