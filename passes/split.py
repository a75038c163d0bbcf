"""A cut by hand (``--split``): where the stages of a virtual worker begin.

Each entry names the first block of the next stage: a block's index, a node that is the first of its block, or a module
(``features.3``, ``transformer.h.3``): then the first block of that module or of one inside it. An entry inside a block
is refused, because what is in a block must stay on one device.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe_compiler.errors import PlanningError
from hetpipe_compiler.ir.blocks import BlockChain


def split_boundaries(
    chain: BlockChain, split: Sequence[str | int], where: str = "--split", least: int = 1
) -> tuple[int, ...]:
    """First blocks of stages 1, 2, ..., ascending.

    Args:
        where: The place that errors name.
        least: The first block that may be named.

    Raises:
        PlanningError: HP303, an entry is unknown, ambiguous, inside a block, or out of order.
    """
    boundaries = tuple(_boundary(chain, entry, where) for entry in split)
    for before, after, entry in zip((least - 1, *boundaries), boundaries, split, strict=False):
        if after <= before:
            problem = (
                "begins at block 0, where stage 0 begins" if after == 0 else "does not come after the entry before it"
            )
            hint = "list the first block of each later stage, in the order of the model"
            raise _illegal(entry, problem, hint, where)
    return boundaries


def _boundary(chain: BlockChain, entry: str | int, where: str) -> int:
    if isinstance(entry, int) or (entry.isdecimal() and len(entry) < 10):
        index = int(entry)
        if not 0 <= index < len(chain):
            problem = f"is no block: {chain.name} has blocks 0 to {len(chain) - 1}"
            raise _illegal(entry, problem, "see --dump-after coarsen", where)
        return index
    for index, block in enumerate(chain.blocks):
        if entry in block.nodes:
            if entry != block.nodes[0]:
                raise _illegal(
                    entry,
                    f"lies inside block {index} ({block.name}), which must stay on one device",
                    f"cut at its first node '{block.nodes[0]}', or at block {index + 1}",
                    where,
                )
            return index
    within = [at for at, block in enumerate(chain.blocks) if f"{block.name}.".startswith(f"{entry}.")]
    if not within:
        problem = f"is no node and no block or module of {chain.name}"
        raise _illegal(entry, problem, "see --dump-after coarsen for their names", where)
    if within != list(range(within[0], within[-1] + 1)) and all(chain.blocks[at].name == entry for at in within):
        problem = f"names {len(within)} blocks that do not follow each other"
        raise _illegal(entry, problem, f"give an index: {within}", where)
    return within[0]


def _illegal(entry: str | int, problem: str, hint: str, where: str) -> PlanningError:
    return PlanningError("HP303", f"'{entry}' {problem}", where=where, hint=hint)
