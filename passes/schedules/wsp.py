"""The default schedule: static pipelining under Wave Synchronous Parallel."""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe_compiler.ir.schedule import Instruction, Op, StageProgram


def wsp_program(in_flight: Sequence[int], nm: int, staleness: int) -> tuple[StageProgram, ...]:
    """The programs of one virtual worker's stages.

    1. Stage s runs ``F(1) ... F(w_s)``, then ``B(p) U(p) F(p + w_s)`` for ever.
    2. A wave's push follows its last update at once.
    3. Only the last minibatch of a wave is gated: the forward of (c+1)*Nm pulls clock >= c - D, so wave c - D - 1.

    At F(p), B(p - w_s) is done, and w_s <= Nm: the local staleness bound holds by construction.

    Args:
        in_flight: w_s per stage: ``nm`` >= w_0 >= w_1 >= ... >= 1.
        nm: Minibatches in a wave.
        staleness: D >= 0.

    Raises:
        ValueError: ``in_flight`` is not such a sequence.
    """
    if not in_flight or any(a < b for a, b in zip([nm, *in_flight], [*in_flight, 1], strict=True)):
        raise ValueError(f"in-flight counts {tuple(in_flight)}: at most Nm = {nm}, at least 1, never increasing")
    return tuple(_stage_program(w, nm, staleness) for w in in_flight)


def _stage_program(w: int, nm: int, staleness: int) -> StageProgram:
    period: list[Instruction] = []
    for p in range(1, nm + 1):
        period += [Instruction(Op.BACKWARD, p), Instruction(Op.UPDATE, p)]
        if p == nm:
            period.append(Instruction(Op.PUSH, 0))
        if (p + w) % nm == 0:
            wave = (p + w) // nm - 1
            period.append(Instruction(Op.PULL, wave - staleness - 1))
        period.append(Instruction(Op.FORWARD, p + w))
    return StageProgram(nm, tuple(Instruction(Op.FORWARD, p) for p in range(1, w + 1)), tuple(period))
