"""What hetpipe-compile is asked, and what it answers. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetpipe_compiler.errors import ClusterError
from hetpipe_compiler.ir.decisions import Decisions

if TYPE_CHECKING:
    from hetpipe_compiler.ir.plan import Plan
    from hetpipe_compiler.verification.verify import Verification


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

    @property
    def made_by(self) -> str:
        """Who makes the stages, as the plan says it."""
        if self.decisions is not None:
            return self.decisions.author(self.decisions.partitioner)
        return "--split" if self.splits else self.partitioner or "search"


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
