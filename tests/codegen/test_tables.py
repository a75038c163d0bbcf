"""The tables against golden text, and the pieces that the golden plans do not reach."""

from __future__ import annotations

from pathlib import Path

import pytest
from handmade_plans import equal_distribution, node_partition

from hetpipe_compiler.codegen.quantities import bar, bytes_of, bytes_text, device_ranges, digits, number_ranges
from hetpipe_compiler.codegen.tables import plan_text
from hetpipe_compiler.errors import ArtifactError
from hetpipe_compiler.ir.plan import Plan

GOLDEN = Path(__file__).parent.parent / "golden"
PLANS = {"ed": equal_distribution, "np": node_partition}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", PLANS)
def test_tables_are_the_golden_ones(name: str, width: int) -> None:
    plan = PLANS[name]()
    expected = (GOLDEN / f"tables_{name}_{width}.txt").read_text()
    assert plan_text(plan, width=width) == expected


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal_and_no_number_is_cut(width: int) -> None:
    for plan in (equal_distribution(), node_partition()):
        text = plan_text(plan, width=width)
        assert max(map(len, text.splitlines())) <= width
        assert text.count("…") == 0


def test_stages_that_recompute_are_marked_and_explained() -> None:
    (worker, *others) = node_partition().virtual_workers
    first, *rest = worker.stages
    stages = (first.model_copy(update={"recompute": True}), *rest)
    changed = node_partition().model_copy(
        update={"virtual_workers": (worker.model_copy(update={"stages": stages}), *others)}
    )
    before, after = (plan_text(plan, width=120).splitlines() for plan in (node_partition(), changed))
    marked = [line for line in after if " 4 r " in line]
    assert len(marked) == 1
    assert "n0:0" in marked[0]
    assert "r: keeps its inputs only; its backward runs its forward again first" in after
    assert len(after) == len(before) + 1


def test_a_title_longer_than_its_table_stays_on_one_line() -> None:
    plan = node_partition()
    worker = plan.virtual_workers[0]
    stage = worker.stages[0].model_copy(update={"kind": "t4", "sends_bytes": {}})
    one = worker.model_copy(update={"stages": (stage,), "bottleneck_stage": 0, "samples_per_s": 3e5, "optimal": True})
    lines = plan_text(plan.model_copy(update={"virtual_workers": (one,)}), width=80).splitlines()
    title, *_, rule = lines[next(i for i, line in enumerate(lines) if line.startswith("virtual worker")) :][:4]
    assert title.endswith(" ms")
    assert set(rule.strip()) == {"─"}
    assert len(rule) < len(title)


def test_alike_virtual_workers_are_shown_once_and_unlike_ones_apart() -> None:
    assert plan_text(equal_distribution(), width=120).count("virtual worker") == 1
    assert plan_text(node_partition(), width=120).count("virtual worker") == 2


def test_one_virtual_worker_can_be_chosen() -> None:
    text = plan_text_of(node_partition(), 1)
    assert "virtual worker 1" in text
    assert "virtual worker 0" not in text
    with pytest.raises(ArtifactError, match="no virtual worker 2") as caught:
        plan_text_of(node_partition(), 2)
    assert caught.value.code == "HP441"


def plan_text_of(plan: Plan, vw: int) -> str:
    from rich.console import Console

    from hetpipe_compiler.codegen.tables import plan_tables

    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        for renderable in plan_tables(plan, width=120, vw=vw):
            console.print(renderable)
    return capture.get()


def test_measured_times_carry_no_tilde() -> None:
    plan = equal_distribution()
    assert "~11.0" in plan_text(plan, width=120)
    workers = tuple(
        w.model_copy(update={"stages": tuple(s.model_copy(update={"measured": True}) for s in w.stages)})
        for w in plan.virtual_workers
    )
    text = plan_text(plan.model_copy(update={"virtual_workers": workers, "predicted": "profile"}), width=120)
    assert "~" not in text
    assert "measured" in text


def test_unused_devices_and_fixed_batches_are_told() -> None:
    plan = equal_distribution().model_copy(
        update={"unused_devices": ("n3:2", "n3:3"), "dynamic_batch": False, "dynamic_batch_note": "x.view(32, -1)"}
    )
    text = plan_text(plan, width=80)
    assert "unused devices: n3:2-3" in text
    assert "batch size is fixed at 32: x.view(32, -1)" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.00001234, "1.23e-05"),
        (0.0123, "0.0123"),
        (0.9996, "1.00"),
        (9.996, "10.0"),
        (99.96, "100"),
        (1234.5, "1234"),
    ],
)
def test_digits(value: float, text: str) -> None:
    assert digits(value) == text


def test_bytes() -> None:
    assert [bytes_text(n) for n in (0, 999, 1000, 12_800_000, 999_600_000)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "12.8 MB",
        "1.00 GB",
    ]
    assert bytes_of(3_200_000_000, 12_000_000_000) == "3.20/12.0 GB"
    assert bytes_of(4_000_000, 4_000_000_000) == "0.0040/4.00 GB"
    assert bytes_of(24_700, 4_000_000_000) == "24.7 kB/4.00 GB"  # not 2.47e-05 GB
    assert bytes_of(0, 4_000_000_000) == "0/4.00 GB"


def test_bar_shows_any_use_and_never_overflows() -> None:
    assert [bar(f, 4) for f in (0.0, 0.01, 0.5, 1.0, 1.7)] == ["░░░░", "█░░░", "██░░", "████", "████"]


def test_ranges() -> None:
    assert number_ranges([3, 0, 1, 5]) == "0-1, 3, 5"
    assert device_ranges(["n0:0", "n0:1", "n1:3"]) == "n0:0-1, n1:3"
    assert device_ranges(["n0:0", "n1:0", "n2:0"]) == "n0:0 +2"


def test_who_made_the_stages_is_said_unless_our_search_did() -> None:
    plan = equal_distribution()
    assert "stages by" not in plan_text(plan, width=120)
    text = plan_text(plan.model_copy(update={"partitioner": "even_split:even"}), width=120)
    assert "stages by even_split:even" in text


def test_a_plan_that_is_proven_best_has_no_distance_to_the_bound() -> None:
    plan = equal_distribution()
    assert "above the least bottleneck" in plan_text(plan, width=80)
    best = tuple(worker.model_copy(update={"optimal": True}) for worker in plan.virtual_workers)
    assert "above" not in plan_text(plan.model_copy(update={"virtual_workers": best}), width=80)
