"""Stages that were not made by our search: is each block in one stage, and may the stages run one after another?"""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe_compiler.errors import PlanningError
from hetpipe_compiler.ir.blocks import BlockChain


def check_stages(chain: BlockChain, stages: Sequence[Sequence[int]], where: str) -> None:
    """Refuse stages (blocks of each, in the order of the pipeline) that are no partition of ``chain``.

    Args:
        where: Who made them, for the error.

    Raises:
        PlanningError: HP312, a block is unknown, in no stage or in several, or a stage is empty. HP313, a stage reads
            what a later one makes, or blocks are apart that must share a stage.
    """
    home = _homes(chain, stages, where)
    for value in chain.values:
        for reader in value.consumers:
            if home[reader] < home[value.producer]:
                raise PlanningError(
                    "HP313",
                    f"{_block(chain, reader)} in stage {home[reader]} reads '{value.name}', which"
                    f" {_block(chain, value.producer)} in the later stage {home[value.producer]} makes",
                    where=where,
                    hint="move one of the two: what a block reads is made in its own stage or an earlier one",
                )
    for group in chain.colocate:
        apart = sorted({home[block] for block in group})
        if len(apart) > 1:
            raise PlanningError(
                "HP313",
                f"{', '.join(_block(chain, block) for block in group)} must share a stage and are in stages"
                f" {', '.join(map(str, apart))}",
                where=where,
                hint="put them in one stage",
            )
    if chain.ends_fixed:
        _check_ends(chain, home, len(stages), where)


def _homes(chain: BlockChain, stages: Sequence[Sequence[int]], where: str) -> list[int]:
    """The stage of each block."""
    home = [-1] * len(chain)
    every = f"give each of the blocks 0 to {len(chain) - 1} to one stage (--dump-after coarsen lists them)"
    for at, blocks in enumerate(stages):
        if not blocks:
            raise PlanningError("HP312", f"stage {at} has no blocks", where=where, hint="leave such a stage out")
        for block in blocks:
            if not 0 <= block < len(chain):
                raise PlanningError("HP312", f"stage {at} has block {block}, which is none", where=where, hint=every)
            if home[block] >= 0:
                message = f"{_block(chain, block)} is in stage {home[block]} and again in stage {at}"
                raise PlanningError("HP312", message, where=where, hint=every)
            home[block] = at
    missing = [block for block, at in enumerate(home) if at < 0]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        message = f"{_block(chain, missing[0])}{others} in no stage"
        raise PlanningError("HP312", message, where=where, hint=every)
    return home


def _check_ends(chain: BlockChain, home: Sequence[int], stages: int, where: str) -> None:
    for block, at, what in ((0, 0, "first"), (len(chain) - 1, stages - 1, "last")):
        if home[block] != at:
            raise PlanningError(
                "HP313",
                f"{_block(chain, block)} must be in the {what} stage and is in stage {home[block]} of {stages}",
                where=where,
                hint="the batch enters the first stage, and the loss leaves the last",
            )


def _block(chain: BlockChain, block: int) -> str:
    return f"block {block} ({chain.blocks[block].name})"
