"""What hetpipe-compile is asked, and what it answers. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetpipe_compiler.errors import ClusterError, PlanningError
from hetpipe_compiler.ir.decisions import Decisions
from hetpipe_compiler.ir.limits import MOST_CLOCKS, MOST_IN_FLIGHT

if TYPE_CHECKING:
    from hetpipe_compiler.ir.plan import Plan
    from hetpipe_compiler.verification.verify import Verification

OBJECTIVES = ("hetpipe", "overlapped")
RECOMPUTE = ("auto", "never", "always")
#: Seeds that torch takes, from and to.
_SEEDS = (-(1 << 63), (1 << 64) - 1)


@dataclass(frozen=True)
class CompileOptions:
    """How to plan.

    Attributes:
        policy: ``NP``, ``ED``, ``HD``, ``auto`` or the path of a groups file.
        nm: Minibatches in flight; None: the smallest within 1 % of the best.
        staleness: D, in clocks.
        placement: ``local`` or ``round-robin``: where parameters live.
        update_scale: Factor that the servers put on a pushed update; None: 1/N.
        splits: Cuts by hand, one for each virtual worker or one for all.
        decisions: A plan by hand; policy, Nm and all else that it decides are then its own (`with_decisions`).
        partitioner: Name of an entry point, or ``module:function``, that makes the stages in place of our search.
        objective: ``hetpipe`` (a stage's time is computation and transfers together) or ``overlapped`` (the longer).
        recompute: ``auto``: a stage that does not fit otherwise keeps its inputs only and runs its forward again before
            its backward; ``never``; ``always``: every stage with more than one minibatch in flight.
        seed: Makes the initial weights.
        weights: Whether to write them.
        verify: Whether to run the stages beside the model, and write no plan that computes something else.
        opaque: Submodules that are kept whole, by path or pattern: their operators are not looked at.
        profiles: Profile files of hetpipe-profile: measured times in place of estimates.
        export_graph: Where to write the model as a profiled graph file; None: nowhere.
        explain_plan: Whether to say why the plan is as it is (plans several times more).
        dump_after: Names of passes whose result goes to ``on_dump``.

    Raises:
        PlanningError: HP307, HP310 an Nm or a D that no plan has.
        ClusterError: HP221 an objective or choice that there is not; HP225 an update scale or a seed out of range.
    """

    policy: str = "ED"
    nm: int | None = None
    staleness: int = 0
    placement: str = "local"
    update_scale: float | None = None
    splits: tuple[tuple[str | int, ...], ...] | None = None
    decisions: Decisions | None = None
    partitioner: str | None = None
    objective: str = "hetpipe"
    recompute: str = "auto"
    seed: int = 0
    weights: bool = True
    verify: bool = False
    opaque: tuple[str, ...] = ()
    profiles: tuple[Path, ...] = ()
    export_graph: Path | None = None
    explain_plan: bool = False
    dump_after: frozenset[str] = frozenset()
    on_dump: Callable[[str, str], Any] = field(default=lambda _name, _text: None)
    on_start: Callable[[str], Any] = field(default=lambda _name: None)

    def __post_init__(self) -> None:
        if self.nm is not None and not 1 <= self.nm <= MOST_IN_FLIGHT:
            hint = f"give 1 to {MOST_IN_FLIGHT}"
            raise PlanningError("HP307", f"Nm = {self.nm} minibatches in flight", where="--nm", hint=hint)
        if not 0 <= self.staleness <= MOST_CLOCKS:
            hint = f"give 0 to {MOST_CLOCKS}"
            raise PlanningError("HP310", f"D = {self.staleness} clocks", where="--staleness", hint=hint)
        _check_one_of("objective", self.objective, OBJECTIVES, "--objective")
        _check_one_of("choice", self.recompute, RECOMPUTE, "--recompute")
        if self.update_scale is not None and not 0 < self.update_scale < math.inf:
            message = f"a factor of {self.update_scale} on updates: the servers' weights would not learn from them"
            hint = "give a number above 0, or leave it out for 1 / number of virtual workers"
            raise ClusterError("HP225", message, where="--update-scale", hint=hint)
        if not _SEEDS[0] <= self.seed <= _SEEDS[1]:
            hint = f"give {_SEEDS[0]} to {_SEEDS[1]}"
            raise ClusterError("HP225", f"the seed {self.seed}", where="--seed", hint=hint)

    @property
    def made_by(self) -> str:
        """Who makes the stages, as the plan says it."""
        if self.decisions is not None:
            return self.decisions.author(self.decisions.partitioner)
        return "--split" if self.splits else self.partitioner or "search"


def _check_one_of(what: str, value: str, known: tuple[str, ...], where: str) -> None:
    if value not in known:
        raise ClusterError("HP221", f"no {what} '{value}'", where=where, hint=f"one of {', '.join(known)}")


def with_decisions(options: CompileOptions, path: Path) -> CompileOptions:
    """``options`` with what the decisions file at ``path`` decides.

    Raises:
        ClusterError: HP201, HP202, HP240 the file; HP224 an option that says what the file decides.
    """
    unset = CompileOptions()
    decided = (
        "policy",
        "nm",
        "staleness",
        "placement",
        "update_scale",
        "splits",
        "partitioner",
        "objective",
        "recompute",
    )
    for name in decided:
        if getattr(options, name) != getattr(unset, name):
            option = "--" + name.removesuffix("s" if name == "splits" else "").replace("_", "-")
            raise ClusterError(
                "HP224", f"--decisions decides that, and so does {option}", where=option, hint="edit the file instead"
            )
    decisions = Decisions.load(path)
    return replace(
        options,
        decisions=decisions,
        policy=decisions.policy,
        nm=decisions.nm,
        staleness=decisions.staleness,
        placement=decisions.placement,
        update_scale=decisions.update_scale,
        objective=decisions.objective,
        recompute=decisions.recompute,
    )


@dataclass(frozen=True)
class CompileResult:
    """The plan and the seconds of each step; if asked for, what `--verify` found and the text of `--explain-plan`."""

    plan: Plan
    seconds: dict[str, float]
    verification: Verification | None = None
    explanation: str | None = None
