"""Passes keep their promises, are timed and can be printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from kinds import cluster_of

from hetpipe_compiler.cli.compile import PASSES
from hetpipe_compiler.passes.allocate import Allocation
from hetpipe_compiler.passes.annotate_cost import AnnotateCost
from hetpipe_compiler.passes.base import Compilation, Pass, Pipeline
from hetpipe_compiler.passes.coarsen import Coarsen
from hetpipe_compiler.passes.fuse_atomic import FuseAtomic
from hetpipe_compiler.passes.normalize import Normalize
from hetpipe_compiler.passes.planning import Allocate, MakeSchedule, Partition, Verify


@dataclass(frozen=True)
class Group(Pass):
    name: ClassVar[str] = "group"
    ensures: ClassVar[tuple[str, ...]] = ("allocation",)

    policy: str
    lazy: bool = False

    def run(self, compilation: Compilation) -> None:
        if not self.lazy:
            compilation.allocation = Allocation(self.policy, (), ())


@dataclass(frozen=True)
class Needy(Pass):
    name: ClassVar[str] = "needy"
    requires: ClassVar[tuple[str, ...]] = ("chain",)

    def run(self, compilation: Compilation) -> None:
        raise AssertionError(f"must not run on {compilation}")


def test_runs_times_and_dumps() -> None:
    started: list[str] = []
    dumped: list[tuple[str, str]] = []
    pipeline = Pipeline(frozenset({"group"}), lambda *shown: dumped.append(shown), started.append)
    pipeline.run(Group("ED"), Compilation(cluster_of(1)))
    with pipeline.timed("writing"):
        pass
    assert started == ["group", "writing"]
    assert list(pipeline.seconds) == ["group", "writing"]
    assert all(seconds >= 0 for seconds in pipeline.seconds.values())
    assert dumped == [("group", str(Allocation("ED", (), ())))]


def test_an_unmet_requirement_is_our_bug() -> None:
    with pytest.raises(AssertionError, match=r"needy requires \['chain'\]"):
        Pipeline().run(Needy(), Compilation(cluster_of(1)))


def test_a_broken_promise_is_our_bug() -> None:
    with pytest.raises(AssertionError, match=r"group ensures \['allocation'\]"):
        Pipeline().run(Group("ED", lazy=True), Compilation(cluster_of(1)))


def test_a_pass_reads_as_text_with_its_options() -> None:
    assert str(Group("HD", lazy=True)) == "group(policy='HD', lazy=True)"


def test_the_command_line_knows_all_passes() -> None:
    passes = (Normalize, AnnotateCost, FuseAtomic, Coarsen, Allocate, Partition, MakeSchedule, Verify)
    names = [p.name for p in passes]
    assert [name for name in PASSES if name in names] == names, "in the order in which they run"
