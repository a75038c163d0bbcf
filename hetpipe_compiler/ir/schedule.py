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

A `StageProgram` is periodic: a prologue, then a period of ``Nm`` minibatches that repeats with all numbers moved on. A
run of ``M`` minibatches drops what lies beyond ``M`` (that is the drain) and pushes a short last wave at the end.
Programs hold computations, pushes and pulls; `hetpipe_compiler.passes.place_communication` adds the messages.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

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

# Minibatches count from 1; waves may be negative: in a period, what its first turns do not do yet.
_TOKEN = re.compile(
    r"(?P<compute>[FBU])(?P<minibatch>[1-9]\d{0,8})|(?P<exchange>[\^v])(?P<wave>-?\d{1,9})"
    r"|(?P<kind>[ag])(?P<message>[1-9]\d{0,8})(?P<way>[<>])(?P<peer>\d{1,9})",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of a stage's program. ``index``: a minibatch (from 1), or a wave (from 0) for push and pull."""

    op: Op
    index: int
    peer: int | None = None

    def __str__(self) -> str:
        if self.peer is None:
            return f"{self.op.value}{self.index}"
        return f"{self.op.value[0]}{self.index}{self.op.value[1]}{self.peer}"

    @classmethod
    def parse(cls, token: str) -> Instruction:
        """Read a token of the table above; raises `ArtifactError` HP420 otherwise."""
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise ArtifactError(
                "HP420", f"'{token}' is no instruction", hint="tokens look like F3 B3 U3 ^0 v0 a3>1 g3<1"
            )
        if match["compute"]:
            return cls(Op(match["compute"]), int(match["minibatch"]))
        if match["exchange"]:
            return cls(Op(match["exchange"]), int(match["wave"]))
        return cls(Op(match["kind"] + match["way"]), int(match["message"]), int(match["peer"]))

    def moved(self, minibatches: int, waves: int) -> Instruction:
        """The same instruction, later by so many minibatches or waves."""
        return Instruction(self.op, self.index + (waves if self.op in WAVE_OPS else minibatches), self.peer)


@dataclass(frozen=True, slots=True)
class StageProgram:
    """What one stage does: ``prologue`` once, then ``period`` (``nm`` minibatches, one wave) again and again.

    A push or pull of a negative wave in the first periods means nothing yet.
    """

    nm: int
    prologue: tuple[Instruction, ...]
    period: tuple[Instruction, ...]

    def unroll(self, minibatches: int) -> Iterator[Instruction]:
        """The instructions of a run of ``minibatches``, in order.

        What belongs to later minibatches is left out, so the push of a short last wave follows its last update. A pull
        counts for the forward that follows it, and goes with it; of several, the latest wave counts.
        """
        waves = -(-minibatches // self.nm)
        pull: Instruction | None = None
        for instruction in self._repeated(minibatches, waves):
            if instruction.op is Op.PULL:
                if instruction.index >= 0 and (pull is None or pull.index < instruction.index):
                    pull = instruction
            elif instruction.op is Op.PUSH:
                if 0 <= instruction.index < waves:
                    yield instruction
            elif instruction.index <= minibatches:
                if instruction.op is Op.FORWARD and pull is not None:
                    yield pull
                yield instruction
            if instruction.op is Op.FORWARD:
                pull = None

    def _repeated(self, minibatches: int, waves: int) -> Iterator[Instruction]:
        """Prologue and as many periods as hold anything of the run."""
        turns = 0
        for instruction in self.period:
            if instruction.op is Op.PUSH:
                turns = max(turns, waves - instruction.index)
            elif instruction.op is not Op.PULL:
                turns = max(turns, (minibatches - instruction.index) // self.nm + 1)
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
    def read(cls, path: Path, *, nm: int, staleness: int) -> Schedule:
        """The schedule in a file that is there; raises `ArtifactError` HP420-HP421 as `from_csv`."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArtifactError("HP421", f"cannot be read: {error}", where=str(path), hint="compile again") from None
        return cls.from_csv(text, nm=nm, staleness=staleness)

    @classmethod
    def from_csv(cls, text: str, *, nm: int, staleness: int) -> Schedule:
        """Read what `to_csv` writes; raises `ArtifactError` HP420-HP421 naming the row and column."""
        try:
            rows = list(csv.reader(io.StringIO(text.removeprefix("\ufeff"))))  # spreadsheets put the mark there
        except csv.Error as error:
            raise ArtifactError("HP421", f"not CSV: {error}", where="schedule.csv", hint="compile again") from None
        if not rows or rows[0][:1] != ["section"] or len(rows[0]) < 2:
            raise ArtifactError(
                "HP421",
                "no header 'section,vw0/stage0,...'",
                where="schedule.csv:1",
                hint="separate the columns by commas; the first is the section",
            )
        header = [name.strip() for name in rows[0][1:]]
        while header and not header[-1]:  # spreadsheets end rows alike
            header.pop()
        columns = _columns(header)
        parts: list[dict[str, list[Instruction]]] = [{"P": [], "R": []} for _ in columns]
        for line, row in enumerate(rows[1:], start=2):
            if not any(cell.strip() for cell in row):
                continue
            section = row[0].strip()
            if section not in ("P", "R"):
                raise ArtifactError(
                    "HP421",
                    f"section '{section}' is neither P nor R",
                    where=f"schedule.csv:{line}",
                    hint="P rows are the prologue, R rows the period that repeats",
                )
            if any(cell.strip() for cell in row[len(columns) + 1 :]):
                raise ArtifactError(
                    "HP421",
                    f"more cells than the header's {len(columns) + 1}",
                    where=f"schedule.csv:{line}",
                    hint="instructions of one cell are separated by spaces",
                )
            for part, (vw, stage), cell in zip(parts, columns, row[1:]):  # noqa: B905 (short rows end in empty cells)
                part[section] += _cell(cell, f"schedule.csv:{line}, column vw{vw}/stage{stage}")
        programs: list[list[StageProgram]] = []
        for (vw, _), part in zip(columns, parts, strict=True):
            if vw == len(programs):
                programs.append([])
            programs[vw].append(StageProgram(nm, tuple(part["P"]), tuple(part["R"])))
        return cls(nm, staleness, tuple(tuple(stages) for stages in programs))


def _columns(names: list[str]) -> list[tuple[int, int]]:
    """(virtual worker, stage) of each column after the first; they must come in order and without gaps."""
    columns: list[tuple[int, int]] = []
    for name in names:
        match = re.fullmatch(r"vw(\d{1,9})/stage(\d{1,9})", name, re.ASCII)
        if match is None:
            raise ArtifactError(
                "HP421", f"column '{name}' is not vwN/stageM", where="schedule.csv:1", hint="as in vw0/stage1"
            )
        column = (int(match[1]), int(match[2]))
        last_vw, last_stage = columns[-1] if columns else (-1, 0)
        if column not in ((last_vw, last_stage + 1), (last_vw + 1, 0)):
            raise ArtifactError(
                "HP421",
                f"column '{name}' is out of order",
                where="schedule.csv:1",
                hint="columns run through the virtual workers from 0, and in each through its stages from 0",
            )
        columns.append(column)
    return columns


def _cell(text: str, where: str) -> list[Instruction]:
    try:
        return [Instruction.parse(token) for token in text.split()]
    except ArtifactError as error:
        error.where = where
        raise


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
