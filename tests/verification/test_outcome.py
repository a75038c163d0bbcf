"""How far two outcomes are apart."""

from __future__ import annotations

import math

import pytest
import torch

from hetpipe_compiler.verification.outcome import Outcome, Reference, largest_difference


def _outcome(**changed: torch.Tensor) -> Outcome:
    values = {
        "loss": torch.tensor(2.0),
        "gradient of w": torch.tensor([1.0, -4.0]),
        "gradient of tiny": torch.tensor([1e-6, 0.0]),
        "buffer n": torch.tensor(7),
    }
    return Outcome({**values, **{name.replace("__", " "): value for name, value in changed.items()}})


def _reference(**changed: torch.Tensor) -> Reference:
    return Reference(_outcome(**changed))


def test_equal() -> None:
    assert largest_difference(_reference(), _outcome()).relative == 0.0


def test_relative_to_the_size_of_the_value() -> None:
    found = largest_difference(_reference(), Outcome({**_outcome().values, "gradient of w": torch.tensor([1.0, -4.4])}))
    assert found.value == "gradient of w"
    assert math.isclose(found.relative, 0.1, rel_tol=1e-5)


def test_small_gradients_are_compared_to_a_thousandth_of_the_largest() -> None:
    found = largest_difference(
        _reference(), Outcome({**_outcome().values, "gradient of tiny": torch.tensor([0.0, 0.0])})
    )
    assert math.isclose(found.relative, 1e-6 / 4e-3, rel_tol=1e-5)


def test_a_missing_value_is_infinitely_far() -> None:
    fewer = {n: v for n, v in _outcome().values.items() if n != "gradient of w"}
    assert largest_difference(_reference(), Outcome(fewer)).what == "only the model has it"
    assert largest_difference(Reference(Outcome(fewer)), _outcome()).what == "only the stages have it"


def test_integers_dtypes_and_shapes_count() -> None:
    assert largest_difference(_reference(), _outcome(buffer__n=torch.tensor(8))).value == "buffer n"
    assert largest_difference(_reference(), _outcome(buffer__n=torch.tensor(7.0))).relative == math.inf
    assert largest_difference(_reference(), _outcome(loss=torch.tensor([2.0]))).relative == math.inf


def test_a_number_is_infinitely_far_from_nan() -> None:
    nan = torch.tensor(float("nan"))
    assert largest_difference(_reference(), _outcome(loss=nan)).relative == math.inf
    assert largest_difference(_reference(loss=nan), _outcome(loss=nan)).relative == 0.0
    assert largest_difference(_reference(loss=-nan.exp()), _outcome()).relative == math.inf


@pytest.mark.parametrize("kind", ["complex", "sparse", "transposed", "many"])
def test_every_number_of_every_kind_of_tensor_counts(kind: str) -> None:
    value = {
        "complex": torch.tensor([1.0 + 2.0j, 3.0]),
        "sparse": torch.eye(3).to_sparse(),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "many": torch.ones((1 << 20) + 1, dtype=torch.float64),
    }[kind]
    far = value.clone() if kind != "sparse" else (torch.eye(3) + torch.diag(torch.tensor([0.0, 0.0, 0.5]))).to_sparse()
    if kind != "sparse":
        far[-1] += 0.5
    reference = _reference(buffer__b=value)
    assert largest_difference(reference, _outcome(buffer__b=value)).relative == 0.0
    found = largest_difference(reference, _outcome(buffer__b=far))
    assert found.value == "buffer b"
    assert found.relative == pytest.approx(0.5 / {"complex": 3, "sparse": 1, "transposed": 5, "many": 1}[kind])
