"""Runs complete programs with the strictest transport there is, to prove that no run can hang.

A send waits until its receive is at hand, a receive until its send; a pull of wave x waits until every stage of every
virtual worker has pushed wave x. (Training waits for less: only for the stages that hold the same parameters.) With
fixed programs the outcome does not depend on timing, so one execution decides for all.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe_compiler.ir.schedule import Instruction, Op

_MEETS = {
    Op.SEND_ACTIVATIONS: Op.RECEIVE_ACTIVATIONS,
    Op.RECEIVE_ACTIVATIONS: Op.SEND_ACTIVATIONS,
    Op.SEND_GRADIENTS: Op.RECEIVE_GRADIENTS,
    Op.RECEIVE_GRADIENTS: Op.SEND_GRADIENTS,
}


def stuck_stages(programs: Sequence[Sequence[Sequence[Instruction]]]) -> dict[tuple[int, int], Instruction]:
    """Execute ``programs[virtual worker][stage]``; empty if all run to their ends.

    Otherwise (virtual worker, stage) -> the instruction at which it waits for ever.
    """
    lengths = {(n, s): len(program) for n, stages in enumerate(programs) for s, program in enumerate(stages)}
    at = dict.fromkeys(lengths, 0)
    pushed = dict.fromkeys(lengths, 0)  # waves

    def current(key: tuple[int, int]) -> Instruction | None:
        return programs[key[0]][key[1]][at[key]] if key in at and at[key] < lengths[key] else None

    progress = True
    while progress:
        progress = False
        for key in lengths:
            while (instruction := current(key)) is not None:
                if instruction.op in _MEETS:
                    assert instruction.peer is not None
                    peer = (key[0], instruction.peer)
                    if current(peer) != Instruction(_MEETS[instruction.op], instruction.index, key[1]):
                        break
                    at[peer] += 1
                elif instruction.op is Op.PULL and instruction.index >= min(pushed.values()):
                    break
                elif instruction.op is Op.PUSH:
                    pushed[key] = max(pushed[key], instruction.index + 1)
                at[key] += 1
                progress = True
    return {key: instruction for key in lengths if (instruction := current(key)) is not None}
