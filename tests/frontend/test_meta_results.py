"""Results that are remembered have the form that torch gives them, and share memory where torch's do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hetpipe_compiler.frontend.meta_results import MetaResults

_aten = torch.ops.aten


def x(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def call(results: MetaResults, func: Any, *args: Any, **kwargs: Any) -> Any:
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return results.of(func, args, kwargs, tensors)


def form(value: Any) -> Any:
    tensors = pytree.tree_leaves(value)
    return type(value), [(t.size(), t.stride(), t.storage_offset(), t.dtype, t.device) for t in tensors]


CALLS: list[tuple[Any, Callable[[], tuple[Any, ...]]]] = [
    (_aten.addmm.default, lambda: (x(4), x(2, 3), x(3, 4))),
    (_aten.add.Tensor, lambda: (x(2, 3), x(3, 2).t())),
    (_aten.add.Tensor, lambda: (x(3, 2).t(), x(3, 2).t())),
    (_aten.add.Tensor, lambda: (x(2, dtype=torch.int64), 1)),
    (_aten.add.Tensor, lambda: (x(2, dtype=torch.int64), 1.0)),
    (_aten.add.Tensor, lambda: (x(2, dtype=torch.bool), True)),
    (_aten.add.Tensor, lambda: (x(2, dtype=torch.bool), 1)),
    (_aten.native_layer_norm.default, lambda: (x(2, 3), [3], x(3), x(3), 1e-5)),
    (_aten.cat.default, lambda: ([x(2, 3), x(2, 4)], 1)),
    (_aten.cat.default, lambda: ([x(2, 3), x(2, 3)], 0)),
    (_aten.split.Tensor, lambda: (x(4, 2), 2)),
    (_aten.convolution.default, lambda: (x(2, 3, 8, 8), x(4, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)),
    (_aten._to_copy.default, lambda: (x(2, 3),)),
]


def test_forms_are_torchs() -> None:
    """With one memory for all calls: none is taken for another."""
    results = MetaResults()
    for func, arguments in CALLS * 2:
        assert form(call(results, func, *arguments())) == form(func(*arguments())), func


def test_the_second_call_is_not_made() -> None:
    results, func = MetaResults(), mock.MagicMock(wraps=_aten.mm.default)
    func.namespace, func._schema = "aten", _aten.mm.default._schema
    first, second = (call(results, func, x(2, 3), x(3, 4)) for _ in range(2))
    assert func.call_count == 1
    assert form(first) == form(second)
    call(results, func, x(2, 3), x(3, 5))
    assert func.call_count == 2


@pytest.mark.parametrize("func", [_aten.view.default, _aten._unsafe_view.default])
def test_a_view_is_one_each_time(func: Any) -> None:
    results = MetaResults()
    for _ in range(2):
        base = x(2, 3)
        assert call(results, func, base, [6]).untyped_storage()._cdata == base.untyped_storage()._cdata


def test_what_is_written_is_written_each_time() -> None:
    results = MetaResults()
    for _ in range(2):
        base = x(2, 3)
        assert call(results, _aten.add_.Tensor, base, 1) is base


def test_the_default_dtype_counts() -> None:
    results = MetaResults()
    assert call(results, _aten.div.Tensor, x(2, dtype=torch.int64), 2).dtype == torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert call(results, _aten.div.Tensor, x(2, dtype=torch.int64), 2).dtype == torch.float64
    finally:
        torch.set_default_dtype(before)


def test_of_others_operators_nothing_is_known() -> None:
    calls = []

    @torch.library.custom_op("meta_results_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    @twice.register_fake
    def _(x: Tensor) -> Tensor:
        calls.append(x)
        return torch.empty_like(x)

    results = MetaResults()
    for _ in range(2):
        call(results, torch.ops.meta_results_test.twice.default, x(2))
    assert len(calls) == 2
