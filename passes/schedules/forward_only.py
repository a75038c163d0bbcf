"""Evaluation: every stage runs the forward of one minibatch after the other, and nothing comes back."""

from __future__ import annotations

from hetpipe_compiler.ir.schedule import Instruction, Op, StageProgram


def forward_only_programs(stages: int) -> tuple[StageProgram, ...]:
    """The programs of one virtual worker's stages: ``F1 F2 F3 ...`` on each.

    How far a stage may run ahead of the later ones is not in them: whoever sends the messages bounds it.
    """
    return (StageProgram(1, (), (Instruction(Op.FORWARD, 1),)),) * stages
