"""What is captured, on which device, and under which names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from graphs import calls, captured
from kinds import MODELS
from torch import Tensor, nn

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend import capture as capturing
from hetpipe_compiler.frontend.capture import capture
from hetpipe_compiler.frontend.construct import build_on_meta, build_real
from hetpipe_compiler.frontend.load import LoadedWorkload, load_workload
from hetpipe_compiler.frontend.regions import autocast_on_cpu, contexts_of
from hetpipe_compiler.ir.captured import Captured
from hetpipe_compiler.ir.workload import Workload


def job(model: Callable[[], Any], example: Any = models.vectors, loss: Any = None, targets: Any = 1) -> LoadedWorkload:
    loss = loss or nn.CrossEntropyLoss()
    workload = Workload(model, example, lambda p: torch.optim.SGD(p, lr=0.1), loss, targets)
    return LoadedWorkload(workload, Path(__file__), {})


def of_kind(name: str) -> Captured:
    return capture(load_workload(MODELS, {"name": name}))


def placeholders(found: Captured) -> list[str]:
    return [n.name for n in found.graph_module.graph.nodes if n.op == "placeholder"]


def refused(code: str, loaded: LoadedWorkload) -> WorkloadError:
    with pytest.raises(WorkloadError) as caught:
        capture(loaded)
    assert caught.value.code == code
    return caught.value


def test_no_weights_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, "build_real", lambda *_: pytest.fail("built for real"))
    found = capture(
        job(lambda: nn.Sequential(nn.Linear(8, 100_000), nn.Linear(100_000, 100_000), nn.Linear(100_000, 5)))
    )
    assert sum(p.bytes for p in found.parameters) > 4e10


def test_a_constructor_that_needs_values_is_built_for_real() -> None:
    class Depth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rates = [r.item() for r in torch.linspace(0, 0.5, 3)]
            self.fc = nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) * (1 - self.rates[1])

    loaded = job(Depth)
    assert build_on_meta(loaded, seed=0) is None
    assert "mul.Tensor" in calls(capture(loaded))


def test_constants_keep_their_values() -> None:
    found = of_kind("ConstInForward")
    values = found.constant_values
    assert torch.equal(values["constant_plain"], torch.linspace(0.5, 1.5, models.WIDTH))
    assert not any(v.is_meta for v in values.values())
    assert {t.name for t in found.constants} == set(values)
    assert not any(t.trainable or t.persistent for t in found.constants)


def test_ties_have_one_name_and_aliases() -> None:
    found = of_kind("TiedLM")
    names = {p.name: p.aliases for p in found.parameters}
    assert names["embed.weight"] == ("head.weight",)
    assert names["first.proj.weight"] == ("second.proj.weight",)
    assert "head.weight" not in names
    read = {str(n.target) for n in found.graph_module.graph.nodes if n.op == "get_attr"}
    assert read <= set(found.tensors)


def test_a_module_under_two_names() -> None:
    names = {p.name: p.aliases for p in of_kind("CalledTwice").parameters}
    assert names["left.weight"] == ("right.weight",)


def test_flags_of_parameters_and_buffers() -> None:
    found = of_kind("RoPEDecoder")
    assert {b.name: b.persistent for b in found.buffers} == {"cos": False, "sin": False}
    trainable = {p.name: p.trainable for p in of_kind("FrozenLoRA").parameters}
    assert trainable["down"]
    assert not trainable["base.0.weight"]


def test_inputs_are_called_after_the_batch() -> None:
    assert placeholders(of_kind("TiedLM")) == ["input_0", "target_0"]
    assert placeholders(of_kind("EncoderDecoder")) == ["input_0", "input_1", "target_0"]
    assert placeholders(of_kind("OptionalKeywords")) == ["x", "scale", "labels"]
    nested = of_kind("NestedIO")
    assert placeholders(nested) == ["x_features", "x_weights_0", "labels"]
    # None, a flag and a number are leaves too.
    assert nested.batch_leaves == (0, 2, 4)


@pytest.mark.parametrize(
    ("name", "free", "note"),
    [
        ("TiedLM", True, None),
        ("FixedBatch", False, "constant"),
        ("BatchOfOne", False, "batch size is 1"),
        ("SizesCross", True, None),
    ],
)
def test_whether_the_batch_size_is_free(name: str, free: bool, note: str | None) -> None:
    found = of_kind(name)
    assert found.dynamic_batch is free
    assert note is None if found.dynamic_batch_note is None else note in found.dynamic_batch_note


def test_the_example_is_on_meta() -> None:
    found = of_kind("NestedIO")
    assert [tuple(t.shape) for t in found.example] == [(4, 8), (5,), (4,)]
    assert all(t.is_meta for t in (*found.example, *found.meta.values()))
    assert found.batch_size == 4


def test_regions_become_contexts_of_their_nodes() -> None:
    graph = of_kind("NoGrad").graph_module.graph
    by = {n.name: contexts_of(n) for n in graph.nodes}
    assert sum(c == (("grad", False),) for c in by.values()) >= 7
    assert by["sin"] == by["sub"] == ()
    graph = of_kind("Autocast").graph_module.graph
    kinds = {contexts_of(n) for n in graph.nodes}
    outer = ("autocast", "cpu", torch.bfloat16, True)
    assert kinds == {(), (outer,), (outer, ("autocast", "cpu", torch.bfloat16, False))}
    assert not [n for n in graph.nodes if n.op == "get_attr" and "submod" in str(n.target)]


def test_no_grad_inside_autocast_is_kept() -> None:
    def then(module: Any, h: Tensor) -> Tensor:
        with torch.autocast(h.device.type, dtype=torch.bfloat16):
            with torch.no_grad():
                g = module.fc2(h)
                with torch.enable_grad():
                    g = g + module.fc2(h)
            return module.fc2(h) + g

    graph = captured(then).graph_module.graph
    linear = [set(contexts_of(n)) for n in graph.nodes if n.target is torch.ops.aten.linear.default]
    cast = ("autocast", "cpu", torch.bfloat16, True)
    assert linear[-3:] == [{cast, ("grad", False)}, {cast}, {cast}]


def test_switching_off_what_is_off_means_nothing() -> None:
    def then(module: Any, h: Tensor) -> Tensor:
        with torch.autocast(h.device.type, enabled=False):
            return module.fc2(h)

    assert {contexts_of(n) for n in captured(then).graph_module.graph.nodes} == {()}


def test_autocast_for_a_gpu_is_seen_without_one() -> None:
    def then(module: Any, h: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return module.fc2(h)

    graph = captured(then).graph_module.graph
    (linear,) = (n for n in graph.nodes if n.name.startswith("linear") and contexts_of(n))
    assert contexts_of(linear) == (("autocast", "cpu", torch.bfloat16, True),)
    assert linear.meta["val"].dtype == torch.bfloat16
    before = torch.autocast.__init__
    with autocast_on_cpu():
        assert torch.autocast.__init__ is not before
    assert torch.autocast.__init__ is before


def test_a_counter_is_refused_but_a_cache_is_not() -> None:
    assert of_kind("LazyCache").dynamic_batch
    assert of_kind("KeepsForPeople").dynamic_batch
    assert refused("HP113", load_workload(MODELS, {"name": "Counter"})).hint


def test_capturing_leaves_the_model_as_it_was() -> None:
    loaded = load_workload(MODELS, {"name": "LazyCache"})
    model = build_on_meta(loaded, seed=0)
    assert model is not None
    capturing._capture_on(loaded, model, tuple(t.to("meta") for t in models.vectors()))
    assert (model.table, model.known) == (None, 0)


def test_no_tensor_in_the_example() -> None:
    assert refused("HP106", job(models.Mlp, (1, 2))).where == __file__


def test_not_a_module() -> None:
    assert "int" in refused("HP105", job(lambda: 3)).message


def test_a_model_whose_constructor_raises() -> None:
    def broken() -> nn.Module:
        raise ValueError("no width")

    error = refused("HP110", job(broken))
    assert "ValueError: no width" in error.message
    assert str(error.where).startswith(f"{__file__}:")


def test_a_forward_that_calls_sys_exit_is_an_error() -> None:
    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            if self.layer(x).shape:
                sys.exit(0)
            return x

    error = refused("HP110", job(Leaves))
    assert error.message == "the model or its loss raised SystemExit: 0"
    assert str(error.where).startswith(f"{__file__}:")


def test_an_example_that_raises() -> None:
    assert "ZeroDivisionError" in refused("HP110", job(models.Mlp, lambda: 1 / 0)).message


def test_a_loss_that_trains() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(logits * self.scale, labels)

    assert "loss has trainable parameters" in refused("HP108", job(models.Mlp, loss=Loss())).message


def test_a_loss_without_gradients() -> None:
    @torch.no_grad()
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, labels)

    assert "no gradient" in refused("HP108", job(models.Mlp, loss=loss)).message
    refused("HP108", job(models.Mlp, loss=lambda out, y: 2 * nn.functional.cross_entropy(out, y).detach()))


def test_an_extra_state_is_refused() -> None:
    """A run's weights are tensors: they would not load strictly."""

    class Counting(nn.Linear):
        def get_extra_state(self) -> int:
            return 3

    error = refused("HP126", job(lambda: nn.Sequential(models.Mlp(), Counting(models.CLASSES, models.CLASSES))))
    assert "module '1' (Counting) has an extra state" in error.message
    assert "test_capture.py:" in (error.where or "")


def test_real_weights_follow_the_seed() -> None:
    loaded = job(models.Mlp)
    one, two, other = (build_real(loaded, seed).state_dict()["0.weight"] for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_a_loss_with_state_needs_no_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values are the user's own object's: the copy that is captured has lost them."""
    monkeypatch.setattr(capturing, "build_real", lambda *_: pytest.fail("built for real"))
    found = of_kind("LossWithState")
    (value,) = found.constant_values.values()
    assert torch.equal(value, torch.linspace(0.5, 1, models.CLASSES))
