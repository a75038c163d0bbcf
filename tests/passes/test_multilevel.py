"""RaNNC's block level: what is merged, what is moved back, what is left to the order; legal whatever the graph."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import KINDS, chain_of, chains

from hetpipe_compiler.ir.blocks import CrossingValue
from hetpipe_compiler.passes.multilevel import merged_along_graph, shorten_chain
from hetpipe_compiler.passes.stage_sums import stage_sums

ROOM = 1 << 60


def edges(*pairs: tuple[int, int], sizes: dict[tuple[int, int], int] | None = None) -> list[CrossingValue]:
    return [CrossingValue(f"v{a}_{b}", a, (b,), (sizes or {}).get((a, b), 1), 0) for a, b in pairs]


def test_the_least_joins_its_smaller_neighbour() -> None:
    chain = chain_of({"k": [5.0, 1.0, 4.0, 9.0]})
    assert merged_along_graph(chain, 3, ROOM) == [(0,), (1, 2), (3,)]
    # A round merges a group once: 1 with 4, then 5 with 9 has another between them, so the next round's least is 5.
    assert merged_along_graph(chain, 2, ROOM) == [(0, 1, 2), (3,)]


def test_branches_are_merged_along_not_across() -> None:
    """Head 0, branches 1-3 and 2-4 in turn, join 5."""
    values = edges((0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 5))
    chain = chain_of({"k": [9.0, 1.0, 1.0, 1.0, 1.0, 9.0]}, values=values)
    assert merged_along_graph(chain, 4, ROOM) == [(0,), (1, 3), (2, 4), (5,)]


def test_nothing_joins_over_another_path() -> None:
    """0 feeds 1 and 2, 1 feeds 2: 0 and 2, the two least, have 1 between them."""
    chain = chain_of({"k": [1.0, 9.0, 1.0]}, values=edges((0, 1), (0, 2), (1, 2)))
    assert merged_along_graph(chain, 2, ROOM) == [(0, 1), (2,)]


def test_a_part_moves_back_where_fewer_bytes_cross() -> None:
    """1 joins 2, which is the smaller neighbour; but it shares more with 0."""
    values = edges((0, 1), (1, 2), (2, 3), sizes={(0, 1): 100})
    chain = chain_of({"k": [1.5, 1.0, 1.2, 5.0]}, values=values)
    assert merged_along_graph(chain, 3, ROOM) == [(0, 1), (2,), (3,)]
    even = chain_of({"k": [1.5, 1.0, 1.2, 5.0]}, values=edges((0, 1), (1, 2), (2, 3)))
    assert merged_along_graph(even, 3, ROOM) == [(0,), (1, 2), (3,)]


def test_what_cannot_merge_along_the_graph_is_compacted_in_order() -> None:
    """Each of 0 and 1 feeds each of 2 and 3."""
    chain = chain_of({"k": [1.0, 2.0, 3.0, 4.0]}, values=edges((0, 2), (0, 3), (1, 2), (1, 3)))
    assert merged_along_graph(chain, 2, ROOM) == [(0, 1, 2), (3,)]


def test_no_group_holds_more_than_the_largest_device() -> None:
    chain = chain_of({"k": [1.0, 1.0, 1.0, 1.0]}, parameters=[60, 60, 10, 10])
    assert merged_along_graph(chain, 3, 100) == [(0,), (1, 2), (3,)]


@settings(max_examples=150, deadline=None)
@given(chains(least=2, most=12), st.integers(1, 12), st.booleans())
def test_any_graph_stays_legal(chain, most_groups, ends_fixed):
    chain = replace(chain, ends_fixed=ends_fixed)
    groups = merged_along_graph(chain, most_groups, ROOM)
    assert sorted(block for group in groups for block in group) == list(range(len(chain)))
    assert len(groups) <= most_groups
    home = {block: at for at, group in enumerate(groups) for block in group}
    assert all(home[value.producer] <= home[reader] for value in chain.values for reader in value.consumers)
    assert all(len({home[block] for block in group}) == 1 for group in chain.colocate)
    if ends_fixed:
        assert home[0] == 0
        assert home[len(chain) - 1] == len(groups) - 1
    merged = shorten_chain(chain, most_groups)
    if len(chain) <= most_groups:
        assert merged is chain
        return
    for at in range(1, len(merged)):
        coarse, fine = stage_sums(merged, range(at)), stage_sums(chain, tuple(b for g in groups[:at] for b in g))
        for kind in KINDS:
            assert coarse.forward_ms[kind] == pytest.approx(fine.forward_ms[kind])
        for name in ("received", "returned", "sent_back", "frozen", "saved", "parameters"):
            assert getattr(coarse, name) == getattr(fine, name), name


def test_blocks_far_fewer_than_components_balance() -> None:
    rng = np.random.default_rng(0)
    chain = chain_of({"k": rng.uniform(0.1, 1.0, 300).tolist()}, activation_bytes=100)
    merged = shorten_chain(chain, 32)
    assert len(merged) == 32
    assert merged.forward_ms["k"].max() < 3 * merged.forward_ms["k"].mean()
