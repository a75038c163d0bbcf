"""Schedules: one program of small instructions per stage.

Numbering: minibatches count from 1 (as in the paper), waves, stages and virtual workers from 0. Wave ``c`` holds
minibatches ``c*Nm+1 ... (c+1)*Nm``.

======  ==========================================================================================
token   meaning
======  ==========================================================================================
F3      forward of minibatch 3 with the newest local weights (the last stage computes the loss too)
B3      backward of minibatch 3 with the weights that F3 used
U3      local update: the optimizer steps with the gradients of minibatch 3
^0      push: send the summed updates of wave 0 to the parameter servers, and ask for new weights
v0      pull: go on only with weights that hold wave 0 of every virtual worker
a3>2    send the activations of minibatch 3 to stage 2          a3<1   receive them from stage 1
g3>1    send the gradients of minibatch 3 to stage 1            g3<2   receive them from stage 2
======  ==========================================================================================

A `StageProgram` is periodic: a prologue, then a period of ``Nm`` minibatches that repeats with all numbers moved on. A run of
``M`` minibatches drops what lies beyond ``M`` (that is the drain) and pushes a short last wave at the end. Programs hold
computations, pushes and pulls; `hetpipe_compiler.passes.place_communication` adds the messages.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from hetpipe_compiler.errors import ArtifactError


class Op(str, Enum):
    """Kind of an instruction; the value is its letter in the text form."""

    FORWARD = "F"
    BACKWARD = "B"
    UPDATE = "U"
    PUSH = "^"
    PULL = "v"
    SEND_ACTIVATIONS = "a>"
    RECEIVE_ACTIVATIONS = "a<"
    SEND_GRADIENTS = "g>"
    RECEIVE_GRADIENTS = "g<"


#: Instructions whose index is a wave; the others' is a minibatch.
WAVE_OPS = frozenset({Op.PUSH, Op.PULL})
#: Instructions that name a peer stage.
MESSAGE_OPS = frozenset({Op.SEND_ACTIVATIONS, Op.RECEIVE_ACTIVATIONS, Op.SEND_GRADIENTS, Op.RECEIVE_GRADIENTS})

_TOKEN = re.compile(r"(?P<op>[FBU^v])(?P<index>-?\d+)|(?P<kind>[ag])(?P<minibatch>\d+)(?P<way>[<>])(?P<peer>\d+)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of a stage's program. ``index``: a minibatch (from 1), or a wave (from 0) for push and pull."""

    op: Op
    index: int
    peer: int | None = None

    def __str__(self) -> str:
        if self.peer is None:
            return f"{self.op.value}{self.index}"
        kind, way = self.op.value
        return f"{kind}{self.index}{way}{self.peer}"

    @classmethod
    def parse(cls, token: str) -> Instruction:
        """Read a token of the table above; raises `ArtifactError` HP420 otherwise."""
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise ArtifactError(
                "HP420", f"'{token}' is no instruction", hint="tokens look like F3 B3 U3 ^0 v0 a3>1 g3<1"
            )
        if match["op"]:
            return cls(Op(match["op"]), int(match["index"]))
        return cls(Op(match["kind"] + match["way"]), int(match["minibatch"]), int(match["peer"]))

    def moved(self, minibatches: int, waves: int) -> Instruction:
        """The same instruction, later by so many minibatches or waves."""
        return Instruction(self.op, self.index + (waves if self.op in WAVE_OPS else minibatches), self.peer)


@dataclass(frozen=True, slots=True)
class StageProgram:
    """What one stage does: ``prologue`` once, then ``period`` (``nm`` minibatches, one wave) again and again.

    A pull of a negative wave in the first period asks for nothing yet.
    """

    nm: int
    prologue: tuple[Instruction, ...]
    period: tuple[Instruction, ...]

    def unroll(self, minibatches: int) -> Iterator[Instruction]:
        """The instructions of a run of ``minibatches``, in order, the short last wave's push included.

        A pull counts for the forward that follows it, and goes with it.
        """
        last_wave = -(-minibatches // self.nm) - 1
        pull: Instruction | None = None
        for instruction in self._repeated(last_wave + 2):
            if instruction.op is Op.PULL:
                pull = instruction if instruction.index >= 0 else None
            elif instruction.op is Op.PUSH:
                if (instruction.index + 1) * self.nm <= minibatches:
                    yield instruction
            elif instruction.index <= minibatches:
                if instruction.op is Op.FORWARD and pull is not None:
                    yield pull
                    pull = None
                yield instruction
                if instruction.op is Op.UPDATE and instruction.index == minibatches and minibatches % self.nm:
                    yield Instruction(Op.PUSH, last_wave)

    def _repeated(self, turns: int) -> Iterator[Instruction]:
        yield from self.prologue
        for turn in range(turns):
            for instruction in self.period:
                yield instruction.moved(turn * self.nm, turn)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The programs of all stages: ``programs[virtual worker][stage]``, with the run's Nm and D."""

    nm: int
    staleness: int
    programs: tuple[tuple[StageProgram, ...], ...]

    def to_csv(self) -> str:
        """A grid that people can edit: a row a step, a column a stage; section P is the prologue, R repeats.

        Rows are steps of each stage's own program; time runs down, but two cells of a row need not run together.
        """
        columns = [(vw, s, p) for vw, stages in enumerate(self.programs) for s, p in enumerate(stages)]
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["section", *(f"vw{vw}/stage{s}" for vw, s, _ in columns)])
        for section, name in (("P", "prologue"), ("R", "period")):
            cells = [_rows(getattr(program, name)) for _, _, program in columns]
            for row in range(max((len(c) for c in cells), default=0)):
                writer.writerow([section, *(c[row] if row < len(c) else "" for c in cells)])
        return out.getvalue()

    @classmethod
    def from_csv(cls, text: str, *, nm: int, staleness: int) -> Schedule:
        """Read what `to_csv` writes; raises `ArtifactError` HP420-HP421 naming the row and column."""
        rows = list(csv.reader(io.StringIO(text)))
        if not rows or rows[0][:1] != ["section"]:
            raise ArtifactError("HP421", "no header 'section,vw0/stage0,...'", where="schedule.csv")
        programs: list[list[StageProgram]] = []
        for column, name in enumerate(rows[0][1:], start=1):
            match = re.fullmatch(r"vw(\d+)/stage(\d+)", name)
            if match is None:
                raise ArtifactError("HP421", f"column '{name}' is not vwN/stageM", where="schedule.csv:1")
            vw, stage = int(match[1]), int(match[2])
            parts: dict[str, list[Instruction]] = {"P": [], "R": []}
            for line, row in enumerate(rows[1:], start=2):
                if row[0] not in parts:
                    raise ArtifactError("HP421", f"section '{row[0]}' is neither P nor R", where=f"schedule.csv:{line}")
                for token in (row[column] if column < len(row) else "").split():
                    try:
                        parts[row[0]].append(Instruction.parse(token))
                    except ArtifactError as error:
                        error.where = f"schedule.csv:{line}, column {name}"
                        raise
            if (
                vw > len(programs)
                or (vw < len(programs) and stage != len(programs[vw]))
                or (vw == len(programs) and stage)
            ):
                raise ArtifactError("HP421", f"column '{name}' is out of order", where="schedule.csv:1")
            if vw == len(programs):
                programs.append([])
            programs[vw].append(StageProgram(nm, tuple(parts["P"]), tuple(parts["R"])))
        return cls(nm, staleness, tuple(tuple(stages) for stages in programs))


def _rows(instructions: Iterable[Instruction]) -> list[str]:
    """Group a program into cells that each end with their F or U (and what follows at once: a push)."""
    cells: list[list[Instruction]] = []
    open_cell = False
    for instruction in instructions:
        if instruction.op is Op.PUSH and cells:
            cells[-1].append(instruction)
            continue
        if not open_cell:
            cells.append([])
            open_cell = True
        cells[-1].append(instruction)
        if instruction.op in (Op.FORWARD, Op.UPDATE):
            open_cell = False
    return [" ".join(map(str, cell)) for cell in cells]
