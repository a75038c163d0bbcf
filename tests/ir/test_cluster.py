"""`Cluster`: what a cluster file means, and that it survives being written down."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hetpipe_compiler.devices.catalogue import load_catalogue
from hetpipe_compiler.ir.cluster import SAME_DEVICE, Cluster, Emulate, Link

MIXED = """
name: mixed
nodes:
  - {name: n0, devices: {titan-v: 2, my-card: 1}, link: pcie3-x16}
  - name: n1
    devices: [my-card, {titan-v: 1}, my-card]
    link: {bandwidth_gb_s: 12.0, latency_us: 6}
    address: 10.0.0.2
network: infiniband-fdr
kinds:
  my-card: {memory_gb: 8, fp32_tflops: 5.3, memory_bandwidth_gb_s: 243}
  titan-v: {memory_gib: 10}
emulate: null
"""


def load(text: str) -> Cluster:
    return Cluster.from_dict(yaml.safe_load(text))


def test_devices_are_numbered_in_file_order() -> None:
    cluster = load(MIXED)
    assert [(d.id, d.kind.name) for d in cluster.devices] == [
        ("n0:0", "titan-v"),
        ("n0:1", "titan-v"),
        ("n0:2", "my-card"),
        ("n1:0", "my-card"),
        ("n1:1", "titan-v"),
        ("n1:2", "my-card"),
    ]
    assert [kind.name for kind in cluster.kinds()] == ["titan-v", "my-card"]
    assert cluster.device("n1:1").node == "n1"
    assert cluster.node("n1").address == "10.0.0.2"
    assert cluster.node("n0").address is None


def test_a_link_is_the_nodes_inside_and_the_network_between() -> None:
    cluster = load(MIXED)
    a, b, c, d = (cluster.device(name) for name in ("n0:0", "n0:1", "n1:0", "n1:1"))
    assert cluster.link_between(a, b) == Link("pcie3-x16", 15.75, 10.0)
    assert cluster.link_between(a, c) == cluster.network == Link("infiniband-fdr", 6.82, 5.0)
    assert cluster.link_between(c, d) == Link("12 GB/s, 6 us", 12.0, 6.0)
    assert cluster.link_between(a, a) == SAME_DEVICE
    assert SAME_DEVICE.ms(10**12) == 0.0


def test_link_time_is_latency_plus_bytes_over_bandwidth() -> None:
    link = Link("x", bandwidth_gb_s=2.0, latency_us=500.0)
    assert link.ms(0) == 0.0
    assert link.ms(4_000_000) == pytest.approx(0.5 + 2.0)
    assert Link("free", math.inf, 0.0).ms(10**15) == 0.0


def test_own_kinds_take_defaults_and_overrides_change_single_figures() -> None:
    titan, own = load(MIXED).kinds()
    known, defaults = load_catalogue().kinds["titan-v"], load_catalogue().defaults
    assert titan.memory_bytes == 10 * 2**30
    assert (titan.fp32_tflops, titan.reserve_bytes) == (known.fp32_tflops, known.reserve_bytes)
    assert titan.source == f"{known.source}; changed in the cluster file: memory_bytes"
    assert own.memory_bytes == 8 * 10**9
    assert own.compute_efficiency == defaults["compute_efficiency"]
    assert own.reserve_bytes == 600 * 2**20
    assert (own.tf32_tflops, own.bf16_tflops, own.fp16_tflops) == (None, None, None)


def test_null_removes_a_rate_that_the_catalogue_has() -> None:
    cluster = Cluster.from_dict({"nodes": [one_node(kind="t4")], "kinds": {"t4": {"fp16_tflops": None}}})
    assert cluster.kinds()[0].fp16_tflops is None
    assert load_catalogue().kinds["t4"].fp16_tflops == 65


def one_node(name: str = "n0", kind: str = "cpu", count: int = 1, **more: Any) -> dict[str, Any]:
    return {"name": name, "devices": {kind: count}, "link": "loopback"} | more


@pytest.mark.parametrize(
    ("figures", "memory_bytes"),
    [({"memory_gb": 8}, 8 * 10**9), ({"memory_gib": 8}, 2**33), ({"memory_mib": 1}, 2**20), ({"memory_bytes": 7}, 7)],
)
def test_units_of_sizes(figures: dict[str, float], memory_bytes: int) -> None:
    kinds = {"k": {**figures, "reserve_mib": 0, "fp32_tflops": 1, "memory_bandwidth_gb_s": 1}}
    assert Cluster.from_dict({"nodes": [one_node(kind="k")], "kinds": kinds}).kinds()[0].memory_bytes == memory_bytes


def test_one_node_needs_no_network_and_no_name() -> None:
    cluster = Cluster.from_dict({"nodes": [one_node()]})
    assert cluster.network == cluster.nodes[0].link
    assert cluster.name == "cluster"
    assert cluster.emulate is None


def test_emulate() -> None:
    assert Cluster.from_dict({"nodes": [one_node()], "emulate": {}}).emulate == Emulate(1.0)
    assert Cluster.from_dict({"nodes": [one_node()], "emulate": {"time_scale": 0.25}}).emulate == Emulate(0.25)


@pytest.mark.parametrize("text", [".inf", "'.inf'", "inf"])
def test_an_infinite_link_survives_json(text: str) -> None:
    cluster = load(f"nodes: [{{name: n, devices: {{cpu: 2}}, link: {{bandwidth_gb_s: {text}}}}}]")
    assert math.isinf(cluster.network.bandwidth_gb_s)
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict(), allow_nan=False))) == cluster


def test_numbers_that_yaml_takes_for_text_are_numbers() -> None:
    # YAML 1.1 wants 1.0e+3; people write 1e3.
    cluster = load("nodes: [{name: n, devices: {cpu: 2}, link: {bandwidth_gb_s: 1e3, latency_us: 2e-1}}]")
    assert cluster.network == Link("1000 GB/s, 0.2 us", 1000.0, 0.2)


def test_to_dict_round_trips_whatever_the_catalogue_says_later(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = load(MIXED)
    content = json.loads(json.dumps(cluster.to_dict()))
    empty = type(load_catalogue())(kinds={}, links={}, link_sources={}, defaults={})
    monkeypatch.setattr("hetpipe_compiler.ir.cluster_file.load_catalogue", lambda: empty)
    assert Cluster.from_dict(content) == cluster


counts = st.integers(1, 4)
kind_names = st.sampled_from(list(load_catalogue().kinds))
link_names = st.sampled_from(list(load_catalogue().links))
node_specs = st.fixed_dictionaries(
    {
        "devices": st.lists(st.dictionaries(kind_names, counts, min_size=1, max_size=2), min_size=1, max_size=3),
        "link": link_names,
    },
    optional={"address": st.just("host")},
)


@given(st.lists(node_specs, min_size=1, max_size=4), link_names, st.sampled_from([None, {"time_scale": 2.0}]))
def test_any_cluster_round_trips(nodes: list[dict[str, Any]], network: str, emulate: dict[str, float] | None) -> None:
    named = [{"name": f"n{i}"} | node for i, node in enumerate(nodes)]
    cluster = Cluster.from_dict({"nodes": named, "network": network, "emulate": emulate})
    again = Cluster.from_dict(json.loads(json.dumps(cluster.to_dict())))
    assert again == cluster
    assert again.digest() == cluster.digest()
    assert len(cluster.devices) == sum(sum(item.values()) for node in nodes for item in node["devices"])


def test_digest_ignores_spelling_and_sees_every_figure() -> None:
    plain = load(MIXED)
    respelled = load(
        MIXED.replace("{memory_gb: 8, fp32_tflops: 5.3,", "{fp32_tflops: 5.3, memory_bytes: 8000000000,")
        .replace("{titan-v: 2, my-card: 1}", "[titan-v, titan-v, my-card]")
        .replace("emulate: null", "# a comment")
    )
    assert respelled.digest() == plain.digest()
    for old, new in [("5.3", "5.4"), ("my-card: 1", "my-card: 2"), ("latency_us: 6", "latency_us: 7"), ("fdr", "hdr")]:
        assert load(MIXED.replace(old, new)).digest() != plain.digest()
    assert load(MIXED.replace("243}", "243, source: a friend}")).digest() == plain.digest()


def test_load_reads_a_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(MIXED)
    assert Cluster.load(path) == Cluster.load(str(path)) == load(MIXED)


def test_loading_does_not_import_torch(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(MIXED)
    code = f"""
import sys
from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.passes.allocate import allocate
allocate(Cluster.load({str(path)!r}), "ED")
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
