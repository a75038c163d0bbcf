"""The class of an operator, and the work that is counted for it."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from hetpipe_compiler.passes import operator_work


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten::gelu", "transcendental"),
        ("aten::tanh_", "transcendental"),
        ("aten::exp", "transcendental"),
        ("aten::tanh_backward", "elementwise"),
        ("aten::expand_copy", "elementwise"),
        ("aten::logical_and", "elementwise"),
        ("aten::_log_softmax", "normalisation"),
        ("aten::add", "elementwise"),
    ],
)
def test_operators_with_functions_are_a_class_of_their_own(name: str, expected: str) -> None:
    assert operator_work._operator_class(name) == expected


def _work(x: torch.Tensor) -> list[tuple[int, int]]:
    with operator_work.WorkMode() as mode:
        torch.softmax(x.view(-1, 4) @ x.view(4, -1) + 1, -1)
    return [(work.flops, work.bytes) for work in mode.work]


def test_fake_tensors_do_the_work_of_meta_tensors() -> None:
    expected = _work(torch.empty(8, 4, device="meta"))
    with FakeTensorMode():
        assert _work(torch.empty(8, 4)) == expected
