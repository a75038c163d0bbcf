"""How far two outcomes are apart."""

from __future__ import annotations

import math

import torch

from hetpipe_compiler.verification.outcome import Outcome, largest_difference


def _outcome(**changed: torch.Tensor) -> Outcome:
    values = {
        "loss": torch.tensor(2.0),
        "gradient of w": torch.tensor([1.0, -4.0]),
        "gradient of tiny": torch.tensor([1e-6, 0.0]),
        "buffer n": torch.tensor(7),
    }
    return Outcome({**values, **{name.replace("__", " "): value for name, value in changed.items()}})


def test_equal() -> None:
    assert largest_difference(_outcome(), _outcome()).relative == 0.0


def test_relative_to_the_size_of_the_value() -> None:
    found = largest_difference(_outcome(), Outcome({**_outcome().values, "gradient of w": torch.tensor([1.0, -4.4])}))
    assert found.value == "gradient of w"
    assert math.isclose(found.relative, 0.1, rel_tol=1e-5)


def test_small_gradients_are_compared_to_a_thousandth_of_the_largest() -> None:
    found = largest_difference(_outcome(), Outcome({**_outcome().values, "gradient of tiny": torch.tensor([0.0, 0.0])}))
    assert math.isclose(found.relative, 1e-6 / 4e-3, rel_tol=1e-5)


def test_a_missing_value_is_infinitely_far() -> None:
    fewer = {n: v for n, v in _outcome().values.items() if n != "gradient of w"}
    assert largest_difference(_outcome(), Outcome(fewer)).what == "only the model has it"
    assert largest_difference(Outcome(fewer), _outcome()).what == "only the stages have it"


def test_integers_dtypes_and_shapes_count() -> None:
    assert largest_difference(_outcome(), _outcome(buffer__n=torch.tensor(8))).value == "buffer n"
    assert largest_difference(_outcome(), _outcome(buffer__n=torch.tensor(7.0))).relative == math.inf
    assert largest_difference(_outcome(), _outcome(loss=torch.tensor([2.0]))).relative == math.inf


def test_a_number_is_infinitely_far_from_nan() -> None:
    nan = torch.tensor(float("nan"))
    assert largest_difference(_outcome(), _outcome(loss=nan)).relative == math.inf
    assert largest_difference(_outcome(loss=nan), _outcome(loss=nan)).relative == 0.0
    assert largest_difference(_outcome(loss=-nan.exp()), _outcome()).relative == math.inf
