"""Models of awkward kinds train in stages exactly as the definition of WSP trains them whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import compile_kind, loss_of
from oracles import wsp
from safetensors.torch import load_file

from hetpipe_compiler import Workload
from hetpipe_compiler.runtime.interpret import interpret

MINIBATCHES = 6
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}
#: Without random numbers: those of a run follow its stages.
NAMES = (
    "TiedLM", "SkipOver", "RoPEDecoder", "BNConvNet", "InplaceNet", "MaskedInt", "NestedIO", "FrozenLoRA", "UnusedEven",
    "BranchyDAG", "OptionalKeywords", "ConstInForward", "Identity", "NoGrad", "CalledTwice", "ObjectInBatch",
    "UsedAtTimes",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def minibatches(name: str, workload: Workload) -> list[Any]:
    """The example again and again; of `UsedAtTimes` every second one does not use its layer."""
    batches = [workload.example_batch() for _ in range(MINIBATCHES)]
    return [(-x if p % 2 else x, y) for p, (x, y) in enumerate(batches)] if name == "UsedAtTimes" else batches


@pytest.mark.parametrize(
    ("name", "optimizer", "nm", "staleness"),
    [(n, ("sgd", "adamw")[at % 2], (4, 2, 1)[at % 3], at % 2) for at, n in enumerate(NAMES)],
)
def test_stages_train_as_the_definition_says(
    name: str, optimizer: str, nm: int, staleness: int, tmp_path: Path
) -> None:
    folder, loaded, plan = compile_kind(name, tmp_path / "plan", most=1, nm=nm, staleness=staleness)
    example = loaded.workload
    workload = dataclasses.replace(example, optimizer=OPTIMIZERS[optimizer], data=lambda *_: minibatches(name, example))
    loaded = dataclasses.replace(loaded, workload=workload)
    result = interpret(plan, folder, loaded, minibatches=MINIBATCHES, seed=0, reproducible=True)
    trainable = {t.name for t in plan.parameters if t.trainable}
    read = {n for s in plan.virtual_workers[0].stages for n in s.parameters} & trainable
    whole, groups = [], []
    for worker in plan.virtual_workers:
        torch.manual_seed(0)
        model = workload.model().train()
        for other, parameter in model.named_parameters():
            parameter.requires_grad_(other in read)
        whole.append(model)
        own = [(tuple(n for n in stage.parameters if n in read), stage.in_flight) for stage in worker.stages]
        groups.append([wsp.Group(names, w) for names, w in own if names])
    batches = [minibatches(name, example) for _ in whole]
    expected = wsp.train(
        whole,
        groups,
        batches,
        nm=nm,
        staleness=staleness,
        scale=1 / len(whole),
        make_optimizer=workload.optimizer,
        loss_of=lambda model, batch: loss_of(workload, model, batch),
    )
    for key, value in expected.weights.items():
        torch.testing.assert_close(
            result.weights[key], value, rtol=1e-9, atol=1e-11, msg=lambda m, key=key: f"{key}: {m}"
        )
    initial = load_file(folder / "weights.safetensors")
    assert result.weights.keys() == initial.keys()
    for key in initial.keys() & {p.name for p in plan.parameters} - read:  # trained by nobody, and not lost
        assert torch.equal(result.weights[key], initial[key]), key
    for vw, losses in enumerate(expected.losses):
        found = [result.losses[vw][p] for p in range(1, MINIBATCHES + 1)]
        assert found == pytest.approx(losses, rel=1e-9)
    for key, buffer in whole[0].named_buffers():
        if buffer.is_floating_point() and any(key in s.buffers for s in plan.virtual_workers[0].stages):
            mean = torch.stack([dict(m.named_buffers())[key] for m in whole]).mean(0)
            torch.testing.assert_close(result.weights[key], mean, rtol=1e-9, atol=1e-11)
