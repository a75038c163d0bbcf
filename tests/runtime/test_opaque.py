"""A module kept whole inside its stage: trained, moved, pickled, and watched."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import load_stage
from oracles import wsp
from safetensors.torch import load_file
from toy_run import hetpipe_run

from hetpipe_compiler.compiler import CompileOptions, compile
from hetpipe_compiler.errors import RunError
from hetpipe_compiler.frontend.load import load_workload
from hetpipe_compiler.ir.plan import Plan
from hetpipe_compiler.runtime.forward_only import ForwardOnly
from hetpipe_compiler.runtime.interpret import interpret

MODEL = """
import torch
from torch import nn
from hetpipe_compiler import Workload


class Settle(nn.Module):
    '''Goes on until its values have settled.'''

    def __init__(self):
        super().__init__()
        self.layer, self.gain = nn.Linear(12, 12), nn.Parameter(torch.ones(12))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.scale = torch.tensor(0.5)

    def forward(self, x):
        for _ in range(10):
            new = torch.tanh(self.layer(x)) * self.gain * self.scale
            self.steps = self.steps + 1
            if (new - x).detach().abs().max() < 0.1:
                break
            x = new
        if (new.detach() > 50).any():
            return new[:1]
        if new.isnan().any():
            with torch.no_grad():
                self.gain.zero_()
        return new


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.settle, self.b = nn.Linear(12, 12), Settle(), nn.Linear(12, 12)
        self.b.weight = self.settle.layer.weight
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        return self.head(torch.relu(self.b(self.settle(torch.relu(self.a(x))))))


def batches(shard, num_shards, seed):
    generator = torch.Generator().manual_seed(100 + shard)
    sizes = [6] * 9 + [4]
    return [(torch.randn(n, 12, generator=generator), torch.randint(0, 5, (n,), generator=generator)) for n in sizes]


def workload():
    return Workload(
        model=Net,
        loss=nn.CrossEntropyLoss(),
        example=(torch.randn(6, 12, generator=torch.Generator().manual_seed(1)), torch.zeros(6, dtype=torch.int64)),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        data=batches,
    )
"""
CLUSTER = "name: box\nnodes: [{name: n0, devices: {cpu: 4}, link: loopback}]\n"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan]:
    folder = tmp_path_factory.mktemp("opaque")
    (folder / "model.py").write_text(MODEL)
    (folder / "c.yaml").write_text(CLUSTER)
    (folder / "groups.yaml").write_text("virtual_workers: [[n0:0, n0:1], [n0:2, n0:3]]\n")
    options = CompileOptions(
        policy=str(folder / "groups.yaml"),
        nm=3,
        staleness=1,
        splits=(("head",), ("b",)),
        seed=5,
        opaque=("settle",),
        recompute="always",
        verify=True,
    )
    return folder, compile(folder / "model.py", folder / "c.yaml", folder / "plan", options=options).plan


def _oracle(folder: Path, plan: Plan) -> wsp.Outcome:
    workload = load_workload(folder / "model.py").workload
    models = [workload.model() for _ in range(2)]
    for model in models:
        model.load_state_dict(load_file(folder / "plan" / "weights.safetensors"), strict=False)
    assert workload.data is not None
    return wsp.train(
        models,
        [[wsp.Group(s.parameters, s.in_flight) for s in w.stages] for w in plan.virtual_workers],
        [list(workload.data(shard, 2, 0)) for shard in range(2)],
        nm=plan.nm,
        staleness=plan.staleness,
        scale=0.5,
        make_optimizer=workload.optimizer,
        loss_of=lambda model, batch: workload.loss(model(batch[0]), batch[1]),
    )


def test_interpreter_and_processes_train_as_the_oracle_does(compiled: tuple[Path, Plan], tmp_path: Path) -> None:
    folder, plan = compiled
    torch.set_num_threads(1)
    stage = next(s for w in plan.virtual_workers for s in w.stages if "settle.gain" in s.parameters)
    assert stage.in_flight > 1, "weight versions should be in play"
    assert not stage.recompute, "what else the module keeps or draws is unknown: it cannot run again"
    carried = [p.name for s in plan.virtual_workers[1].stages for p in s.inputs if p.kind == "parameter"]
    assert carried == ["shared_settle_layer_weight"], "a weight of the module should be used in another stage"
    expected = _oracle(folder, plan)
    loaded = load_workload(folder / "model.py")
    found = interpret(plan, folder / "plan", loaded, minibatches=10, seed=5, reproducible=True).weights
    for name, value in expected.weights.items():
        assert torch.equal(found[name], value), name
    assert int(found["settle.steps"]) == sum(int(m.get_buffer("settle.steps")) for m in expected.models) > 2 * 10
    done = hetpipe_run(folder / "plan", tmp_path / "run", "--steps", "10", "--seed", "5", "--reproducible", timeout=120)
    assert done.returncode == 0, done.stderr
    trained = load_file(tmp_path / "run" / "weights.safetensors")
    for name, value in expected.weights.items():
        assert torch.equal(trained[name], value), name


def test_the_folder_moves_and_the_stage_pickles(compiled: tuple[Path, Plan], tmp_path: Path) -> None:
    folder, plan = compiled
    shutil.copytree(folder / "plan", tmp_path / "moved")
    batch = [torch.ones(4, 12), torch.zeros(4, dtype=torch.int64)]
    expected = ForwardOnly(folder / "plan").loss(batch)
    assert torch.equal(ForwardOnly(tmp_path / "moved").loss(batch), expected)
    planned = plan.virtual_workers[0].stages[0]
    stage = load_stage(tmp_path / "moved", str(planned.module))
    own = {"a.weight", "a.bias", "settle.layer.weight", "settle.layer.bias", "settle.gain", "settle.steps", "b.bias"}
    assert set(stage.state_dict()) == own, "the model's own names, and nothing of what the module is cut out of"
    weights = {**load_file(folder / "plan" / "weights.safetensors"), **load_file(folder / "plan/constants.safetensors")}
    stage.load_state_dict({name: weights[name] for name in own})
    stage.constant_settle_scale.fill_(0.5)
    again = pickle.loads(pickle.dumps(stage))
    for a, b in zip(stage(*batch), again(*batch), strict=True):
        assert torch.equal(a, b)
    assert int(stage.get_buffer("settle.steps")) == int(again.get_buffer("settle.steps")) > 0


def test_a_size_that_depends_on_values_after_all_ends_the_run(compiled: tuple[Path, Plan]) -> None:
    folder, _ = compiled
    weights: dict[str, Any] = load_file(folder / "plan" / "weights.safetensors")
    weights["settle.gain"] = torch.full((12,), 1e4)
    with pytest.raises(RunError) as caught:
        ForwardOnly(folder / "plan", weights=weights).loss([torch.ones(4, 12), torch.zeros(4, dtype=torch.int64)])
    assert caught.value.code == "HP519"
    assert "'settle' returned [[1, 12]], but the plan was made for [[4, 12]]" in caught.value.message
    assert str(caught.value.where).startswith("model.py:")
    assert "(settle)" in str(caught.value.where)


def test_a_write_that_the_example_does_not_show_is_named(compiled: tuple[Path, Plan]) -> None:
    folder, _ = compiled
    weights: dict[str, Any] = load_file(folder / "plan" / "weights.safetensors")
    weights["settle.gain"] = torch.full((12,), float("nan"))
    with pytest.raises(RunError) as caught:
        ForwardOnly(folder / "plan", weights=weights).loss([torch.ones(4, 12), torch.zeros(4, dtype=torch.int64)])
    assert caught.value.code == "HP519"
    assert "'settle' wrote into its 'gain', which the plan does not know of" in caught.value.message
