"""What ``forward`` takes from the moment it runs in: clocks, and random numbers of the operating system.

Export would compute with one moment's for ever. Where they only time or log that is harmless, so a call in which the
model's code took some is made again, each reading of a clock later by a large odd amount; if that computes something
else, the model is refused: HP112. Readings of torch's, Python's own library's, logging's or the garbage collector's
own accord do not count.
Out of reach: a clock that is known only to a closure, or to an object that is no module.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date, datetime, timezone
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Literal
from unittest import mock

import torch
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.regions import text_with_regions
from hetpipe_compiler.ir.source import is_internal, is_pythons_own, short_path
from hetpipe_compiler.user_code import line_of

#: 401 days, 12 hours, a minute, a second and a nanosecond: moves every digit, and what is odd or even.
_STEP_NS = ((401 * 24 + 12) * 3600 + 61) * 10**9 + 1
#: So many readings move by steps, 2,200 years in all: a calendar ends at the year 9999.
_MOST_STEPS = 1000
#: In seconds; each has a twin in whole nanoseconds.
_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time", "clock_gettime")
#: The folder of Python's logging; a user's own folder may have that name too.
_LOGGING = str(Path(logging.__file__).parent) + os.sep
_HINT = "pass it in with the batch, as a tensor; or keep its module whole: --opaque MODULE"


@dataclass
class Moments:
    """What a call of ``forward`` takes from its moment; ``path``: the user's file."""

    path: Path
    _taken: list[tuple[str, str]] = field(default_factory=list)
    _readings: defaultdict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    _time: Literal["passes", "moves", "returns"] = "passes"
    _read_again: Counter[str] = field(default_factory=Counter)

    @contextlib.contextmanager
    def watched(self, step: torch.nn.Module) -> Iterator[None]:
        """Notes what is taken and where, by whatever name a loaded module or a submodule of ``step`` calls it."""
        stand_ins = {id(real): stand_in for real, stand_in in (*self._clocks(), *self._calendars(), self._entropy())}
        modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
        holders = [vars(module) for module in (*modules, *step.modules())]
        held = [(h, name, value) for h in holders for name, value in list(h.items()) if id(value) in stand_ins]
        seed = random.Random.seed

        def seeded(generator: random.Random, value: Any = None, *version: Any, **more: Any) -> None:
            if value is None:
                self._read("random.Random()", None)
            seed(generator, value, *version, **more)

        with mock.patch.object(random.Random, "seed", seeded):
            try:
                for holder, name, value in held:
                    holder[name] = stand_ins[id(value)]
                yield
            finally:
                for holder, name, value in held:
                    holder[name] = value

    @contextlib.contextmanager
    def returning(self, step: torch.nn.Module) -> Iterator[None]:
        """The next call is made at the moment of the first again: what it does otherwise is not the moment's doing."""
        with self._at("returns"), self.watched(step):
            yield

    def refuse(
        self, step: torch.nn.Module, program: ExportedProgram, export_again: Callable[[], ExportedProgram]
    ) -> None:
        """Raises `WorkloadError` HP112 if another moment gives another program.

        Args:
            step: The training step.
            program: What the call that was watched gave.
            export_again: Makes the next call.
        """
        if not self._taken:
            return
        try:
            with self._at("moves"), self.watched(step):
                again = export_again()
        except Exception:
            return  # out of time, it says: nothing else is computed
        if not _same(program, again):
            what, where = self._taken[0]
            problem = f"forward computes with {what}, of which a stage module would keep one moment's value for ever"
            raise WorkloadError("HP112", problem, where=where, hint=_HINT)

    @contextlib.contextmanager
    def _at(self, time: Literal["moves", "returns"]) -> Iterator[None]:
        self._time, self._read_again = time, Counter()
        try:
            yield
        finally:
            self._time = "passes"

    def _clocks(self) -> Iterator[tuple[Any, Any]]:
        """Clocks that count, and what stands for each."""

        def stand_in(name: str, real: Any, tick: Any) -> Any:
            return lambda *args: self._read(f"time.{name}()", real(*args), tick)

        for name in _CLOCKS:
            yield getattr(time, name), stand_in(name, getattr(time, name), 1e-9)
            yield getattr(time, f"{name}_ns"), stand_in(f"{name}_ns", getattr(time, f"{name}_ns"), 1)

    def _calendars(self) -> Iterator[tuple[Any, Any]]:
        """What tells a moment's date, and what stands for each: it tells the date of a clock's reading."""
        seconds, local = time.time, time.localtime

        def now(name: str) -> float:
            return float(self._read(f"{name}()", seconds(), 1e-9))

        def unless_given(name: str, at: int, moment: Any = float) -> tuple[Any, Any]:
            real = getattr(time, name)
            return real, lambda *args: real(*args) if len(args) > at else real(*args, moment(now(f"time.{name}")))

        yield from (unless_given(name, 0) for name in ("localtime", "gmtime", "ctime"))
        yield unless_given("asctime", 0, local)
        yield unless_given("strftime", 1, local)
        yield _with_methods(
            datetime,
            now=lambda _, tz=None: datetime.fromtimestamp(now("datetime.now"), tz),
            today=lambda _: datetime.fromtimestamp(now("datetime.today")),
            utcnow=lambda _: datetime.fromtimestamp(now("datetime.utcnow"), timezone.utc).replace(tzinfo=None),
        )
        yield _with_methods(date, today=lambda _: date.fromtimestamp(now("date.today")))

    def _entropy(self) -> tuple[Any, Any]:
        urandom = os.urandom

        def drawn(size: int) -> bytes:
            return bytes(self._read("random numbers of the operating system", urandom(size)))

        return urandom, drawn

    def _read(self, what: str, value: Any, tick: Any = None) -> Any:
        """The value, which is noted; another where time is another one. ``tick``: a nanosecond in a clock's unit."""
        reader = _reader(sys._getframe())
        if reader is None:
            return value
        readings, read = self._readings[what], self._read_again[what]
        if self._time != "passes":
            self._read_again[what] += 1
        if self._time == "returns":
            return readings[read] if read < len(readings) else value
        if self._time == "moves":
            return _later(value, readings[0] if readings else value, sum(self._read_again.values()), tick)
        readings.append(value)
        file, own = Path(reader.f_code.co_filename).resolve(), self.path.resolve()
        if file != own:
            what += f" (at {short_path(file, own.parent)}:{reader.f_lineno})"
        self._taken.append((what, line_of(self.path)))
        return value


def _later(value: Any, first: Any, count: int, tick: Any) -> Any:
    """What a clock that told ``first`` at its first reading, and tells ``value`` now, tells a good while later at the
    ``count``th reading; random numbers come as they do."""
    if tick is None:
        return value
    passed = value - first if count > _MOST_STEPS else 0
    return first + (2 * min(count, _MOST_STEPS) - 1) * _STEP_NS * tick + passed


def _with_methods(kind: Any, **methods: Any) -> tuple[Any, Any]:
    """A class, and one with other class methods that has the same instances."""
    meta = type("Dates", (type,), {"__instancecheck__": lambda _, value: isinstance(value, kind)})
    return kind, meta(kind.__name__, (kind,), {name: classmethod(method) for name, method in methods.items()})


def _reader(frame: FrameType | None) -> FrameType | None:
    """The model's code that reads, itself or through Python's own library; None where another reads for itself."""
    while frame is not None and (frame.f_code.co_filename == __file__ or _is_pythons_own(frame)):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_LOGGING) or _is_collecting(frame):
        return None
    return None if is_internal(frame.f_code.co_filename) else frame


def _is_collecting(frame: FrameType | None) -> bool:
    """Whether a callback of the garbage collector runs, which may come upon any line."""
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None and frame.f_code not in callbacks:
        frame = frame.f_back
    return frame is not None


def _is_pythons_own(frame: FrameType) -> bool:
    """Whether it is the standard library's, but for its logging."""
    name = frame.f_code.co_filename
    return is_pythons_own(name) and not name.startswith(_LOGGING)


def _same(program: ExportedProgram, again: ExportedProgram) -> bool:
    """Whether two calls compute the same, as far as constants have values."""
    if text_with_regions(program.graph_module) != text_with_regions(again.graph_module):
        return False
    return program.constants.keys() == again.constants.keys() and all(
        _same_constant(value, again.constants[name]) for name, value in program.constants.items()
    )


def _same_constant(value: Any, other: Any) -> bool:
    tensors = [v for v in (value, other) if isinstance(v, torch.Tensor)]
    if len(tensors) < 2 or any(t.is_meta or isinstance(t, FakeTensor) for t in tensors):
        return True
    if value.dtype != other.dtype or value.shape != other.shape:
        return False
    # By their bits: NaN is NaN.
    return torch.equal(*(t.detach().resolve_conj().reshape(-1).view(torch.uint8) for t in tensors))
