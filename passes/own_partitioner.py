"""Ask a partitioner of one's own (``--partitioner``): find it, call it, check what it answers.

It is found by the name of an entry point of the group `ENTRY_POINTS`, or as ``module:function``. See
`hetpipe_compiler.passes.partition_problem` for what it is asked and answers.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from itertools import islice
from typing import Any

from hetpipe_compiler.errors import ClusterError, HetpipeError, PlanningError
from hetpipe_compiler.ir.cluster import Device
from hetpipe_compiler.ir.config_file import shown, suggestion
from hetpipe_compiler.passes.check_stages import check_stages
from hetpipe_compiler.passes.in_flight import LEANEST
from hetpipe_compiler.passes.partition_problem import Partitioner, PartitionProblem
from hetpipe_compiler.passes.partition_search import Found, Search
from hetpipe_compiler.user_code import USER_ERRORS, told, user_place

#: Group of entry points that partitioners are announced under.
ENTRY_POINTS = "hetpipe_compiler.partitioners"

_MIB = 1 << 20


@dataclass(frozen=True)
class OwnPartitioner:
    """A partitioner with the name that the plan and errors call it by."""

    name: str
    function: Partitioner

    def find(self, problem: PartitionProblem, space: Search) -> Found | PlanningError:
        """Its checked answer, or why it has none that fits: HP315.

        Args:
            space: Our search for the same devices; it says what fits.

        Raises:
            PlanningError: HP311 it raised, or answers in another form; HP312 and HP313 as `check_stages`; HP314 a
                device that is none of the problem's, or twice, or out of a fixed order.
        """
        answer = self._answer(problem)
        if answer is None:
            message = f"found no stages that fit with Nm = {problem.nm}"
            return PlanningError("HP315", message, where=self._where, hint="try a smaller --nm, or another --policy")
        check_stages(problem.chain, [blocks for _, blocks in answer], self._where)
        devices = self._devices(problem, [name for name, _ in answer])
        stages = tuple(tuple(sorted(blocks)) for _, blocks in answer)
        classes = tuple(next(at for at, members in enumerate(space.classes.members) if d in members) for d in devices)
        for at, (blocks, device, w) in enumerate(
            zip(stages, devices, LEANEST.vector(problem.nm, len(stages)), strict=True)
        ):
            if not space.fits_alone(blocks, classes[at], w, problem.nm):
                over = problem.memory_bytes(blocks, device, w) - device.kind.memory_bytes
                message = (
                    f"stage {at} on {device.id} ({device.kind.name}) is over its memory by {over / _MIB:.1f} MiB"
                    f" with Nm = {problem.nm}, {w} in flight there"
                )
                return PlanningError(
                    "HP315", message, where=self._where, hint="give it fewer blocks, or try a smaller --nm"
                )
        return Found(stages, classes, _slowest_ms(problem, stages, devices), space.lower_bound_ms)

    @property
    def _where(self) -> str:
        return f"--partitioner {self.name}"

    def _answer(self, problem: PartitionProblem) -> list[tuple[str, list[int]]] | None:
        try:
            answer = self.function(problem)
            if answer is None:
                return None
            if not isinstance(answer, Iterable):
                raise self._malformed(f"answered with {shown(answer)}, which is no list of stages")
            # An answer may be lazy: to look at it is to run it. With one too many it is wrong, however long it is.
            stages = [self._stage(stage, len(problem.chain) + 1) for stage in islice(answer, len(problem.devices) + 1)]
        except HetpipeError:
            raise
        except USER_ERRORS as error:
            place = user_place(error)
            raise self._malformed(f"raised {told(error)}" + (f" (at {place})" if place else "")) from error
        if not stages:
            raise self._malformed("answered with no stages")
        return stages

    def _stage(self, stage: Any, most_blocks: int) -> tuple[str, list[int]]:
        if not (isinstance(stage, (tuple, list)) and len(stage) == 2 and isinstance(stage[1], Iterable)):
            raise self._malformed(f"answered with the stage {reprlib.repr(stage)}")
        device, blocks = stage[0], list(islice(stage[1], most_blocks))
        if not isinstance(device, str):
            raise self._malformed(f"answered with the device {shown(device)}, which is no id")
        if not all(isinstance(block, int) or hasattr(block, "__index__") for block in blocks):
            raise self._malformed(f"answered with blocks of {device} that are no whole numbers")
        return device, [int(block) for block in blocks]

    def _malformed(self, message: str) -> PlanningError:
        hint = "a partitioner returns [(device id, block indices), ...], or None if nothing fits"
        return PlanningError("HP311", message, where=self._where, hint=hint)

    def _devices(self, problem: PartitionProblem, names: Sequence[str]) -> tuple[Device, ...]:
        known = {device.id: device for device in problem.devices}
        for at, name in enumerate(names):
            if name not in known:
                raise self._wrong_device(f"stage {at} is on '{name}', which is not in the virtual worker", known)
            if name in names[:at]:
                raise self._wrong_device(f"'{name}' has stage {names.index(name)} and stage {at}", known)
        order = [list(known).index(name) for name in names]
        if problem.group.ordered and order != sorted(order):
            raise self._wrong_device(f"the group is ordered, and the stages are on {', '.join(names)}", known)
        return tuple(known[name] for name in names)

    def _wrong_device(self, message: str, known: Iterable[str]) -> PlanningError:
        hint = f"use each at most once: {', '.join(known)}"
        return PlanningError("HP314", message, where=self._where, hint=hint)


def _slowest_ms(problem: PartitionProblem, stages: Sequence[tuple[int, ...]], devices: Sequence[Device]) -> float:
    neighbours = zip((None, *devices), (*devices[1:], None), strict=False)
    return max(
        problem.stage_ms(blocks, device, before, after)
        for blocks, device, (before, after) in zip(stages, devices, neighbours, strict=False)
    )


def load_partitioner(name: str) -> OwnPartitioner:
    """The partitioner that is announced as ``name``, or ``module:function``.

    Raises:
        ClusterError: HP223, there is none, or it cannot be imported.
    """
    announced = entry_points(group=ENTRY_POINTS)
    found = next((point for point in announced if point.name == name), None)
    if found is None and EntryPoint.pattern.fullmatch(name) and ":" in name:
        found = EntryPoint(name, name, ENTRY_POINTS)
    if found is None:
        names = sorted(point.name for point in announced)
        way = f"give module:function, or install a package with an entry point of the group {ENTRY_POINTS}"
        hint = suggestion(name, names, way) if names else way
        raise ClusterError("HP223", f"no partitioner '{name}'", where="--partitioner", hint=hint)
    try:
        function = found.load()
    except USER_ERRORS as error:
        message = f"'{name}' cannot be imported: {told(error)}"
        hint = "a file of your own is found through PYTHONPATH: PYTHONPATH=DIR hetpipe-compile ..."
        raise ClusterError("HP223", message, where="--partitioner", hint=hint) from error
    if not callable(function):
        raise ClusterError("HP223", f"'{name}' is no function", where="--partitioner", hint="name a function")
    return OwnPartitioner(name, function)
