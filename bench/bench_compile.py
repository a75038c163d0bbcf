"""Benchmarks of counting and of the whole command: ``pytest bench/bench_compile.py``.

The goals on two CPU cores: counting ResNet-152 takes less than 3 s and Llama-7B less than 10 s; the whole command for
Llama-7B and for a BERT of 4.9 billion parameters less than 60 s and 4 GB.
"""

from __future__ import annotations

import pytest
from compile_example import ROOT, compile_example

from hetpipe_compiler.frontend.capture import capture
from hetpipe_compiler.frontend.load import load_workload
from hetpipe_compiler.passes.annotate_cost import count_costs
from hetpipe_compiler.passes.normalize import normalize


@pytest.mark.parametrize("name", ["resnet152", "llama7b", "bert5b"])
def test_counting(benchmark, name):
    """The costs of all nodes, from a graph that is captured already."""
    captured = normalize(capture(load_workload(ROOT / "examples" / name / "model.py")))
    costs = benchmark.pedantic(count_costs, (captured,), rounds=3, warmup_rounds=1)
    benchmark.extra_info["nodes"] = len(costs)


@pytest.mark.parametrize("name", ["llama7b", "bert5b"])
def test_whole_compile(benchmark, name, tmp_path):
    """From starting Python to the written plan folder."""
    took = benchmark.pedantic(compile_example, (name, tmp_path / "plan"), rounds=2)
    benchmark.extra_info["peak_gb"], benchmark.extra_info["cpu_seconds"] = took.peak_bytes / 1e9, took.cpu_seconds
