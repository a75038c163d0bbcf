"""Profiling a model: every distinct operator once, resumed where it was interrupted, and used by the compiler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hetpipe_compiler.compiler import compile
from hetpipe_compiler.errors import ClusterError
from hetpipe_compiler.frontend.load import load_workload
from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.ir.profile_file import load_profile, merged
from hetpipe_compiler.options import CompileOptions
from hetpipe_compiler.profiling import run_profile
from hetpipe_compiler.profiling.measure import Effort
from hetpipe_compiler.profiling.run_profile import ProfileOptions, calls_of, profile_calls

MODEL = Path(__file__).parent / "small_model.py"
QUICK = Effort(warmup=1, min_runs=3, max_runs=5, seconds=0.0)


@pytest.fixture(scope="module")
def counted():
    return calls_of(load_workload(MODEL, {}))


def options(**more):
    return ProfileOptions(kind="cpu", effort=QUICK, **more)


def test_each_distinct_operator_once(counted, tmp_path):
    costs, calls = counted
    linears = [cost for cost in costs.values() if cost.key.startswith("aten.linear")]
    assert len(linears) == 2
    assert len({cost.key for cost in linears}) == 1
    assert {cost.key for cost in costs.values() if cost.key} == set(calls)
    profile = profile_calls(calls, tmp_path / "p.json", options())
    assert set(profile.operators) == set(calls)
    assert all(times.skipped is None and times.forward_ms > 0 for times in profile.operators.values())
    assert profile.operators[linears[0].key].backward_ms > 0
    assert load_profile(tmp_path / "p.json") == profile


def test_saved_bytes_are_autograds(counted, tmp_path):
    _, calls = counted
    profile = profile_calls(calls, tmp_path / "p.json", options())
    relu = next(key for key in calls if key.startswith("aten.relu"))
    # relu keeps its result, 4 x 6 x 16 floats.
    assert profile.operators[relu].saved_bytes == 4 * 6 * 16 * 4


def test_interrupted_it_keeps_what_it_has_and_goes_on(counted, tmp_path):
    _, calls = counted
    out = tmp_path / "p.json"
    seen = []

    def stop(done, _all, key):
        seen.append(key)
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile_calls(calls, out, options(on_progress=stop))
    first = load_profile(out)
    assert set(first.operators) == set(seen[:3])
    seen.clear()
    whole = profile_calls(calls, out, options(on_progress=lambda _done, _all, key: seen.append(key)))
    assert not set(seen) & set(first.operators)
    assert set(whole.operators) == set(calls)
    assert {k: whole.operators[k] for k in first.operators} == first.operators
    assert not list(tmp_path.glob(".*"))


def test_what_does_not_fit_is_skipped_and_stays_an_estimate(counted, tmp_path, monkeypatch):
    _, calls = counted
    monkeypatch.setattr(run_profile, "free_bytes", lambda _device: 10_000)
    out = tmp_path / "p.json"
    profile = profile_calls(calls, out, options())
    skipped = {key for key, times in profile.operators.items() if times.skipped}
    assert any(key.startswith("aten.embedding") for key in skipped)
    assert not any(key.startswith("aten.relu") for key in skipped)
    plan = compile(MODEL, two(), tmp_path / "out", options=CompileOptions("NP", 1, weights=False, profiles=(out,))).plan
    shares = [stage.measured_share for stage in plan.virtual_workers[0].stages]
    assert plan.predicted == "profile"
    assert 0 < min(shares) < 1
    assert not all(stage.measured for stage in plan.virtual_workers[0].stages)


def two():
    return Cluster.from_dict({"nodes": [{"name": "n0", "devices": {"cpu": 2}, "link": "loopback"}]})


def test_the_compiler_plans_with_measured_times(counted, tmp_path):
    costs, calls = counted
    out = tmp_path / "p.json"
    profile = profile_calls(calls, out, options())
    # Times that no roofline would say: the first linear's key takes a second.
    slow = next(key for key in calls if key.startswith("aten.linear"))
    profile.operators[slow] = profile.operators[slow].model_copy(update={"forward_ms": 1000.0, "backward_ms": 500.0})
    profile.save(out)
    plan = compile(MODEL, two(), tmp_path / "out", options=CompileOptions("NP", 1, weights=False, profiles=(out,))).plan
    stages = plan.virtual_workers[0].stages
    expected = [
        (profile.operators[c.key].forward_ms, profile.operators[c.key].backward_ms) for c in costs.values() if c.key
    ]
    assert sum(stage.forward_ms for stage in stages) == pytest.approx(sum(f for f, _ in expected))
    assert sum(stage.backward_ms for stage in stages) == pytest.approx(sum(b for _, b in expected))
    assert all(stage.measured and stage.measured_share == 1.0 for stage in stages)
    # The two slow ones are cut apart.
    assert [any(name.startswith("linear") for name in stage.nodes) for stage in stages] == [True, True]


def test_another_model_matches_nothing(counted, tmp_path):
    _, calls = counted
    out = tmp_path / "p.json"
    profile = profile_calls(dict(list(calls.items())[:1]), out, options())
    profile.operators = {"aten.none.default()": next(iter(profile.operators.values()))}
    profile.save(out)
    with pytest.raises(ClusterError) as caught:
        compile(MODEL, two(), tmp_path / "out", options=CompileOptions(weights=False, profiles=(out,)))
    assert caught.value.code == "HP235"


def test_a_profile_of_a_kind_that_is_not_there(counted, tmp_path):
    _, calls = counted
    out = tmp_path / "p.json"
    profile_calls(dict(list(calls.items())[:1]), out, ProfileOptions(kind="titan-w", effort=QUICK))
    with pytest.raises(ClusterError) as caught:
        compile(MODEL, two(), tmp_path / "out", options=CompileOptions(weights=False, profiles=(out,)))
    assert caught.value.code == "HP234"


@pytest.mark.parametrize(("field", "value"), [("kind", "gpu"), ("torch", "0.1"), ("threads", 7), ("device", "abacus")])
def test_a_file_measured_elsewhere_is_not_added_to(counted, tmp_path, field, value):
    _, calls = counted
    out = tmp_path / "p.json"
    one = dict(list(calls.items())[:1])
    profile_calls(one, out, options())
    content = json.loads(out.read_text())
    content[field] = value
    out.write_text(json.dumps(content))
    with pytest.raises(ClusterError) as caught:
        profile_calls(one, out, options())
    assert caught.value.code == "HP232"


@pytest.mark.parametrize(("text", "code"), [("{", "HP230"), ("{}", "HP231"), ('{"format": "x"}', "HP231")])
def test_what_is_no_profile(tmp_path, text, code):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ClusterError) as caught:
        load_profile(tmp_path / "p.json")
    assert caught.value.code == code


def test_of_profiles_of_one_kind_the_last_counts(counted, tmp_path):
    _, calls = counted
    a = profile_calls(calls, tmp_path / "a.json", options())
    b = a.model_copy(deep=True)
    keys = list(calls)
    b.operators = {keys[0]: a.operators[keys[0]].model_copy(update={"forward_ms": 9.0})}
    b.operators[keys[1]] = a.operators[keys[1]].model_copy(update={"skipped": "full", "forward_ms": None})
    both = merged([a, b])["cpu"]
    assert both[keys[0]].forward_ms == 9.0
    assert both[keys[1]] == a.operators[keys[1]]
    assert len(both) == len(calls)


def test_no_such_device():
    for name in ("cuda:99", "tpu", "meta"):
        with pytest.raises(ClusterError) as caught:
            run_profile.usable_device(name)
        assert caught.value.code == "HP233"


def test_threads_are_put_back():
    before = torch.get_num_threads()
    with run_profile.cpu_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
