"""Making the user's whole model, and its weights on disk."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hetpipe_compiler.errors import RunError
from hetpipe_compiler.frontend.load import LoadedWorkload
from hetpipe_compiler.ir.workload import Workload
from hetpipe_compiler.runtime import checkpoint
from hetpipe_compiler.runtime.build_model import build_model, initial_values


class Tied(nn.Module):
    """An embedding whose weight the head uses too, a norm, and a table that is no part of the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(3.0), persistent=False)


class NoReset(nn.Module):
    """Has a parameter and no way to initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))


def loaded(model: Callable[[], nn.Module], evaluate: Any = None) -> LoadedWorkload:
    workload = Workload(model=model, example=(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), evaluate=evaluate)
    return LoadedWorkload(workload, Path("model.py"), {})


def on_meta(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with torch.device("meta"):
            return make()

    return build


def test_the_seed_decides() -> None:
    one, same, other = (build_model(loaded(Tied), seed) for seed in (1, 1, 2))
    assert torch.equal(one.embed.weight, same.embed.weight)
    assert not torch.equal(one.embed.weight, other.embed.weight)


def test_values_have_ties_once_and_all_buffers() -> None:
    values = initial_values(build_model(loaded(Tied), 0))
    assert list(values) == [
        "embed.weight",
        "norm.weight",
        "norm.bias",
        "table",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    assert all(value.is_contiguous() and not value.requires_grad for value in values.values())


def test_a_model_left_on_meta_is_initialised_under_the_seed() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        return model

    one, same, other = (build_model(loaded(on_meta(make)), seed) for seed in (1, 1, 2))
    assert all(not t.is_meta for t in (*one.parameters(), *one.buffers()))
    assert one[2].weight is one[0].weight
    assert float(one[0].weight.detach().abs().max()) <= 0.5
    assert torch.equal(one[1].running_var, torch.ones(4))
    for name, value in one.state_dict().items():
        assert torch.equal(value, same.state_dict()[name]), name
    assert not torch.equal(one[0].weight, other[0].weight)


def test_what_is_not_on_meta_stays() -> None:
    def make() -> nn.Module:
        with torch.device("meta"):
            first = nn.Linear(2, 2)
        second = nn.Linear(2, 2)
        nn.init.constant_(second.weight, 7.0)
        return nn.Sequential(first, second)

    assert torch.equal(build_model(loaded(make), 0)[1].weight, torch.full((2, 2), 7.0))


def test_a_meta_module_that_cannot_initialise_itself_is_named() -> None:
    with pytest.raises(RunError, match=r"NoReset '1' cannot initialise 'scale'") as caught:
        build_model(loaded(on_meta(lambda: nn.Sequential(nn.Linear(2, 2), NoReset()))), 0)
    assert caught.value.code == "HP556"


def test_a_model_that_raises_is_the_users_error() -> None:
    def broken() -> nn.Module:
        raise KeyError("width")

    with pytest.raises(RunError, match="KeyError: 'width'") as caught:
        build_model(loaded(broken), 0)
    assert caught.value.code == "HP555"


def test_saved_weights_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    shared = torch.arange(6.0).reshape(2, 3)
    checkpoint.save(path, {"a": shared, "b": shared, "c": shared.t()}, clock=3)
    assert [p.name for p in tmp_path.iterdir()] == ["weights.safetensors"]
    got = load_file(path)
    assert torch.equal(got["a"], got["b"])
    assert torch.equal(got["c"], shared.t())
    with pytest.raises(RunError) as caught:
        checkpoint.save(tmp_path / "no" / "weights.safetensors", {"a": shared})
    assert caught.value.code == "HP557"


def test_weights_can_be_read_by_others(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "w.safetensors", {"a": torch.ones(1)})
    mode = (tmp_path / "w.safetensors").stat().st_mode
    (tmp_path / "plain").touch()
    assert stat.S_IMODE(mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_evaluation_sees_the_weights_in_eval_mode(tmp_path: Path) -> None:
    def evaluate(model: nn.Module) -> dict[str, Any]:
        assert not model.training
        assert not torch.is_grad_enabled()
        return {"first": model.embed.weight.detach()[0, 0]}

    workload = loaded(Tied, evaluate)
    weights = build_model(workload, 5).state_dict()
    checkpoint.save(tmp_path / "w.safetensors", weights)
    assert checkpoint.evaluate(workload, tmp_path / "w.safetensors", seed=0) == {
        "first": float(weights["embed.weight"][0, 0])
    }
    assert checkpoint.evaluate(loaded(Tied), tmp_path / "w.safetensors", seed=0) is None


def test_a_failing_evaluation_says_that_the_weights_are_there(tmp_path: Path) -> None:
    workload = loaded(Tied, lambda model: {"accuracy": model.missing})
    checkpoint.save(tmp_path / "w.safetensors", build_model(workload, 0).state_dict())
    with pytest.raises(RunError, match="has no attribute 'missing'") as caught:
        checkpoint.evaluate(workload, tmp_path / "w.safetensors", seed=0)
    assert caught.value.code == "HP558"
    assert "w.safetensors" in str(caught.value.hint)
