"""What a pass is, and how passes run one after another.

A pass is a small frozen dataclass: a name, typed options, the fields of the `Compilation` that it reads and writes. The
pipeline checks both, times each pass, and can print what a pass made.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from hetpipe_compiler.ir.blocks import BlockChain
    from hetpipe_compiler.ir.captured import Captured
    from hetpipe_compiler.ir.cluster import Cluster
    from hetpipe_compiler.ir.costs import NodeCost
    from hetpipe_compiler.ir.schedule import Schedule
    from hetpipe_compiler.passes.allocate import Allocation
    from hetpipe_compiler.passes.concurrency import PlannedWorker
    from hetpipe_compiler.passes.fuse_atomic import Components


@dataclass
class Compilation:
    """Everything known so far; each pass fills in more. Fields are None until their pass has run.

    Attributes:
        captured: The fx graph (rewritten by `normalize`).
        costs: Cost of each node, by fx node name.
        components: Atomic components, in execution order.
        whole: The planner's view before components were merged into blocks; None where none were.
        chain: The planner's view.
        allocation: Groups of devices, one a virtual worker.
        workers: Planned virtual workers.
        schedule: Programs of all stages.
        uncoarsened_bounds_ms: Per virtual worker, what no partition of the components can better; empty where none were
            merged.
        runs: Runs that measured times come from, stage by stage.
    """

    cluster: Cluster
    captured: Captured | None = None
    costs: dict[str, NodeCost] | None = None
    components: Components | None = None
    whole: BlockChain | None = None
    chain: BlockChain | None = None
    allocation: Allocation | None = None
    workers: tuple[PlannedWorker, ...] | None = None
    schedule: Schedule | None = None
    uncoarsened_bounds_ms: tuple[float, ...] = ()
    runs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pass(ABC):
    """One step of the compiler. Subclasses are frozen dataclasses whose fields are the pass's options."""

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]] = ()
    ensures: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def run(self, compilation: Compilation) -> None:
        """Fill in the fields named by ``ensures``."""

    def dump(self, compilation: Compilation) -> str:
        """What this pass made, as text, for ``--dump-after``."""
        return "\n".join(str(getattr(compilation, name)) for name in self.ensures)

    def __str__(self) -> str:
        options = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))
        return f"{self.name}({options})"


@dataclass
class Pipeline:
    """Runs passes one after another.

    Attributes:
        dump_after: Names of passes whose result is shown to ``on_dump``.
        on_start: Told the name of each step as it begins.
        seconds: Filled in: wall time of each step.
    """

    dump_after: frozenset[str] = frozenset()
    on_dump: Callable[[str, str], Any] = lambda _name, _text: None
    on_start: Callable[[str], Any] = lambda _name: None
    seconds: dict[str, float] = field(default_factory=dict)

    def run(self, step: Pass, compilation: Compilation) -> None:
        """Run a pass; an unmet requirement or a promise not kept is our own bug."""
        _check(step, compilation, step.requires, "requires")
        with self.timed(step.name):
            step.run(compilation)
        _check(step, compilation, step.ensures, "ensures")
        if step.name in self.dump_after:
            self.on_dump(step.name, step.dump(compilation))

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count the time of a step that is no pass."""
        self.on_start(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


def _check(step: Pass, compilation: Compilation, names: Iterable[str], word: str) -> None:
    missing = [name for name in names if getattr(compilation, name) is None]
    assert not missing, f"pass {step.name} {word} {missing}"
