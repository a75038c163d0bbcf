import pytest

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
