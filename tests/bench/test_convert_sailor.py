"""Known optima on public profiles: the partitioner must meet them. Skipped where the profiles are not at hand."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from hetpipe_compiler.passes.allocate import Group
from hetpipe_compiler.passes.in_flight import InFlightRule
from hetpipe_compiler.passes.partition import partition

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
EXPECTED = DATA / "expected.json"
CASES = json.loads(EXPECTED.read_text())["unequal_devices_chain"]["cases"] if EXPECTED.is_file() else []


def _converter():
    spec = importlib.util.spec_from_file_location("convert_sailor", ROOT / "bench" / "convert_sailor.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not CASES, reason="the public profiles are not here")
@pytest.mark.parametrize("index", range(max(1, len(CASES))))
def test_known_optimum(index):
    case, convert = CASES[index], _converter()
    chain = convert.sailor_chain(DATA / "sailor", case["model"], list(case["devices"]), case["mbs"], case["tp"])
    cluster = convert.flat_cluster(case["devices"], case["mem_caps_bytes"], 1.25e9 if case["comm"] else None)
    plan = partition(chain, Group(cluster.devices, False), cluster, nm=4, in_flight_rule=InFlightRule(1.0))
    assert plan.bottleneck_ms / 1e3 == pytest.approx(case["bottleneck_s"], rel=1e-6)
    for stage in plan.stages:
        assert stage.memory["total"] <= stage.memory["capacity"]
        if case["mem_caps_bytes"]:
            assert stage.memory["capacity"] == case["mem_caps_bytes"][stage.device.kind.name]
    assert len(plan.stages) + len(plan.unused) == sum(case["devices"].values())
