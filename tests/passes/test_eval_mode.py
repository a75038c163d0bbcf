"""What nodes of the training graph are in eval mode, or why one graph cannot tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import job
from torch import Tensor, nn
from torch.nn import functional as F

from hetpipe_compiler.frontend.capture import capture
from hetpipe_compiler.ir.captured import Captured
from hetpipe_compiler.passes.eval_mode import compare_with_eval, in_eval
from hetpipe_compiler.passes.normalize import normalize


def compared(then: Callable[[Any, Tensor], Tensor]) -> Captured:
    return compare_with_eval(normalize(capture(job(then), evaluation=True)))


def notes(captured: Captured) -> dict[str, str]:
    """Node -> what it is in eval mode."""
    found = {}
    for node in captured.graph_module.graph.nodes:
        other = in_eval(node)
        if other is not None:
            found[node.name] = (
                ", ".join(f"{k}={v}" for k, v in other.arguments.items()) if other.runs else f"-> {other.stands_for_it}"
            )
    return found


def test_a_train_flag() -> None:
    found = compared(lambda m, h: F.dropout(h, 0.3, m.training))
    assert found.evaluation
    assert notes(found) == {"dropout": "train=False"}


def test_a_flag_that_does_not_follow_the_mode_stays() -> None:
    found = compared(lambda _, h: F.dropout(h, 0.3, training=True) + F.dropout(h, 0.3, training=False))
    assert found.evaluation
    assert notes(found) == {}


def test_a_probability() -> None:
    def then(m: Any, h: Tensor) -> Tensor:
        q = h.view(3, 1, 1, 4)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.2 if m.training else 0.0)

    assert notes(compared(then)) == {"scaled_dot_product_attention": "dropout_p=0.0"}


def test_a_counter_that_only_training_moves() -> None:
    def then(m: Any, h: Tensor) -> Tensor:
        if m.training:
            m.state.add_(1)
        return h * m.state

    assert notes(compared(then)) == {"add_": "-> model_state"}


def test_dropout_called_in_training_only() -> None:
    assert notes(compared(lambda m, h: F.dropout(h, 0.3) * 2 if m.training else h * 2)) == {"dropout": "-> linear"}


def test_drop_path() -> None:
    def then(m: Any, h: Tensor) -> Tensor:
        g = m.fc2(h)
        if m.training:
            g = g.div(0.8) * torch.empty(g.shape[0], 1).bernoulli_(0.8)
        return h + g

    found = compared(then)
    assert found.evaluation
    assert notes(found)["div"] == "-> linear_1"
    assert notes(found)["mul"] == "-> div"
    assert {name for name, note in notes(found).items() if note == "-> None"} >= {"empty"}


def test_an_auxiliary_loss() -> None:
    def then(m: Any, h: Tensor) -> Tensor:
        main = h.square()
        return main + 0.3 * m.fc2(h).abs().mean() if m.training else main

    found = notes(compared(then))
    assert found.pop("add") == "-> pow_1" or found
    assert set(found.values()) == {"-> None"}


def test_in_place_dropout() -> None:
    assert notes(compared(lambda m, h: F.dropout(h * 2, 0.3, m.training, inplace=True))) == {"dropout": "train=False"}


def test_a_residual_around_a_dropout() -> None:
    """In eval mode dropout returns its very input: export calls both by one name."""
    found = compared(lambda m, h: m.fc2(F.dropout(h, 0.3, m.training)) + h)
    assert found.evaluation
    assert notes(found) == {"dropout": "train=False"}


def test_constants_are_known_by_their_values() -> None:
    def then(m: Any, h: Tensor) -> Tensor:
        if m.training:
            h = h + torch.tensor(5.0)
        return h * torch.tensor(2.0) + torch.tensor(2.0) + torch.tensor(float("nan"))

    assert compared(then).evaluation


def test_numbers_that_training_needs_earlier() -> None:
    def then(m: Any, h: Tensor) -> Tensor:
        if m.training:
            h = h * torch.ones(h.shape[0] * 2 - h.shape[0], 1)
        return m.fc2(h).view(h.shape[0] * 2, 2)

    assert compared(then).evaluation


@pytest.mark.parametrize(
    ("then", "where"),
    [
        (lambda m, h: m.fc2(h) if m.training else h, None),
        (lambda m, h: h if m.training else m.fc2(h), "aten.linear.default at graphs.py:28)"),
        (lambda m, h: h.relu() if m.training else h.tanh(), "aten.tanh.default at graphs.py:28)"),
        (lambda m, h: h.view(-1, 6) if m.training else h.view(-1), "aten."),
        (lambda m, h: h * m.state if m.training else h * m.fc2.bias, "aten.mul.Tensor"),
        (lambda m, h: h * torch.tensor(2.0) if m.training else h * torch.tensor(3.0), "aten."),
    ],
)
def test_another_computation_is_told_with_its_line(then: Any, where: str | None) -> None:
    found = compared(then)
    assert found.evaluation == (where is None)
    if where is not None:
        assert where in str(found.evaluation_note)
        assert notes(found) == {}


def test_what_eval_mode_writes_under_more_names_is_refused() -> None:
    """In eval mode dropout returns its input, so the addition reaches ``row`` too, which another stage may hold."""

    def then(m: Any, h: Tensor) -> Tensor:
        row = h[0]
        g = F.dropout(h, 0.5, m.training)
        side = g[0]
        g += m.fc2(h)
        return (row * side).sum() + g

    found = compared(then)
    assert not found.evaluation
    assert "more names than in training (graphs.py:28)" in str(found.evaluation_note)


def test_a_model_that_export_cannot_follow_in_eval_mode() -> None:
    def then(m: Any, h: Tensor) -> Tensor:
        return h if m.training or h.sum() > 0 else -h

    found = compared(then)
    assert not found.evaluation
    assert str(found.evaluation_note).startswith("in eval mode: ")


def test_a_norm_that_the_author_keeps_in_eval_mode() -> None:
    class Kept(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> Kept:  # noqa: ARG002
            return super().train(False)

    loaded = job(lambda m, h: m.bn(m.kept(h)))

    def model() -> nn.Module:
        found = made()
        found.kept, found.bn = Kept(4), nn.BatchNorm1d(4)
        return found

    made = loaded.workload.model
    object.__setattr__(loaded.workload, "model", model)
    found = compare_with_eval(normalize(capture(loaded, evaluation=True)))
    assert notes(found) == {"add_": "-> None", "batch_norm_1": "training=False"}
