"""Cuts by hand: by index, node, block or module."""

from __future__ import annotations

import numpy as np
import pytest

from hetpipe_compiler.errors import PlanningError
from hetpipe_compiler.ir.blocks import Block, BlockChain
from hetpipe_compiler.passes.split import split_boundaries

NAMES = ("embed", "h.0.attn", "h.0", "h.1.attn", "h.1.mlp", "h.10", "twice", "head", "twice")
CHAIN = BlockChain(
    name="m",
    batch_size=1,
    blocks=tuple(Block(name, (f"n{at}", f"n{at}b")) for at, name in enumerate(NAMES)),
    forward_ms={"k": np.ones(len(NAMES))},
    backward_ms={"k": np.ones(len(NAMES))},
    measured={"k": np.zeros(len(NAMES), dtype=bool)},
    values=(),
    parameters=(),
    frozen=(),
    saved=(),
    optimizer_factor=0.0,
)


@pytest.mark.parametrize(
    ("entry", "block"),
    [(3, 3), ("3", 3), ("n4", 4), ("h.0.attn", 1), ("h.0", 1), ("h.1", 3), ("h", 1), ("h.10", 5), ("head", 7)],
)
def test_an_entry_is_a_block(entry: str | int, block: int) -> None:
    assert split_boundaries(CHAIN, [entry]) == (block,)


def test_several() -> None:
    assert split_boundaries(CHAIN, ["h.0", "n3", 5, "head"]) == (1, 3, 5, 7)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (["h.2"], "no node and no block or module"),
        (["mlp"], "no node and no block or module"),
        (["n4b"], "lies inside block 4 (h.1.mlp)"),
        (["twice"], "names 2 blocks that do not follow each other"),
        (["9"], "has blocks 0 to 8"),
        (["9" * 5000], "no node and no block or module"),
        (["embed"], "begins at block 0"),
        (["h.1", "h.0"], "does not come after"),
    ],
)
def test_what_is_none(split: list[str], message: str) -> None:
    with pytest.raises(PlanningError) as caught:
        split_boundaries(CHAIN, split)
    assert caught.value.code == "HP303"
    assert message in caught.value.message
