"""A GPT-2 that its devices have no room for: compiled with recomputation it fits, and trains to the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_recompute import recomputing

from hetpipe_compiler.compiler import CompileOptions, compile
from hetpipe_compiler.errors import PlanningError
from hetpipe_compiler.frontend.load import load_workload
from hetpipe_compiler.runtime.interpret import interpret

MODEL = Path(__file__).parent.parent / "examples/gpt2/model.py"
SETTINGS = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 256, "batch_size": 4, "seq_len": 64}
CLUSTER = """
nodes: [{name: n0, devices: {small: 2}, link: pcie3-x16}]
kinds: {small: {memory_bytes: 8200000, reserve_mib: 0, fp32_tflops: 10, memory_bandwidth_gb_s: 500}}
"""


def test_gpt2_fits_with_recomputation_only_and_trains_the_same(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    (tmp_path / "c.yaml").write_text(CLUSTER)
    options = CompileOptions(policy="NP", nm=3, recompute="never")
    with pytest.raises(PlanningError, match="does not fit with Nm = 3"):
        compile(MODEL, tmp_path / "c.yaml", tmp_path / "plan", settings=SETTINGS, options=options)
    options = replace(options, recompute="auto")
    plan = compile(MODEL, tmp_path / "c.yaml", tmp_path / "plan", settings=SETTINGS, options=options).plan
    first, last = plan.virtual_workers[0].stages
    assert (first.in_flight, first.recompute, last.recompute) == (3, True, False)
    assert all(stage.memory_bytes["total"] <= 8_200_000 for stage in (first, last))
    assert first.backward_ms > first.forward_ms
    assert first.share + last.share == pytest.approx(1.0)
    loaded = load_workload(MODEL, SETTINGS)  # with dropout
    runs = [
        interpret(changed, tmp_path / "plan", loaded, minibatches=5, seed=1, reproducible=True)
        for changed in (plan, recomputing(plan, stages=set()))
    ]
    assert runs[0].losses == runs[1].losses
    for name, value in runs[1].weights.items():
        assert torch.equal(runs[0].weights[name], value), name
