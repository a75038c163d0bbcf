"""Wave Synchronous Parallel on the side of a parameter server: one shard of the parameters as a pure state machine.

No sockets and no clock of its own: messages go in as calls, the replies that they set free come out as a list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hetpipe_compiler.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Reply:
    """Weights for one stage that asked.

    Attributes:
        vw, stage: Who asked.
        need: The clock it asked for.
        weights: Parameter -> value. Never written again by the shard: send it, or copy it, at leisure.
        clock: Smallest wave count over these parameters and the virtual workers not finished. Reproducible: ``need``.
        contains: How many waves of ``vw`` they contain.
    """

    vw: int
    stage: int
    need: int
    weights: Mapping[str, Tensor]
    clock: int
    contains: int


@dataclass
class _Entry:
    """One parameter: its newest value and how far each virtual worker is.

    Attributes:
        value: The newest value; reproducible: S of ``clock``.
        waves: Virtual worker -> number of waves received from it.
        finished: Virtual workers that push no more.
        clock: Reproducible: number of waves in ``value``.
        history: Reproducible: clock -> S, for the last D+1 clocks.
        waiting: Reproducible: wave -> virtual worker -> its update, until all have arrived.
    """

    value: Tensor
    waves: list[int]
    finished: set[int] = field(default_factory=set)
    clock: int = 0
    history: dict[int, Tensor] = field(default_factory=dict)
    waiting: dict[int, dict[int, Tensor]] = field(default_factory=dict)

    def slowest(self) -> int:
        """The smallest wave count of those not finished; the largest of all when all are."""
        running = [count for vw, count in enumerate(self.waves) if vw not in self.finished]
        return min(running) if running else max(self.waves)


class ParameterShard:
    """The parameters of one server.

    Free running: ``w = w + scale * U`` as pushes arrive. Reproducible: ``S_{c+1} = S_c + scale * (U(0,c) + U(1,c) +
    ...)`` in order of virtual workers once all have arrived; each product and sum is rounded by itself (no fused
    multiply-add), so an oracle that writes the same expression gets the same bits.

    Args:
        weights: Initial values; kept by reference and never written.
        virtual_workers: N.
        scale: Factor on every update (``Plan.update_scale``).
        staleness: D.
        reproducible: Reply with exactly the clock asked for; else with the newest weights at that clock or later.
        on_event: Gets ``{"event": "push", "vw", "stage", "wave", "accepted", "clock"}`` after each push (``clock``:
            smallest wave count over the pushed parameters), ``{"event": "pull", "vw", "stage", "need", "clock",
            "contains"}`` with each reply, and ``{"event": "finish", "vw", "stage", "clock"}``.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        virtual_workers: int,
        *,
        scale: float,
        staleness: int,
        reproducible: bool,
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._entries = {
            name: _Entry(value.detach(), [0] * virtual_workers, history={0: value.detach()} if reproducible else {})
            for name, value in weights.items()
        }
        self._virtual_workers = virtual_workers
        self._scale = scale
        self._staleness = staleness
        self._reproducible = reproducible
        self._on_event = on_event or (lambda _event: None)
        self._pulls: dict[tuple[int, int], list[tuple[tuple[str, ...], int]]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters it holds."""
        return tuple(self._entries)

    @property
    def finished(self) -> bool:
        """Whether all virtual workers have finished with all parameters."""
        return all(len(e.finished) == self._virtual_workers for e in self._entries.values())

    def clock(self, names: Iterable[str] | None = None) -> int:
        """The smallest wave count over ``names`` (default: all) and the virtual workers not finished."""
        return min((self._entries[name].slowest() for name in names or self._entries), default=0)

    def waves(self, vw: int) -> dict[str, int]:
        """Parameter -> number of waves received from ``vw``."""
        return {name: entry.waves[vw] for name, entry in self._entries.items()}

    def snapshot(self) -> dict[str, Tensor]:
        """The newest weights (reproducible: of the newest complete clock); the tensors are never written again."""
        return {name: entry.value for name, entry in self._entries.items()}

    def push(self, vw: int, stage: int, wave: int, updates: Mapping[str, Tensor]) -> list[Reply]:
        """Take the summed updates of ``wave``; kept by reference, so the caller must not write them again.

        A wave that was received before is a retry: dropped, and that is fine. Replies that others waited for come back.

        Raises:
            RunError: HP510 an unknown parameter or a wrong shape; HP511 a wave out of turn, or one after `finish`.
        """
        where = f"vw{vw}/stage{stage}"
        for name, update in updates.items():
            entry = self._entry(name, where)
            if update.shape != entry.value.shape or update.dtype != entry.value.dtype:
                raise RunError(
                    "HP510",
                    f"pushed {name} as {update.dtype} {tuple(update.shape)}, "
                    f"here it is {entry.value.dtype} {tuple(entry.value.shape)}",
                    where=where,
                    hint="start all processes from the same plan folder",
                )
            if wave > entry.waves[vw] or (vw in entry.finished and wave == entry.waves[vw]):
                state = "finished" if vw in entry.finished else f"expected wave {entry.waves[vw]}"
                raise RunError(
                    "HP511",
                    f"pushed wave {wave} of {name}, but {state}",
                    where=where,
                    hint="restart the virtual worker from its last complete wave",
                )
        accepted = False
        for name, update in updates.items():
            entry = self._entries[name]
            if wave == entry.waves[vw]:
                self._take(entry, vw, wave, update)
                accepted = True
        self._on_event(
            {
                "event": "push",
                "vw": vw,
                "stage": stage,
                "wave": wave,
                "accepted": accepted,
                "clock": self.clock(updates) if updates else 0,
            }
        )
        return self._answer()

    def pull(self, vw: int, stage: int, names: Iterable[str], need: int) -> list[Reply]:
        """Ask for weights at clock >= ``need``; the reply comes now, or from a later call on this shard.

        Reproducible: exactly ``need``, and a ``need`` of 0 asks for nothing (a stage starts on those).
        """
        wanted = tuple(names)
        for name in wanted:
            self._entry(name, f"vw{vw}/stage{stage}")
        if not wanted or (self._reproducible and need <= 0):
            return []
        self._pulls.setdefault((vw, stage), []).append((wanted, need))
        return self._answer()

    def finish(self, vw: int, stage: int, names: Iterable[str]) -> list[Reply]:
        """``vw`` pushes ``names`` no more: it holds nobody back from now on, and its open pulls are dropped."""
        wanted = tuple(names)
        for name in wanted:
            entry = self._entry(name, f"vw{vw}/stage{stage}")
            entry.finished.add(vw)
            if self._reproducible:
                self._advance(entry)
        self._pulls.pop((vw, stage), None)
        self._on_event({"event": "finish", "vw": vw, "stage": stage, "clock": self.clock(wanted) if wanted else 0})
        return self._answer()

    def _entry(self, name: str, where: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise RunError(
                "HP510",
                f"no parameter '{name}' on this server",
                where=where,
                hint="start all processes from the same plan folder",
            )
        return entry

    def _take(self, entry: _Entry, vw: int, wave: int, update: Tensor) -> None:
        entry.waves[vw] = wave + 1
        if self._reproducible:
            entry.waiting.setdefault(wave, {})[vw] = update
            self._advance(entry)
        else:
            entry.value = entry.value + update * self._scale

    def _advance(self, entry: _Entry) -> None:
        """Reproducible: build every S whose updates have all arrived."""
        while entry.clock in entry.waiting and entry.slowest() > entry.clock:
            updates = entry.waiting.pop(entry.clock)
            total: Tensor | None = None
            for vw in sorted(updates):
                total = updates[vw] if total is None else total + updates[vw]
            assert total is not None
            entry.value = entry.value + total * self._scale
            entry.clock += 1
            entry.history[entry.clock] = entry.value
            entry.history.pop(entry.clock - self._staleness - 1, None)

    def _answer(self) -> list[Reply]:
        """The replies to all pulls that can be answered now, in order of virtual workers and stages."""
        replies: list[Reply] = []
        for (vw, stage), pulls in sorted(self._pulls.items()):
            for names, need in list(pulls):
                if self.clock(names) >= need:
                    pulls.remove((names, need))
                    replies.append(self._reply(vw, stage, names, need))
        return replies

    def _reply(self, vw: int, stage: int, names: tuple[str, ...], need: int) -> Reply:
        entries = {name: self._entries[name] for name in names}
        if self._reproducible:
            weights = {name: entry.history[need] for name, entry in entries.items()}
            clock = contains = need
        else:
            weights = {name: entry.value for name, entry in entries.items()}
            clock = self.clock(names)
            contains = min(entry.waves[vw] for entry in entries.values())
        self._on_event({"event": "pull", "vw": vw, "stage": stage, "need": need, "clock": clock, "contains": contains})
        return Reply(vw, stage, need, weights, clock, contains)
