"""Times of instructions: the summary, and that a run leaves it in its log."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from toy_run import hetpipe_run, write_runnable

from hetpipe_compiler.codegen.compare import compare
from hetpipe_compiler.ir.schedule import Instruction, Op
from hetpipe_compiler.runtime.instruction_times import InstructionTimes
from hetpipe_compiler.runtime.worker import Worker


def test_the_first_of_each_is_warm_up() -> None:
    times = InstructionTimes()
    for minibatch, ms in enumerate([900.0, 1.0, 2.0, 3.0], 1):
        times.add(Instruction(Op.FORWARD, minibatch), ms)
    times.add(Instruction(Op.PUSH, 0), 7.0)
    summary = times.summary()
    assert summary["forward"] == {"count": 3, "median_ms": 2.0, "low_ms": 1.0, "high_ms": 3.0}
    # The only one there is.
    assert summary["push"]["median_ms"] == 7.0
    assert json.loads(json.dumps(summary)) == summary


@pytest.mark.parametrize(
    ("op", "threads", "scale", "own"),
    [
        (Op.FORWARD, 1, None, True),
        (Op.BACKWARD, 1, None, True),
        (Op.PUSH, 1, None, False),  # waits
        (Op.FORWARD, 2, None, False),  # the other thread works too
        (Op.FORWARD, 1, 1.0, False),  # a pace is kept by waiting
    ],
)
def test_one_threads_computing_is_timed_without_other_programs(op, threads, scale, own) -> None:
    worker = SimpleNamespace(device=torch.device("cpu"), job=SimpleNamespace(threads=threads), time_scale=scale)
    clock = Worker._clock_of(worker, Instruction(op, 1))
    assert clock is (time.thread_time if own else time.perf_counter)


@pytest.mark.slow
def test_a_run_leaves_times_that_can_be_compared(tmp_path: Path) -> None:
    plan = write_runnable(tmp_path / "plan", cuts=((2,),), in_flight=((2, 1),), batches=4)
    result = hetpipe_run(tmp_path / "plan", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    compared = compare(plan, tmp_path / "run")
    assert [(c.vw, c.stage, c.count) for c in compared] == [(0, 0, 3), (0, 1, 3)]
    assert all(ms > 0 for c in compared for ms in c.measured_ms)
