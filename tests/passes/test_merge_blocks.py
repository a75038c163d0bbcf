"""Merging neighbours: sums, crossing values, colocated groups, and the rule of the smallest block."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import chain_of

from hetpipe_compiler.ir.blocks import CrossingValue, SharedBytes
from hetpipe_compiler.passes.merge_blocks import merge_blocks, smallest_merged
from hetpipe_compiler.passes.stage_sums import stage_sums


def test_the_least_joins_its_smaller_neighbour():
    assert smallest_merged([5.0, 1.0, 4.0, 9.0], [0, 0, 0, 0], 3) == ((0, 1), (1, 3), (3, 4))
    # 1 joins 4, then 5 is the least again and has one neighbour.
    assert smallest_merged([5.0, 1.0, 4.0, 9.0], [0, 0, 0, 0], 2) == ((0, 3), (3, 4))


def test_equal_times_join_across_the_larger_cut():
    assert smallest_merged([2.0, 1.0, 2.0], [5, 9, 0], 2) == ((0, 1), (1, 3))
    assert smallest_merged([2.0, 1.0, 2.0], [9, 5, 0], 2) == ((0, 2), (2, 3))


def test_costs_add_up_and_inner_values_go():
    chain = chain_of({"k": [1.0, 2.0, 3.0]}, {"k": [2.0, 4.0, 6.0]}, activation_bytes=7, parameters=[1, 2, 3])
    merged = merge_blocks(replace(chain, measured={"k": np.array([True, True, False])}), ((0, 2), (2, 3)))
    np.testing.assert_array_equal(merged.forward_ms["k"], [3.0, 3.0])
    np.testing.assert_array_equal(merged.measured["k"], [True, False])
    assert merged.values == (CrossingValue("v1", 0, (1,), 7, 7),)
    assert merged.blocks[0].nodes == (*chain.blocks[0].nodes, *chain.blocks[1].nodes)
    assert [p.blocks for p in merged.parameters] == [(0,), (0,), (1,)]


def test_groups_that_shortening_has_joined_are_gone():
    chain = replace(chain_of({"k": [1.0, 1.0, 9.0]}), colocate=((0, 1), (0, 2)))
    assert merge_blocks(chain, ((0, 2), (2, 3))).colocate == ((0, 1),)


@st.composite
def chains(draw):
    n = draw(st.integers(2, 8))
    times = draw(st.lists(st.floats(0, 10), min_size=n, max_size=n))
    values = []
    for at in range(draw(st.integers(0, 8))):
        producer = draw(st.integers(0, n - 2))
        consumers = draw(st.sets(st.integers(producer + 1, n - 1), min_size=1))
        values.append(CrossingValue(f"v{at}", producer, tuple(sorted(consumers)), draw(st.integers(0, 9)), 1))
    chain = chain_of({"k": times}, values=values, saved=draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)))
    shared = SharedBytes("table", 5, tuple(sorted(draw(st.sets(st.integers(0, n - 1), min_size=1)))))
    return replace(chain, frozen=(shared,))


@settings(max_examples=60, deadline=None)
@given(chains(), st.integers(1, 8))
def test_a_stage_of_merged_blocks_is_the_stage_of_their_members(chain, max_blocks):
    merged = merge_blocks(chain, smallest_merged(chain.forward_ms["k"].tolist(), [0] * len(chain), max_blocks))
    assert len(merged) == min(max_blocks, len(chain))
    first = {name: at for at, block in enumerate(chain.blocks) for name in block.nodes[:1]}
    borders = [first[block.nodes[0]] for block in merged.blocks] + [len(chain)] if len(merged) < len(chain) else None
    if borders is None:
        return
    for lo in range(len(merged)):
        for hi in range(lo + 1, len(merged) + 1):
            coarse, fine = stage_sums(merged, range(lo, hi)), stage_sums(chain, range(borders[lo], borders[hi]))
            assert coarse.forward_ms["k"] == pytest.approx(fine.forward_ms["k"])
            for name in ("received", "returned", "sent_back", "frozen", "saved"):
                assert getattr(coarse, name) == getattr(fine, name), name
