"""The compiler as a library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from kinds import MODELS, cluster_of

import hetpipe_compiler
from hetpipe_compiler.cli.compile import PASSES
from hetpipe_compiler.compiler import CompileOptions, compile
from hetpipe_compiler.errors import ClusterError, PlanningError, WorkloadError
from hetpipe_compiler.ir.plan import Plan
from hetpipe_compiler.options import with_decisions
from hetpipe_compiler.passes.own_partitioner import OwnPartitioner

CLUSTER = cluster_of(2)
MODEL = {"name": "BranchyDAG"}


def test_a_plan_and_the_time_of_each_step(tmp_path: Path) -> None:
    result = compile(MODELS, CLUSTER, tmp_path / "out", settings=MODEL)
    assert Plan.load(tmp_path / "out") == result.plan
    assert set(result.seconds) == {"load", "capture", *PASSES, "weights", "codegen"}
    assert result.plan.name == "models", "called after the file, or after its folder if it is model.py"
    assert result.plan.workload is not None
    assert result.plan.workload.settings == MODEL
    assert result.plan.cluster_digest == CLUSTER.digest()


def test_options_reach_the_plan(tmp_path: Path) -> None:
    options = CompileOptions(
        policy="NP", nm=2, staleness=3, placement="round-robin", update_scale=1.0, splits=(("layers.3", "layers.9"),),
        seed=5, weights=False,
    )  # fmt: skip
    plan = compile(MODELS, CLUSTER, tmp_path / "out", settings=MODEL, options=options).plan
    assert (plan.policy, plan.nm, plan.staleness, plan.placement) == ("NP", 2, 3, "round-robin")
    assert (plan.update_scale, plan.seed, plan.weights) == (1.0, 5, False)
    assert not (tmp_path / "out" / "weights.safetensors").exists()
    for worker in plan.virtual_workers:
        firsts = [stage.nodes[0] for stage in worker.stages]
        assert firsts[1:] == ["linear_3", "linear_9"]


def test_decisions_given_back_make_the_same_plan(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    options = CompileOptions(policy="NP", staleness=1, placement="round-robin", update_scale=0.3, weights=False)
    compile(MODELS, CLUSTER, first, settings=MODEL, options=options)
    again = with_decisions(CompileOptions(weights=False), first / "decisions.yaml")
    compile(MODELS, CLUSTER, second, settings=MODEL, options=again)
    assert _files(second) == _files(first)


def test_edited_decisions_make_the_edited_plan(tmp_path: Path) -> None:
    compile(MODELS, CLUSTER, tmp_path / "out", settings=MODEL, options=CompileOptions(policy="NP", weights=False))
    decided = yaml.safe_load((tmp_path / "out" / "decisions.yaml").read_text())
    for worker in decided["virtual_workers"]:
        names = [stage["device"] for stage in worker["stages"]]
        worker["stages"] = [
            {"device": names[0], "in_flight": 2},
            {"device": names[1], "in_flight": 1, "begins_at": "layers.9"},
        ]
    (tmp_path / "d.yaml").write_text(yaml.safe_dump(decided))
    options = with_decisions(CompileOptions(weights=False, verify=True, explain_plan=True), tmp_path / "d.yaml")
    result = compile(MODELS, CLUSTER, tmp_path / "out", settings=MODEL, options=options)
    assert result.plan.virtual_workers[0].stages[-1].nodes[0] == "linear_9"
    assert (result.plan.policy, result.plan.partitioner) == ("NP, edited", "search, edited")
    assert result.verification is not None
    assert result.explanation is not None
    assert not result.plan.virtual_workers[0].optimal


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"policy": "NP"}, "--policy"),
        ({"nm": 3}, "--nm"),
        ({"staleness": 1}, "--staleness"),
        ({"placement": "round-robin"}, "--placement"),
        ({"update_scale": 1.0}, "--update-scale"),
        ({"splits": (("fc",),)}, "--split"),
        ({"partitioner": "even"}, "--partitioner"),
        ({"objective": "overlapped"}, "--objective"),
    ],
)
def test_options_that_decisions_decide_are_refused(tmp_path: Path, given: dict[str, Any], option: str) -> None:
    with pytest.raises(ClusterError) as caught:
        with_decisions(CompileOptions(**given), tmp_path / "d.yaml")
    assert (caught.value.code, caught.value.where) == ("HP224", option)


def _files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_scale_of_updates_is_one_nth(tmp_path: Path) -> None:
    plan = compile(MODELS, CLUSTER, tmp_path / "out", settings=MODEL, options=CompileOptions(policy="NP")).plan
    assert plan.update_scale == pytest.approx(1 / len(plan.virtual_workers))


def test_steps_are_told_and_dumps_come_out(tmp_path: Path) -> None:
    started: list[str] = []
    dumped: dict[str, str] = {}
    options = CompileOptions(dump_after=frozenset(PASSES), on_dump=dumped.__setitem__, on_start=started.append)
    compile(MODELS, CLUSTER, tmp_path / "out", settings=MODEL, options=options)
    assert set(dumped) == set(PASSES)
    assert all(text.strip() for text in dumped.values())
    assert started[:3] == ["load", "allocate", "capture"]


def test_the_weights_follow_the_seed(tmp_path: Path) -> None:
    files = []
    for at, seed in enumerate((1, 1, 2)):
        compile(MODELS, CLUSTER, tmp_path / str(at), settings=MODEL, options=CompileOptions(seed=seed))
        files.append((tmp_path / str(at) / "weights.safetensors").read_bytes())
    assert files[0] == files[1]
    assert files[0] != files[2]


@pytest.mark.parametrize(
    ("options", "kind", "code"),
    [
        (CompileOptions(policy="XX"), ClusterError, None),
        (CompileOptions(splits=(("nowhere",),)), PlanningError, "HP303"),
        (CompileOptions(splits=((1, 2, 3),)), PlanningError, None),
    ],
)
def test_nothing_is_written_on_an_error(tmp_path: Path, options: CompileOptions, kind: type, code: str | None) -> None:
    with pytest.raises(kind) as caught:
        compile(MODELS, CLUSTER, tmp_path / "out", settings=MODEL, options=options)
    assert code is None or caught.value.code == code
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_policy_is_told_before_the_model_is_captured(tmp_path: Path) -> None:
    with pytest.raises(ClusterError):
        compile(MODELS, CLUSTER, tmp_path / "out", settings={"name": "Counter"}, options=CompileOptions(policy="XX"))


@pytest.mark.parametrize(
    ("given", "code"),
    [({"profiles": (Path("missing.json"),)}, "HP230"), ({"partitioner": "missing:function"}, "HP223")],
)
def test_a_missing_file_is_told_before_the_model_is_captured(tmp_path: Path, given: dict[str, Any], code: str) -> None:
    started: list[str] = []
    with pytest.raises(ClusterError) as caught:
        compile(
            MODELS, CLUSTER, tmp_path / "out", settings=MODEL, options=CompileOptions(**given, on_start=started.append)
        )
    assert caught.value.code == code
    assert "capture" not in started


def test_a_partitioner_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def load(name: str) -> OwnPartitioner:
        loaded.append(name)
        return OwnPartitioner(name, lambda problem: [(problem.devices[0].id, range(len(problem.chain)))])

    monkeypatch.setattr("hetpipe_compiler.planning_steps.load_partitioner", load)
    options = CompileOptions(partitioner="all_on_one", nm=1, weights=False, explain_plan=True)
    result = compile(MODELS, CLUSTER, tmp_path / "out", settings=MODEL, options=options)
    assert loaded == ["all_on_one"]
    assert result.plan.partitioner == "all_on_one"
    assert result.explanation is not None


def test_a_setting_that_raises(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError) as caught:
        compile(MODELS, CLUSTER, tmp_path / "out", settings={"name": "NoSuch"})
    assert caught.value.code == "HP103"
    assert "KeyError: 'NoSuch'" in caught.value.message


def test_the_package_offers_it() -> None:
    assert hetpipe_compiler.Workload is not None
