"""Known optima on public profiles: the partitioner must meet them. Skipped where the profiles are not at hand."""

from __future__ import annotations

import json

import pytest
from converters import DATA, load

from hetpipe_compiler.passes.allocate import Group
from hetpipe_compiler.passes.in_flight import InFlightRule
from hetpipe_compiler.passes.partition import partition

EXPECTED = DATA / "expected.json"
CASES = json.loads(EXPECTED.read_text())["unequal_devices_chain"]["cases"] if EXPECTED.is_file() else []


@pytest.mark.skipif(not CASES, reason="the public profiles are not here")
@pytest.mark.parametrize("index", range(max(1, len(CASES))))
def test_known_optimum(index):
    case, convert = CASES[index], load("convert_sailor")
    chain = convert.sailor_chain(DATA / "sailor", case["model"], list(case["devices"]), case["mbs"], case["tp"])
    cluster = convert.flat_cluster(case["devices"], case["mem_caps_bytes"], 1.25e9 if case["comm"] else None)
    plan = partition(chain, Group(cluster.devices, False), cluster, nm=4, in_flight_rule=InFlightRule(1.0))
    assert plan.bottleneck_ms / 1e3 == pytest.approx(case["bottleneck_s"], rel=1e-6)
    for stage in plan.stages:
        assert stage.memory["total"] <= stage.memory["capacity"]
        if case["mem_caps_bytes"]:
            assert stage.memory["capacity"] == case["mem_caps_bytes"][stage.device.kind.name]
    assert len(plan.stages) + len(plan.unused) == sum(case["devices"].values())
