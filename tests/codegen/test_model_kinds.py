"""Models of every awkward kind: their stages compute what they compute, wherever they are cut; or they are refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import models
import pytest
import torch
from kinds import MODELS, chained, chained_in_eval, compile_kind, eager, eager_in_eval

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.capture import capture
from hetpipe_compiler.frontend.load import load_workload
from hetpipe_compiler.passes.annotate_cost import count_costs
from hetpipe_compiler.passes.normalize import normalize

#: Their arithmetic is in these dtypes on purpose; all others are compared in float64.
LOW_PRECISION = ("MixedDtype", "Autocast")


@pytest.fixture(autouse=True)
def _float64(request: pytest.FixtureRequest) -> Iterator[None]:
    name = request.node.callspec.params.get("name") if hasattr(request.node, "callspec") else None
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if name in LOW_PRECISION else torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", models.KINDS)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning", "ignore:None of the inputs have requires_grad")
def test_stages_compute_what_the_model_computes(name: str, tmp_path: Path) -> None:
    folder, loaded, plan = compile_kind(name, tmp_path / "out")
    expected = eager(loaded)
    idle = {f"buffer {b.name}" for b in plan.buffers} - {
        f"buffer {n}" for s in plan.virtual_workers[0].stages for n in s.buffers
    }
    before = dict(loaded.workload.model().named_buffers())
    assert all(torch.equal(expected[name], before[name.removeprefix("buffer ")]) for name in idle)
    assert max(len(w.stages) for w in plan.virtual_workers) > 1
    for worker in plan.virtual_workers:
        found = chained(folder, loaded, worker.index)
        cut = [stage.blocks for stage in worker.stages]
        assert found.keys() == expected.keys() - idle, cut
        for key, value in found.items():
            difference = (value.double() - expected[key].double()).abs().max().item()
            assert difference <= 1e-9 * (1 + expected[key].double().abs().max().item()), f"{key}, cut {cut}"
    assert plan.evaluation, plan.evaluation_note
    in_eval = eager_in_eval(loaded)
    for worker in plan.virtual_workers:
        torch.testing.assert_close(chained_in_eval(folder, loaded, worker.index), in_eval, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["BNConvNet", "NoGrad", "CalledTwice", "BufferWrites"])
def test_the_plan_says_which_buffers_change(name: str, tmp_path: Path) -> None:
    _, loaded, plan = compile_kind(name, tmp_path / "out", most=1)
    assert plan.buffers
    before = {n: b.clone() for n, b in loaded.workload.model().named_buffers()}
    after = {k.removeprefix("buffer "): v for k, v in eager(loaded).items() if k.startswith("buffer ")}
    assert {b.name for b in plan.buffers if b.mutated} == {n for n in before if not torch.equal(before[n], after[n])}


EXPECTED = {
    "BranchOnValue": ("HP111", "depends on a tensor's values"),
    "Condition": ("HP112", "cond"),
    "Counter": ("HP113", "'calls' from call to call (0, then 1)"),
    "PlainState": ("HP113", "'plain'"),
    "BooleanIndex": ("HP114", "aten.index.Tensor"),
    "ItemInForward": ("HP114", "aten.item.default"),
    "WritesParameter": ("HP117", "'a.weight'"),
    "WritesParameterView": ("HP117", "'a.weight'"),
    "CumulativeNorm": ("HP111", "depends on a tensor's values"),
    "EarlyAutocast": ("HP115", "outside forward"),
    "KeepsLast": ("HP113", "'last'"),
    "Resized": ("HP113", "'grown'"),
    "Keyword": ("HP118", "keyword"),
    "SharedMemory": ("HP116", "'a.weight' share memory"),
    "WritesPlain": ("HP113", "writes into 'plain'"),
    "BufferOfParameter": ("HP116", "'a.weight' and buffer 'follows' share memory"),
    "WritesSharedBuffer": ("HP116", "buffer 'row', which shares memory with 'table'"),
    "ListedParameter": ("HP128", "the gradients are not those of"),
    "PythonRandom": ("HP112", "random numbers of Python or NumPy"),
    "Seeded": ("HP112", "sets the seed"),
    "SameNoiseTwice": ("HP112", "sets the state of random numbers"),
    "ForksNoise": ("HP112", "sets the state of random numbers"),
    "SeedsGenerator": ("HP112", "sets the seed"),
    "TrainsItself": ("HP112", "takes gradients itself"),
    "GradientPenalty": ("HP112", "takes gradients itself"),
    "Mapped": ("HP112", "torch.vmap"),
    "HooksSaved": ("HP119", "hooks what is saved"),
    "SwitchesTraining": ("HP113", "switches the training of a parameter"),
    "SwapsModules": ("HP113", "exchanges, adds or removes 'a'"),
    "SetsData": ("HP112", "assigns to the data"),
    "ClampsWeights": ("HP117", "writes into parameter 'a.weight'"),
    "OwnGenerator": ("HP112", "a Generator of its own"),
    "StraightThrough": ("HP119", "Straight has a backward"),
    "HooksGradient": ("HP119", "hangs a hook"),
    "ParameterHook": ("HP119", "parameter 'a.weight' has a hook"),
    "ModuleHook": ("HP119", "module 'a' has a backward hook"),
    "DetachedLoss": ("HP108", "reaches a trainable parameter"),
    "WrongShape": ("HP110", "cannot be multiplied"),
    "NoScalar": ("HP107", "tensor of shape (batch, 5)"),
    "NoLoss": ("HP107", "returned tuple without a loss"),
    "Frozen": ("HP108", "no trainable parameter"),
    "TooManyTargets": ("HP106", "targets=3"),
    "MissingKey": ("HP106", "target 'label'"),
}


@pytest.mark.parametrize("name", models.REFUSED)
@pytest.mark.filterwarnings("ignore:.*CUDA is not available.*:UserWarning")
def test_what_cannot_be_kept_is_refused_at_its_line(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkloadError) as caught:
        count_costs(normalize(capture(load_workload(MODELS, {"name": name}))))
    code, part = EXPECTED[name]
    assert caught.value.code == code
    assert part in caught.value.message
    line = _marked_line(name, code)
    if line is not None:
        assert str(caught.value.where).endswith(f"models.py:{line}")
    printed = capfd.readouterr()
    assert printed.out + printed.err == "", "export's own words must not reach the terminal"


def _marked_line(name: str, code: str) -> int | None:
    """The line of the class that carries ``# HPnnn``."""
    lines = MODELS.read_text().splitlines()
    start = next((at for at, line in enumerate(lines) if re.match(rf"class {name}\b", line)), None)
    if start is None:
        return None
    for at, line in enumerate(lines[start + 1 :], start + 2):
        if line.startswith("class "):
            return None
        if line.endswith(f"# {code}"):
            return at
    return None
