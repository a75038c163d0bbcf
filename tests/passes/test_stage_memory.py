"""Memory of a stage against closed forms written out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_cases import FAST, MIB, SLOW, chain_of, cluster_of, kind

from hetpipe_compiler.ir.blocks import CrossingValue, SharedBytes
from hetpipe_compiler.passes.allocate import Group
from hetpipe_compiler.passes.in_flight import InFlightRule
from hetpipe_compiler.passes.partition import partition
from hetpipe_compiler.passes.stage_memory import PARTS, MemoryRule, stage_memory, total_bytes
from hetpipe_compiler.passes.stage_sums import stage_sums

CARD = kind("card", 1000 * MIB, 64 * MIB)


def mlp(layers: int, width: int, batch: int):
    """Equal linear layers in float32: width^2 weights, their input saved, the output sent on, its gradient back."""
    values = batch * width * 4
    return chain_of(
        {"card": [1.0] * layers},
        activation_bytes=values,
        parameters=[width * width * 4] * layers,
        saved=[values] * layers,
        optimizer_factor=2.0,
    )


@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_mlp_closed_form(in_flight):
    """Layers 2 and 3 of 6: two inputs saved; one activation received, one gradient sent back and one received."""
    width, batch = 512, 32
    weights, activation = 4 * width * width, 4 * batch * width
    parts = stage_memory(stage_sums(mlp(6, width, batch), (2, 3)), in_flight, CARD, MemoryRule(2.0))
    assert parts == {
        "weights": 2 * weights,
        "versions": 2 * weights * in_flight if in_flight > 1 else 0,
        "gradients": 2 * weights,
        "optimizer": 4 * weights,
        "own_sums": 6 * weights,
        "activations": 2 * activation * in_flight,
        "boundary": activation * in_flight + 2 * activation,
        "replay": 0,
        "workspace": 0,
        "pulled": 0,
        "reserve": 64 * MIB,
        "total": weights * (14 + (2 * in_flight if in_flight > 1 else 0)) + activation * (3 * in_flight + 2) + 64 * MIB,
        "capacity": 1000 * MIB,
    }
    assert sum(parts[name] for name in PARTS) == parts["total"]


def test_ends_of_the_chain_have_one_border():
    chain = mlp(4, 128, 8)
    activation = 4 * 8 * 128
    assert stage_memory(stage_sums(chain, (0, 1)), 3, CARD, MemoryRule(0.0))["boundary"] == activation
    assert stage_memory(stage_sums(chain, (2, 3)), 3, CARD, MemoryRule(0.0))["boundary"] == 3 * activation + activation
    assert stage_memory(stage_sums(chain, (0, 1, 2, 3)), 3, CARD, MemoryRule(0.0))["boundary"] == 0


def test_equal_layers_need_less_towards_the_end():
    """In-flight counts fall with the stage, so activations do, by exactly that factor."""
    chain = mlp(4, 64, 256)
    cluster = cluster_of([[CARD] * 4], FAST, SLOW)
    plan = partition(chain, Group(cluster.devices, False), cluster, nm=4, in_flight_rule=InFlightRule(1.0))
    activation = 4 * 256 * 64
    assert [stage.memory["activations"] // activation for stage in plan.stages] == [4, 3, 2, 1]
    assert plan.stages[-1].memory["versions"] == 0


@pytest.mark.parametrize("optimizer_factor", [0.0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("nm", [1, 2, 4, 6])
def test_an_uneven_layout_of_equal_layers(optimizer_factor, nm):
    """Layers 1-2-2-3 on four stages: each stage by its own layers and minibatches in flight, none by the mean."""
    width, batch, layers = 64, 16, (1, 2, 2, 3)
    weight, value = 4 * width * width, 4 * batch * width
    first = 0
    for stage, (count, w) in enumerate(zip(layers, (nm, min(nm, 3), min(nm, 2), 1), strict=True)):
        sums = stage_sums(mlp(8, width, batch), range(first, first + count))
        parts = stage_memory(sums, w, kind("card"), MemoryRule(optimizer_factor), nm)
        # Master, gradients, the wave under way and the update being made; the wave pushed last if it may have to wait.
        copies = 1 + 1 + 2 + optimizer_factor + (w if w > 1 else 0) + (nm - w >= 2)
        borders = (stage > 0) * (w + 1) + (stage < 3)
        assert parts["total"] == count * weight * copies + value * (count * w + borders)
        first += count


def test_the_heaviest_stage_counts_not_the_mean():
    """A device that the mean stage would fit is refused when the uneven chain's heaviest stage does not fit."""
    chain = chain_of({"card": [1.0] * 4}, parameters=[10 * MIB, 10 * MIB, 10 * MIB, 70 * MIB])
    needs = 70 * 5 * MIB + CARD.reserve_bytes
    for capacity, fits in ((needs, True), (needs - 1, False)):
        card = replace(CARD, memory_bytes=capacity)
        totals = [stage_memory(stage_sums(chain, (3,)), 1, card, MemoryRule(0.0))]
        assert (totals[0]["total"] <= totals[0]["capacity"]) == fits


def test_shared_entries_count_once_a_stage():
    chain = replace(
        mlp(4, 16, 1),
        parameters=(SharedBytes("tied", 100, (0, 3)),),
        frozen=(SharedBytes("table", 7, (1, 2)),),
        saved=(SharedBytes("x", 50, (0, 1, 2)),),
        values=(CrossingValue("skip", 0, (1, 3), 11, 0),),
    )
    rule = MemoryRule(0.0)
    both = stage_memory(stage_sums(chain, (0, 1, 2, 3)), 2, CARD, rule)
    assert (both["weights"], both["activations"], both["boundary"]) == (107, 100, 0)
    last = stage_memory(stage_sums(chain, (2, 3)), 2, CARD, rule)
    assert (last["weights"], last["activations"], last["boundary"]) == (107, 100, 22)
    middle = stage_memory(stage_sums(chain, (1,)), 3, CARD, rule)
    assert (middle["weights"], middle["versions"], middle["activations"], middle["boundary"]) == (7, 0, 150, 33)


@pytest.mark.parametrize(
    ("reproducible", "staleness", "sums"), [(False, 0, 3), (False, 4, 3), (True, 0, 2), (True, 4, 6)]
)
def test_sums_of_own_waves(reproducible, staleness, sums):
    parts = stage_memory(stage_sums(mlp(2, 32, 1), (0,)), 1, CARD, MemoryRule(1.0, staleness, reproducible))
    assert parts["own_sums"] == sums * 4 * 32 * 32


@pytest.mark.parametrize(
    ("nm", "in_flight", "sums", "pulled"),
    [(1, 1, 2, 0), (4, 4, 2, 0), (2, 1, 2, 1), (4, 3, 2, 1), (3, 1, 3, 1), (4, 2, 3, 1), (7, 1, 3, 1)],
)
def test_what_waits_for_an_answer_depends_on_the_updates_until_it_is_needed(nm, in_flight, sums, pulled):
    parts = stage_memory(stage_sums(mlp(2, 32, 1), (0,)), in_flight, kind("cpu"), MemoryRule(1.0), nm)
    assert (parts["own_sums"], parts["pulled"]) == (sums * 4 * 32 * 32, pulled * 4 * 32 * 32)


def test_workspace_is_that_of_the_block_which_needs_most():
    chain = replace(mlp(4, 32, 1), workspace=(7, 900, 30, 5), optimizer_factor=0.0)
    for stage, most in (((0,), 7), ((0, 1), 900), ((2, 3), 30), ((3,), 5)):
        assert stage_memory(stage_sums(chain, stage), 3, CARD, MemoryRule(0.0))["workspace"] == most


@pytest.mark.parametrize(("name", "step", "pulled"), [("card", 1.5 * 3000, 0), ("cpu", 2 * 2000, 3000)])
def test_the_optimizers_step_uses_what_its_minibatch_has_freed(name, step, pulled):
    """On a GPU all parameters at once, on a CPU the largest; and on a CPU pulled weights wait in the same memory."""
    parameters = (SharedBytes("a", 1000, (0,)), SharedBytes("b", 2000, (1,)))
    rule = MemoryRule(0.0, step_factor=1.5, loop_factor=2.0)
    for saved, workspace in ((0, step), (1000, step - 1000), (step - 40, 50)):
        chain = replace(
            mlp(2, 8, 1), parameters=parameters, saved=(SharedBytes("s", int(saved), (0,)),), workspace=(50, 10)
        )
        parts = stage_memory(stage_sums(chain, (0, 1)), 4, kind(name), rule)
        assert (parts["workspace"], parts["pulled"]) == (workspace, pulled)


def test_resident_is_all_there_is():
    chain = replace(mlp(3, 32, 1), resident=(5, 6, 7))
    parts = stage_memory(stage_sums(chain, (1, 2)), 4, CARD, MemoryRule(1.0))
    assert parts["total"] == parts["weights"] == 13
    assert parts["capacity"] == CARD.memory_bytes


def test_total_is_the_sum_of_the_parts_without_the_reserve():
    chain, rule = replace(mlp(7, 33, 5), optimizer_factor=0.3), MemoryRule(0.3, 2, True)
    for in_flight in (1, 3):
        sums = stage_sums(chain, range(2, 6))
        parts = stage_memory(sums, in_flight, CARD, rule)
        assert total_bytes(sums, in_flight, CARD, rule) == parts["total"] - parts["reserve"]
