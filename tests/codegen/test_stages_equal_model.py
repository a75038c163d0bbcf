"""Stages chained in one process give the original model's loss, every gradient and every buffer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles.stages import StageChain

from hetpipe_compiler.compiler import CompileOptions, compile
from hetpipe_compiler.frontend.load import load_workload
from hetpipe_compiler.frontend.training_step import TrainingStep

EXAMPLES = Path(__file__).parents[2] / "examples"

#: Settings (small inputs, no dropout: its random numbers are another matter), and a cut by hand where the planner would
#: keep the small model whole: the tied weights of gpt2 are then cut apart.
CASES: dict[str, tuple[dict[str, Any], tuple[tuple[str | int, ...], ...] | None]] = {
    "digits": ({"batch_size": 8}, None),
    "resnet152": ({"batch_size": 4, "image_size": 64}, None),
    "vgg19": ({"batch_size": 4, "image_size": 64, "dropout": 0.0}, None),
    "gpt2": ({"batch_size": 4, "seq_len": 32, "dropout": 0.0, "n_layer": 6}, ((120,),)),
    "gpt2-four-stages": (
        {"batch_size": 4, "seq_len": 32, "dropout": 0.0, "n_layer": 4, "n_embd": 192, "n_head": 4},
        ((30, 61, 117),),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _no_rounding() -> Iterator[None]:
    """transformers' loss rounds its logits to float32, where nothing is equal to 1e-9: keep the model's own dtype."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", lambda self: self)
        yield


@pytest.fixture(scope="module", params=list(CASES))
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, dict[str, Any]]:
    settings, splits = CASES[request.param]
    example = request.param.split("-")[0]
    folder = tmp_path_factory.mktemp("plan") / "out"
    cluster = EXAMPLES / ("vgg19" if "four" in request.param else example) / "cluster.yaml"
    model = EXAMPLES / example / "model.py"
    result = compile(model, cluster, folder, settings=settings, options=CompileOptions(policy="ED", splits=splits))
    assert len(result.plan.virtual_workers[0].stages) > 1, "a plan of one stage would test nothing"
    return folder, model, settings


def _model_and_batch(
    model: Path, settings: dict[str, Any], dtype: torch.dtype
) -> tuple[TrainingStep, list[torch.Tensor]]:
    loaded = load_workload(model, settings)
    torch.manual_seed(0)
    batch = loaded.workload.example_batch()
    step = TrainingStep(loaded.workload, loaded.workload.model(), batch).train()
    generator = torch.Generator().manual_seed(1)
    leaves = []
    for leaf in torch.utils._pytree.tree_leaves(batch):
        if leaf.is_floating_point():
            leaves.append(torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(dtype))
        else:
            leaves.append(torch.randint(0, 10, leaf.shape, generator=generator))
    return step.to(dtype), leaves


def _run(step: TrainingStep, leaves: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Loss, gradients and buffers of the original; on a copy, so that buffers start anew each time."""
    step = copy.deepcopy(step)
    loss = step(*leaves)
    loss.backward()
    found = {"loss": loss.detach()}
    found |= {n: p.grad for n, p in step.model.named_parameters() if p.grad is not None}
    found |= {f"buffer {n}": b for n, b in step.model.named_buffers()}
    return found


def _run_stages(folder: Path, leaves: list[torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    chain = StageChain(folder, dtype)
    loss, gradients = chain.loss_and_gradients(leaves)
    return {"loss": loss, **gradients, **{f"buffer {n}": b for n, b in chain.buffers().items()}}


def _difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, float]:
    assert a.keys() == b.keys()
    return {n: (a[n].double() - b[n].double()).abs().max().item() / (1 + a[n].double().abs().max().item()) for n in a}


def test_equal_in_float64(compiled: tuple[Path, Path, dict[str, Any]]) -> None:
    folder, model, settings = compiled
    step, leaves = _model_and_batch(model, settings, torch.float64)
    worst = _difference(_run(step, leaves), _run_stages(folder, leaves, torch.float64))
    name = max(worst, key=worst.__getitem__)
    assert worst[name] <= 1e-9, f"{name} differs by {worst[name]}"


def test_within_ten_ulp_effects_in_float32(compiled: tuple[Path, Path, dict[str, Any]]) -> None:
    folder, model, settings = compiled
    step, leaves = _model_and_batch(model, settings, torch.float32)
    original = _run(step, leaves)
    if leaves[0].is_floating_point():
        moved = _run(step, [torch.nextafter(leaves[0], torch.tensor(torch.inf)), *leaves[1:]])
    else:
        # Token ids have no next number: the embedding table is what enters the arithmetic.
        other = copy.deepcopy(step)
        table = next(other.model.parameters())
        with torch.no_grad():
            table.copy_(torch.nextafter(table, torch.tensor(torch.inf)))
        moved = _run(other, leaves)
    effect = max(_difference(original, moved).values())
    worst = max(_difference(original, _run_stages(folder, leaves, torch.float32)).values())
    print(f"largest difference {worst:.3g}; one ulp of the input changes {effect:.3g}")
    assert worst <= 10 * effect
