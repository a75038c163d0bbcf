"""The catalogue: every entry is complete, says where it comes from, and the paper's cards have the paper's figures."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hetpipe_compiler.devices.catalogue import load_catalogue
from hetpipe_compiler.ir.config_file import parse_yaml

# The paper's four cards.
PAPER = {
    "titan-v": (5120, 1455, 12, 653, 14.9),
    "titan-rtx": (4608, 1770, 24, 672, 16.3),
    "rtx-2060": (1920, 1680, 6, 336, 6.45),
    "quadro-p4000": (1792, 1480, 8, 243, 5.3),
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_cards(name: str) -> None:
    cores, boost_mhz, memory_gib, bandwidth_gb_s, fp32_tflops = PAPER[name]
    kind = load_catalogue().kinds[name]
    assert kind.memory_bytes == memory_gib * 2**30
    assert (kind.memory_bandwidth_gb_s, kind.fp32_tflops) == (bandwidth_gb_s, fp32_tflops)
    # Two operations (a fused multiply-add) a core and cycle.
    assert kind.fp32_tflops == pytest.approx(cores * boost_mhz * 2e-6, rel=0.01)


def test_promised_names() -> None:
    catalogue = load_catalogue()
    assert " ".join(catalogue.kinds) == (
        "titan-v titan-rtx rtx-2060 quadro-p4000 gtx-1080-ti rtx-3090 rtx-4090 t4 v100-16 v100-32 a100-40 a100-80 "
        "l4 h100 h200 cpu"
    )
    assert " ".join(catalogue.links) == (
        "pcie3-x16 pcie4-x16 pcie5-x16 nvlink2 nvlink3 nvlink4 nvlink ethernet-10g ethernet-25g ethernet-100g "
        "infiniband-fdr infiniband-hdr infiniband-ndr loopback"
    )


def test_every_figure_has_a_source_and_is_plausible() -> None:
    catalogue = load_catalogue()
    for kind in catalogue.kinds.values():
        assert len(kind.source) > 20, kind.name
        assert kind.reserve_bytes < kind.memory_bytes / 5, kind.name
        for rate in (kind.tf32_tflops, kind.bf16_tflops, kind.fp16_tflops):
            assert rate is None or rate >= kind.fp32_tflops, kind.name
    for link in catalogue.links:
        assert len(catalogue.link_sources[link]) > 20, link


def test_gpus_share_one_pair_of_efficiencies() -> None:
    gpus = [kind for kind in load_catalogue().kinds.values() if kind.name != "cpu"]
    assert {(g.compute_efficiency, g.memory_efficiency, g.launch_overhead_us) for g in gpus} == {(0.55, 0.75, 8.0)}
    # A context and its libraries, and at least 1 % that the driver keeps.
    assert all(g.reserve_bytes >= 600 * 2**20 + g.memory_bytes // 100 for g in gpus)
    assert load_catalogue().kinds["cpu"].reserve_bytes == 0


@pytest.mark.parametrize(
    ("name", "gigatransfers", "lanes", "code"),
    [
        ("pcie3-x16", 8, 16, 128 / 130),
        ("pcie4-x16", 16, 16, 128 / 130),
        ("pcie5-x16", 32, 16, 128 / 130),
        ("infiniband-fdr", 14.0625, 4, 64 / 66),
    ],
)
def test_link_rates_follow_from_their_standards(name: str, gigatransfers: float, lanes: int, code: float) -> None:
    assert load_catalogue().links[name].bandwidth_gb_s == pytest.approx(gigatransfers * lanes * code / 8, rel=1e-3)


def test_plain_nvlink_is_the_slowest_generation() -> None:
    links = load_catalogue().links
    assert links["nvlink"].bandwidth_gb_s == min(links[f"nvlink{i}"].bandwidth_gb_s for i in (2, 3, 4))


def test_our_loader_reads_merge_keys_as_yaml_does() -> None:
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n"
    assert parse_yaml(text, "t.yaml") == yaml.safe_load(text) == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}


def test_the_tables_in_the_documentation_are_these_figures() -> None:
    text = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    catalogue = load_catalogue()
    for kind in catalogue.kinds.values():
        memory = f"{kind.memory_bytes / 2**30:.3g} GiB" if kind.name != "cpu" else "4 GB"
        rates = [kind.fp32_tflops, kind.tf32_tflops, kind.bf16_tflops, kind.fp16_tflops]
        shown = [f"{rate:g}" if rate is not None else "-" for rate in rates]
        cells = [kind.name, memory, f"{kind.reserve_bytes // 2**20} MiB", *shown, f"{kind.memory_bandwidth_gb_s:g}"]
        assert f"| {' | '.join(cells)} |" in text
    for name, link in catalogue.links.items():
        assert f"| {name} | {link.bandwidth_gb_s:g} | {link.latency_us:g} |" in text
