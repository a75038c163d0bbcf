"""The orders that a chain's blocks may have: their closed sets, of as many of the blocks as can be searched."""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe_compiler.ir.blocks import BlockChain
from hetpipe_compiler.passes.block_graph import BlockGraph, block_graph
from hetpipe_compiler.passes.closed_sets import ClosedSets, closed_sets
from hetpipe_compiler.passes.light_nodes import Lightened, lightened

#: More closed sets than this are not all searched.
MAX_SETS = 200_000


@dataclass(frozen=True)
class Orders:
    """The orders of a chain's blocks, for searches with any devices.

    Attributes:
        graph: None where there is one only, or no other is asked for.
        every: All closed sets; None where they are too many.
        light: Then: fewer of them.
        blocks: Of the chain.
    """

    blocks: int
    graph: BlockGraph | None = None
    every: ClosedSets | None = None
    light: Lightened | None = None

    def __str__(self) -> str:
        """What a search looks at, and why not at more."""
        if self.graph is None:
            return f"{self.blocks:,} blocks in their one order"
        nodes = len(self.graph)
        if self.every is not None:
            return f"all {len(self.every):,} closed sets of {nodes:,} blocks"
        more = f"over {MAX_SETS:,} would not all be searched"
        if self.light is not None:
            left, sets = len(self.light.merged), len(self.light.merged_sets)
            return f"all {sets:,} closed sets of {left:,} blocks, {nodes - left:,} light ones merged into these: {more}"
        return f"closed sets near the order of {nodes:,} blocks: {more}"


def chain_orders(chain: BlockChain, max_sets: int = MAX_SETS) -> Orders:
    """The orders of ``chain``; with ``max_sets`` = 0 its own only."""
    graph = block_graph(chain) if max_sets else None
    if graph is None or graph.linear:
        return Orders(len(chain))
    every = closed_sets(graph, max_sets)
    return Orders(len(chain), graph, every, None if every is not None else lightened(chain, graph, max_sets))
