"""Stages that were not made by our search are refused unless they are a partition."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import chain_of, chains

from hetpipe_compiler.errors import PlanningError
from hetpipe_compiler.ir.blocks import CrossingValue
from hetpipe_compiler.passes.check_stages import check_stages

CHAIN = replace(
    chain_of({"a": [1.0] * 5}, values=[CrossingValue("x", 0, (1, 3), 1, 1), CrossingValue("y", 2, (4,), 1, 1)]),
    colocate=((1, 2),),
    ends_fixed=True,
)


@pytest.mark.parametrize(
    ("stages", "code", "message"),
    [
        ([[0, 1, 2], [4]], "HP312", "block 3 (layer3) in no stage"),
        ([[0], [4]], "HP312", "block 1 (layer1) and 2 more in no stage"),
        ([[0, 1, 2], [2, 3, 4]], "HP312", "block 2 (layer2) is in stage 0 and again in stage 1"),
        ([[0, 1, 1, 2, 3, 4]], "HP312", "block 1 (layer1) is in stage 0 and again in stage 0"),
        ([[0, 1, 2, 3], [4, 5]], "HP312", "stage 1 has block 5"),
        ([[0, 1, 2, 3], [4, -1]], "HP312", "stage 1 has block -1"),
        ([[0, 1, 2, 3, 4], []], "HP312", "stage 1 has no blocks"),
        ([[3], [0, 1, 2, 4]], "HP313", "block 3 (layer3) in stage 0 reads 'x', which block 0 (layer0) in the later"),
        ([[0, 1], [2, 3, 4]], "HP313", "block 1 (layer1), block 2 (layer2) must share a stage and are in stages 0, 1"),
        ([[0, 1, 2, 4], [3]], "HP313", "block 4 (layer4) must be in the last stage and is in stage 0 of 2"),
    ],
)
def test_what_is_no_partition(stages, code, message) -> None:
    with pytest.raises(PlanningError) as caught:
        check_stages(CHAIN, stages, "here")
    assert (caught.value.code, caught.value.where) == (code, "here")
    assert message in caught.value.message


def test_an_order_that_is_not_the_chains() -> None:
    check_stages(CHAIN, [[0, 3], [4, 2, 1]], "here")


@settings(max_examples=200, deadline=None)
@given(chains(most=6), st.data())
def test_accepts_exactly_the_partitions_into_nested_closed_sets(chain, data) -> None:
    count = data.draw(st.integers(1, 3))
    home = data.draw(st.lists(st.integers(0, count - 1), min_size=len(chain), max_size=len(chain)))
    stages = [[block for block, at in enumerate(home) if at == stage] for stage in range(count)]
    legal = (
        all(stages)
        and all(home[v.producer] <= home[c] for v in chain.values for c in v.consumers)
        and all(len({home[b] for b in group}) == 1 for group in chain.colocate)
        and (not chain.ends_fixed or (home[0] == 0 and home[-1] == count - 1))
    )
    if legal:
        check_stages(chain, stages, "here")
    else:
        with pytest.raises(PlanningError):
            check_stages(chain, stages, "here")
