"""The strict execution tells programs that can hang from those that cannot."""

from __future__ import annotations

import pytest

from hetpipe_compiler.ir.schedule import Instruction
from hetpipe_compiler.passes.simulate.rendezvous import stuck_stages


def stuck(*workers: tuple[str, ...]) -> dict[str, str]:
    programs = [[[Instruction.parse(token) for token in stage.split()] for stage in stages] for stages in workers]
    return {f"vw{n}/stage{s}": str(instruction) for (n, s), instruction in stuck_stages(programs).items()}


@pytest.mark.parametrize(
    ("first", "second", "waiting"),
    [
        ("F1 a1>1 g1<1 B1", "a1<0 F1 B1 g1>0", {}),
        ("F1 F2 a2>1 g1<1", "F1 g1>0 a2<0", {"vw0/stage0": "a2>1", "vw0/stage1": "g1>0"}),  # both send first
        ("a1>1 a2>1", "a2<0 a1<0", {"vw0/stage0": "a1>1", "vw0/stage1": "a2<0"}),  # another order
        ("a1>1 a2>1", "a1<0", {"vw0/stage0": "a2>1"}),
        ("a1>1", "a1<0 g1<0", {"vw0/stage1": "g1<0"}),
        ("a1>7", "F1", {"vw0/stage0": "a1>7"}),  # no such stage
    ],
)
def test_messages(first: str, second: str, waiting: dict[str, str]) -> None:
    assert stuck((first, second)) == waiting


def test_pulls_wait_for_all_virtual_workers() -> None:
    assert stuck(("F1 ^0 v0 F2",), ("F1 ^0 v0 F2",)) == {}
    assert stuck(("F1 ^0 v0 F2",), ("F1 v0 ^0 F2",)) == {"vw0/stage0": "v0", "vw1/stage0": "v0"}
    assert stuck(("F1 ^0 v0 F2",), ("F1 F2",)) == {"vw0/stage0": "v0"}
