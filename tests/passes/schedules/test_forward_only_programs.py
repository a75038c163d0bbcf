"""The schedule of an evaluation, with its messages."""

from __future__ import annotations

import numpy as np

from hetpipe_compiler.passes.place_communication import buffered_instructions, communicated_programs
from hetpipe_compiler.passes.schedules.forward_only import forward_only_programs
from hetpipe_compiler.passes.simulate.costs import PipelineCosts


def with_a_skip() -> PipelineCosts:
    """Three stages of 1 ms; stage 0 also sends to stage 2."""
    none = np.full((3, 3), np.nan)
    activation, gradient = none.copy(), none.T.copy()
    for i, j in ((0, 1), (0, 2), (1, 2)):
        activation[i, j] = gradient[j, i] = 0.1
    return PipelineCosts(np.ones(3), np.ones(3), activation, gradient)


def test_sends_that_return_at_once() -> None:
    programs = forward_only_programs(3)
    found = [" ".join(map(str, buffered_instructions(programs, with_a_skip(), 2, stage))) for stage in range(3)]
    assert found == [
        "F1 a1>1 a1>2 F2 a2>1 a2>2",
        "a1<0 F1 a1>2 a2<0 F2 a2>2",
        "a1<0 a1<1 F1 a2<0 a2<1 F2",
    ]


def test_sends_that_block() -> None:
    """Every message has its receive, in one order of each pair, and none comes back."""
    programs = communicated_programs(forward_only_programs(3), with_a_skip(), 3)
    texts = [list(map(str, program)) for program in programs]
    for sender, receiver in ((0, 1), (0, 2), (1, 2)):
        sent = [token for token in texts[sender] if token.endswith(f">{receiver}")]
        taken = [token for token in texts[receiver] if token.endswith(f"<{sender}")]
        assert [token.replace(">", "<").rpartition("<")[0] for token in sent] == [t.rpartition("<")[0] for t in taken]
        assert len(sent) == 3
    assert [sum(token.startswith("F") for token in text) for text in texts] == [3, 3, 3]
