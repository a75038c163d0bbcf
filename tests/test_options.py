"""What may be asked of the compiler: numbers that no plan, schedule or generator can take are refused at once."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hetpipe_compiler.errors import HetpipeError
from hetpipe_compiler.options import CompileOptions


@pytest.mark.parametrize(
    ("wrong", "code", "where"),
    [
        ({"nm": 0}, "HP307", "--nm"),
        ({"nm": 1001}, "HP307", "--nm"),
        ({"nm": 10**30}, "HP307", "--nm"),
        ({"staleness": -1}, "HP310", "--staleness"),
        ({"staleness": 1001}, "HP310", "--staleness"),
        ({"objective": "fast"}, "HP221", "--objective"),
        ({"recompute": "sometimes"}, "HP221", "--recompute"),
        ({"update_scale": 0.0}, "HP225", "--update-scale"),
        ({"update_scale": -1.0}, "HP225", "--update-scale"),
        ({"update_scale": math.inf}, "HP225", "--update-scale"),
        ({"update_scale": math.nan}, "HP225", "--update-scale"),
        ({"seed": -(2**63) - 1}, "HP225", "--seed"),
        ({"seed": 2**64}, "HP225", "--seed"),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any], code: str, where: str) -> None:
    with pytest.raises(HetpipeError) as caught:
        CompileOptions(**wrong)
    assert (caught.value.code, caught.value.where) == (code, where)
    assert caught.value.hint


def test_the_ends_of_the_ranges_are_allowed() -> None:
    CompileOptions(nm=1, staleness=0, update_scale=1e-9, seed=-(2**63))
    CompileOptions(nm=1000, staleness=1000, update_scale=64.0, seed=2**64 - 1)
