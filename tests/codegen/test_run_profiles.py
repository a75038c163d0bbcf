"""From a run's stage times to profiles: compiled with them, the same stages take what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetpipe_compiler.cli.boundary import run_app, single_command
from hetpipe_compiler.cli.inspect import inspect
from hetpipe_compiler.codegen.compare import compare
from hetpipe_compiler.codegen.run_profiles import run_profiles
from hetpipe_compiler.codegen.tables import plan_text
from hetpipe_compiler.compiler import compile
from hetpipe_compiler.errors import ArtifactError
from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.ir.profile_file import Operator, Profile, load_profile, merged
from hetpipe_compiler.options import CompileOptions, with_decisions

MODEL = Path(__file__).parent / "uneven_model.py"
ED = CompileOptions(policy="ED", nm=2, weights=False)


def cluster(kinds=("cpu-fast", "cpu-slow"), each=2, **more):
    """A node a kind."""
    nodes = [{"name": f"n{i}", "devices": {kind: each}, "link": "loopback"} for i, kind in enumerate(kinds)]
    figures = {"memory_gb": 1, "memory_bandwidth_gb_s": 5}
    speeds = {kind: figures | {"fp32_tflops": 0.02 / (i + 1)} for i, kind in enumerate(kinds)}
    return Cluster.from_dict({"name": "here", "nodes": nodes, "network": "loopback", "kinds": speeds, **more})


def write_run(folder, plan, factors, backend="cpu"):
    """A run: stage ``s`` of virtual worker ``v`` took (forward, backward) ``factors(v, s)`` x what is predicted."""
    folder.mkdir(exist_ok=True)
    events = []
    for worker in plan.virtual_workers:
        for stage in worker.stages:
            predicted = {"forward": stage.forward_ms, "backward": stage.backward_ms}
            times = {
                name: {"count": 9, "median_ms": ms * factor, "low_ms": ms, "high_ms": ms}
                for (name, ms), factor in zip(predicted.items(), factors(worker.index, stage.index), strict=True)
            }
            events.append({"kind": "times", "vw": worker.index, "stage": stage.index, "times": times})
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "run.json").write_text(json.dumps({"backend": backend, "threads": 1, "computes": plan.computes()}))
    return folder


def compiled_again(tmp_path, plan, run, given):
    """The same decisions, with the run's times."""
    paths = []
    for profile in run_profiles(plan, tmp_path / "out", run, compare(plan, run)):
        paths.append(tmp_path / f"{profile.kind}.json")
        profile.save(paths[-1])
    options = CompileOptions(weights=False, profiles=tuple(paths))
    options = with_decisions(options, tmp_path / "out/decisions.yaml")
    return compile(MODEL, given, tmp_path / "again", options=options).plan


def stages_of(plan):
    return [(stage, worker.index) for worker in plan.virtual_workers for stage in worker.stages]


def test_compiled_with_a_runs_times_the_same_stages_take_them(tmp_path):
    plan = compile(MODEL, cluster(), tmp_path / "out", options=ED).plan
    kinds = {stage.kind for stage, _ in stages_of(plan)}
    assert kinds == {"cpu-fast", "cpu-slow"}
    run = write_run(tmp_path / "run", plan, lambda _vw, stage: (3.0, 5.0) if stage == 0 else (0.7, 0.4))
    again = compiled_again(tmp_path, plan, run, cluster())
    assert again.computes() == plan.computes()
    for new, old in zip(compare(again, run), compare(plan, run), strict=True):
        assert new.measured_ms == old.measured_ms != old.predicted_ms
        assert new.predicted_ms == pytest.approx(new.measured_ms, rel=0.01)
    assert all(stage.measured for stage, _ in stages_of(again))
    assert (again.predicted, again.runs) == ("profile", ("run",))
    assert "measured times: those of the stages of run, shared out" in plan_text(again, width=120)
    assert "shared out" not in plan_text(plan, width=120)


def test_what_did_not_run_on_a_kind_is_scaled_and_stays_an_estimate(tmp_path):
    plan = compile(MODEL, cluster(), tmp_path / "out", options=ED).plan
    run = write_run(tmp_path / "run", plan, lambda _vw, _stage: (3.0, 5.0))
    for profile in run_profiles(plan, tmp_path / "out", run, compare(plan, run)):
        whole = sum((o.backward_ms or 0) for o in profile.operators.values())
        measured = [o for o in profile.operators.values() if not o.estimated]
        assert 0 < len(measured) < len(profile.operators)
        assert all(o.runs == 18 for o in measured)
        assert whole > sum((o.backward_ms or 0) for o in measured)
    again = compiled_again(tmp_path, plan, run, cluster())
    # The whole model on either kind: three and five times, so the stages' shares stay, and the rate falls.
    for new, old in zip(stages_of(again), stages_of(plan), strict=True):
        assert new[0].forward_ms == pytest.approx(3 * old[0].forward_ms)
        assert new[0].share == pytest.approx(
            (3 * old[0].forward_ms + 5 * old[0].backward_ms) / whole_ms(tmp_path / "out", old[0].kind, 3, 5), rel=1e-6
        )


def whole_ms(folder, kind, forward, backward):
    nodes = json.loads((folder / "graph.json").read_text())["nodes"]
    return sum(forward * n["forward_ms"][kind] + backward * n["backward_ms"][kind] for n in nodes)


def test_stages_of_one_kind_and_alike_operators_are_averaged(tmp_path):
    given = cluster(kinds=("cpu", "cpu"))
    plan = compile(MODEL, given, tmp_path / "out", options=CompileOptions(policy="NP", nm=2, weights=False)).plan
    assert len(plan.virtual_workers) == 2
    # The same stages ran twice, at unlike speeds.
    run = write_run(tmp_path / "run", plan, lambda vw, _stage: (2.0, 2.0) if vw == 0 else (4.0, 4.0))
    again = compiled_again(tmp_path, plan, run, given)
    for new, old in zip(stages_of(again), stages_of(plan), strict=True):
        assert new[0].forward_ms == pytest.approx(3 * old[0].forward_ms)
        assert new[0].backward_ms == pytest.approx(3 * old[0].backward_ms)


def test_a_backward_that_runs_the_forward_again(tmp_path):
    options = CompileOptions(policy="ED", nm=2, weights=False, recompute="always")
    plan = compile(MODEL, cluster(), tmp_path / "out", options=options).plan
    assert any(stage.recompute for stage, _ in stages_of(plan))
    run = write_run(tmp_path / "run", plan, lambda _vw, _stage: (2.0, 3.0))
    again = compiled_again(tmp_path, plan, run, cluster())
    assert [s.recompute for s, _ in stages_of(again)] == [s.recompute for s, _ in stages_of(plan)]
    for c in compare(again, run):
        assert c.predicted_ms == pytest.approx(c.measured_ms, rel=0.01)


@pytest.mark.parametrize(
    ("given", "backend", "message"),
    [
        (cluster(emulate={"time_scale": 2.0}), "cpu", "the cluster is emulated"),
        (cluster(kinds=("mine",)), "cpu", "it ran on CPUs, but mine is a GPU"),
        (cluster(kinds=("mine",)), "cuda", "on GPUs a run times the launch"),
    ],
)
def test_times_that_are_no_measurement_are_refused(tmp_path, given, backend, message, capsys):
    plan = compile(MODEL, given, tmp_path / "out", options=CompileOptions(policy="NP", nm=1, weights=False)).plan
    run = write_run(tmp_path / "run", plan, lambda _vw, _stage: (2.0, 2.0), backend)
    with pytest.raises(ArtifactError, match=message) as caught:
        run_profiles(plan, tmp_path / "out", run, compare(plan, run))
    assert caught.value.code == "HP452"
    assert command(tmp_path / "out", "--compare", run, "--write-profiles", tmp_path) == 2
    assert not list(tmp_path.glob("*-run.json"))
    assert "HP452" in capsys.readouterr().err
    assert command(tmp_path / "out", "--compare", run) == 0
    assert f"no measurement to compile with: {message}" in capsys.readouterr().out


def test_a_graph_without_keys_and_the_run_of_another_plan(tmp_path):
    plan = compile(MODEL, cluster(), tmp_path / "out", options=ED).plan
    run = write_run(tmp_path / "run", plan, lambda _vw, _stage: (2.0, 2.0))
    other = compile(MODEL, cluster(), tmp_path / "other", options=CompileOptions(policy="NP", nm=1, weights=False)).plan
    with pytest.raises(ArtifactError) as caught:
        compare(other, run)
    assert caught.value.code == "HP451"
    graph = tmp_path / "out/graph.json"
    content = json.loads(graph.read_text())
    for node in content["nodes"]:
        del node["key"]
    graph.write_text(json.dumps(content))
    with pytest.raises(ArtifactError) as caught:
        run_profiles(plan, tmp_path / "out", run, compare(plan, run))
    assert caught.value.code == "HP453"


def command(*arguments):
    app = single_command(inspect)
    with pytest.raises(SystemExit) as caught:
        run_app(lambda: app(args=[str(a) for a in arguments], prog_name="hetpipe-inspect"))
    return caught.value.code


def test_as_a_command(tmp_path, capsys):
    plan = compile(MODEL, cluster(), tmp_path / "out", options=ED).plan
    run = write_run(tmp_path / "run", plan, lambda _vw, _stage: (2.0, 2.0))
    assert command(tmp_path / "out", "--compare", run) == 0
    assert capsys.readouterr().out.endswith("to compile with these times: --write-profiles DIR\n")
    assert command(tmp_path / "out", "--write-profiles", tmp_path) == 2  # no run
    assert command(tmp_path / "out", "--compare", run, "--write-profiles", tmp_path / "nowhere") == 2
    assert "HP411" in capsys.readouterr().err
    assert command(tmp_path / "out", "--compare", run, "--write-profiles", tmp_path) == 0
    paths = [tmp_path / f"{kind}-run.json" for kind in ("cpu-fast", "cpu-slow")]
    last = capsys.readouterr().out.splitlines()[-1]
    assert sorted(last.split(" --profile ")[1:]) == sorted(map(str, paths))
    assert {load_profile(path).run for path in paths} == {"run"}


def test_an_estimate_never_takes_the_place_of_a_measurement():
    def profile(**operators):
        return Profile(kind="k", device="d", backend="cpu", torch="t", threads=1, operators=operators)

    known = profile(a=Operator(forward_ms=1.0, backward_ms=1.0), b=Operator(forward_ms=1.0, estimated=True))
    later = profile(
        a=Operator(forward_ms=2.0, backward_ms=2.0, estimated=True), b=Operator(forward_ms=2.0, estimated=True)
    )
    assert {key: o.forward_ms for key, o in merged([known, later])["k"].items()} == {"a": 1.0, "b": 2.0}
