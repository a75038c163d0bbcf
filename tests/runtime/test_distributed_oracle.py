"""Compiled and trained as a user would, with real processes: `--reproducible` equals the WSP oracle bit for bit."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import wsp
from safetensors.torch import load_file
from toy_run import hetpipe_run

from hetpipe_compiler.compiler import CompileOptions, compile
from hetpipe_compiler.frontend.load import load_workload
from hetpipe_compiler.ir.plan import Plan
from hetpipe_compiler.runtime.interpret import interpret

#: Minibatches by Nm: enough that gates are passed at D = 4, and at Nm = 4 the last wave is short.
MINIBATCHES = {1: 8, 4: 26}

MODEL = """
import torch
from torch import nn
from hetpipe_compiler import Workload


def batches(shard, num_shards, seed):
    generator = torch.Generator().manual_seed(100 + shard)
    sizes = [6] * 25 + [4]
    return [(torch.randn(n, 12, generator=generator), torch.randint(0, 5, (n,), generator=generator)) for n in sizes]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x):
        h = torch.relu(self.a(x))
        return self.d(torch.tanh(self.c(torch.relu(self.b(h)))) + h)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


def workload(optimizer="sgd"):
    return Workload(
        model=Net,
        loss=nn.CrossEntropyLoss(),
        example=(torch.zeros(6, 12), torch.zeros(6, dtype=torch.int64)),
        optimizer=OPTIMIZERS[optimizer],
        data=batches,
    )
"""

CLUSTER = """
name: box
nodes: [{name: n0, devices: {cpu: 5}, link: loopback}]
"""


def _compile(folder: Path, *, nm: int, staleness: int, workers: int, optimizer: str) -> Plan:
    (folder / "model.py").write_text(textwrap.dedent(MODEL))
    (folder / "c.yaml").write_text(CLUSTER)
    groups = ["[n0:0, n0:1]", "[n0:2, n0:3]", "[n0:4]"][:workers]
    (folder / "groups.yaml").write_text(f"virtual_workers: [{', '.join(groups)}]\n")
    splits: tuple[tuple[str | int, ...], ...] = (("linear_1",), ("linear_2",), ())
    options = CompileOptions(
        policy=str(folder / "groups.yaml"), nm=nm, staleness=staleness, splits=splits[:workers], seed=5
    )
    settings = {"optimizer": optimizer}
    return compile(folder / "model.py", folder / "c.yaml", folder / "plan", settings=settings, options=options).plan


def _oracle(folder: Path, plan: Plan, minibatches: int) -> wsp.Outcome:
    workload = load_workload(folder / "model.py", plan.workload.settings if plan.workload else {}).workload
    count = len(plan.virtual_workers)
    models = [workload.model() for _ in range(count)]
    for model in models:
        model.load_state_dict(load_file(folder / "plan" / "weights.safetensors"))
    groups = [[wsp.Group(s.parameters, s.in_flight) for s in w.stages] for w in plan.virtual_workers]
    assert workload.data is not None
    return wsp.train(
        models,
        groups,
        [list(workload.data(shard, count, 0))[:minibatches] for shard in range(count)],
        nm=plan.nm,
        staleness=plan.staleness,
        scale=1 / count,
        make_optimizer=workload.optimizer,
        make_scheduler=None,
        loss_of=lambda model, batch: workload.loss(model(batch[0]), batch[1]),
    )


def _assert_equal(weights: dict[str, torch.Tensor], expected: wsp.Outcome) -> None:
    assert weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        assert torch.equal(weights[name], value), name


def _assert_bounds_kept(run: Path) -> None:
    events: list[dict[str, Any]] = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    forwards = [e for e in events if e["kind"] == "forward"]
    assert forwards
    assert all(e["clock"] >= e["need"] for e in forwards)


CASES = [(nm, d, n) for nm in (1, 4) for d in (0, 1, 4) for n in (2, 3)]
#: Each optimizer meets each Nm, D and N; the other half of the pairs runs with the slow tests.
PAIRS = [(*case, name) for i, case in enumerate(CASES) for name in (("sgd", "adamw")[(i + case[0]) % 2],)]
OTHERS = [(*case, name) for case in CASES for name in ("sgd", "adamw") if (*case, name) not in PAIRS]


@pytest.mark.parametrize(
    ("nm", "staleness", "workers", "optimizer"), [*PAIRS, *(pytest.param(*o, marks=pytest.mark.slow) for o in OTHERS)]
)
def test_processes_interpreter_and_oracle_agree(
    tmp_path: Path, nm: int, staleness: int, workers: int, optimizer: str
) -> None:
    torch.set_num_threads(1)
    plan = _compile(tmp_path, nm=nm, staleness=staleness, workers=workers, optimizer=optimizer)
    assert len({tuple(s.blocks for s in w.stages) for w in plan.virtual_workers}) == workers, "the cuts should differ"
    minibatches = MINIBATCHES[nm]
    expected = _oracle(tmp_path, plan, minibatches)
    loaded = load_workload(tmp_path / "model.py", {"optimizer": optimizer})
    result = interpret(
        plan, tmp_path / "plan", loaded, minibatches=minibatches, seed=5, reproducible=True, on_event=None
    )
    _assert_equal(dict(result.weights), expected)
    done = hetpipe_run(
        tmp_path / "plan", tmp_path / "run", "--steps", str(minibatches), "--seed", "5", "--reproducible", timeout=120
    )
    assert done.returncode == 0, done.stderr
    _assert_equal(load_file(tmp_path / "run" / "weights.safetensors"), expected)
    _assert_bounds_kept(tmp_path / "run")


def test_free_running_keeps_the_bounds_and_trains(tmp_path: Path) -> None:
    plan = _compile(tmp_path, nm=4, staleness=1, workers=3, optimizer="sgd")
    done = hetpipe_run(tmp_path / "plan", tmp_path / "run", "--steps", "26", timeout=120)
    assert done.returncode == 0, done.stderr
    _assert_bounds_kept(tmp_path / "run")
    before, after = (
        load_file(tmp_path / "plan" / "weights.safetensors"),
        load_file(tmp_path / "run" / "weights.safetensors"),
    )
    assert all(not torch.equal(before[p.name], after[p.name]) for p in plan.parameters)
