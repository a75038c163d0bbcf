"""A plan whose stages a partitioner of the user's own made is trained like any other, wherever its folder lies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kinds import MODELS, cluster_of
from safetensors.torch import load_file
from toy_run import hetpipe_run

from hetpipe_compiler.compiler import CompileOptions, compile
from hetpipe_compiler.frontend.load import load_workload
from hetpipe_compiler.ir.plan import Plan
from hetpipe_compiler.runtime.interpret import interpret

PARTITIONER = """
def growing(problem):
    '''One block, two blocks, and the rest.'''
    first, second, third = (device.id for device in problem.devices)
    return [(first, [0]), (second, [1, 2]), (third, range(3, len(problem.chain)))]
"""


def test_it_trains_after_its_folder_has_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "partitioners_of_ours.py").write_text(PARTITIONER)
    monkeypatch.syspath_prepend(str(tmp_path))  # the run's processes do not have it
    options = CompileOptions(policy="NP", nm=3, partitioner="partitioners_of_ours:growing", recompute="always")
    compile(MODELS, cluster_of(1), tmp_path / "made", settings={"name": "SkipOver"}, options=options)
    folder = (tmp_path / "made").rename(tmp_path / "moved")
    plan = Plan.load(folder)
    stages = plan.virtual_workers[0].stages
    assert [stage.blocks[0] for stage in stages] == [0, 1, 3]
    assert [stage.recompute for stage in stages] == [True, True, False]
    done = hetpipe_run(folder, tmp_path / "run", "--steps", "7", "--seed", "3", "--reproducible", timeout=120)
    assert done.returncode == 0, done.stderr
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    loaded = load_workload(folder / "model.py", {"name": "SkipOver"})
    expected = interpret(plan, folder, loaded, minibatches=7, seed=3, reproducible=True)
    torch.set_num_threads(threads)
    trained = load_file(tmp_path / "run" / "weights.safetensors")
    initial = load_file(folder / "weights.safetensors")
    for name, value in expected.weights.items():
        assert torch.equal(trained[name], value), name
        assert not torch.equal(trained[name], initial[name]), name
