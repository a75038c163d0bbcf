"""The memory tables against golden text, and plans with more stages than a line has room for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from handmade_plans import equal_distribution, node_partition, worker

from hetpipe_compiler.codegen.memory_tables import memory_text
from hetpipe_compiler.ir.plan import Plan

GOLDEN = Path(__file__).parent.parent / "golden"


def deep(stages: int) -> Plan:
    devices = [(f"n{at // 4}:{at % 4}", "titan-v", 1.0 + at) for at in range(stages)]
    deep = worker(0, devices, [None] * stages)
    return equal_distribution().model_copy(update={"virtual_workers": (deep,)})


@pytest.mark.parametrize("name", ["ed", "np", "deep"])
def test_tables_are_the_golden_ones(name: str) -> None:
    plan = {"ed": equal_distribution, "np": node_partition, "deep": lambda: deep(11)}[name]()
    text, golden = memory_text(plan, width=80), GOLDEN / f"memory_{name}_80.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


def test_what_a_cpu_or_a_profiled_graph_says_has_no_mark() -> None:
    plan = equal_distribution()
    assert "activations *" in memory_text(plan, width=80)
    assert "*" not in memory_text(plan.model_copy(update={"counted_with": None}), width=80)
    cpus = tuple(
        w.model_copy(update={"stages": tuple(s.model_copy(update={"kind": "cpu-fast"}) for s in w.stages)})
        for w in plan.virtual_workers
    )
    assert "*" not in memory_text(plan.model_copy(update={"virtual_workers": cpus}), width=80)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_stage_is_shown_and_no_line_is_too_wide(width: int) -> None:
    text = memory_text(deep(16), width=width)
    assert max(map(len, text.splitlines())) <= width
    heads = " ".join(line for line in text.splitlines() if "stage" in line and "stages" not in line).split()
    assert [int(word) for word in heads if word.isdigit()] == list(range(16))


def test_pulled_weights_wait_on_the_host_of_a_gpu_and_in_a_cpus_stage() -> None:
    plan = equal_distribution()
    trainable = sum(
        stage.memory_bytes["gradients"] for w in plan.virtual_workers for stage in w.stages if stage.device[:3] == "n0:"
    )
    assert f"{trainable / 1e6:.0f} MB" in memory_text(plan, width=80).partition("host memory")[2]
    inside = tuple(
        w.model_copy(
            update={
                "stages": tuple(
                    s.model_copy(update={"memory_bytes": s.memory_bytes | {"pulled": 7_000_000}}) for s in w.stages
                )
            }
        )
        for w in plan.virtual_workers
    )
    stages, _, hosts = memory_text(plan.model_copy(update={"virtual_workers": inside}), width=80).partition("host")
    assert "7.00 MB" in stages
    assert f"{trainable / 1e6:.0f} MB" not in hosts
