"""Each index before its readers, and as little else moved as possible."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpipe_compiler.ir.topological_order import topological_order


@given(st.lists(st.sets(st.integers(0, 5)), min_size=6, max_size=6))
def test_it_is_the_first_of_all_orders_that_are_topological(drawn: list[set[int]]) -> None:
    """Edges are drawn along the order 3, 1, 5, 0, 4, 2, so that there is one."""
    place = {at: rank for rank, at in enumerate((3, 1, 5, 0, 4, 2))}
    readers = [{reader for reader in drawn[at] if place[reader] > place[at]} for at in range(6)]
    legal = (
        order
        for order in permutations(range(6))
        if all(order.index(at) < order.index(reader) for at in range(6) for reader in readers[at])
    )
    assert topological_order(readers) == list(min(legal))


def test_a_rank_comes_before_the_index() -> None:
    assert topological_order([[3], [3], [], [], []], lambda at: -(at % 2)) == [1, 0, 3, 2, 4]


@pytest.mark.parametrize(
    ("readers", "order"),
    [
        ([[], []], [0, 1]),
        ([[1], [2], [1]], [0]),
        ([[0]], []),
        ([[2], [0], [3], [2, 4], []], [1, 0]),
    ],
)
def test_what_waits_for_a_cycle_is_left_out(readers: list[list[int]], order: list[int]) -> None:
    assert topological_order(readers) == order
