"""Policies: the paper's table exactly, and sane groups on any cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpipe_compiler.devices.catalogue import load_catalogue
from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.passes.allocate import POLICIES, Allocation, allocate

LETTERS = {"titan-v": "V", "titan-rtx": "R", "rtx-2060": "G", "quadro-p4000": "Q"}


def cluster_of(*nodes: dict[str, int]) -> Cluster:
    specs: list[dict[str, Any]] = [
        {"name": f"n{i}", "devices": devices, "link": "pcie3-x16"} for i, devices in enumerate(nodes)
    ]
    return Cluster.from_dict({"nodes": specs, "network": "infiniband-fdr"})


def paper_cluster() -> Cluster:
    return cluster_of(*({kind: 4} for kind in LETTERS))


def letters(allocation: Allocation) -> str:
    return " ".join("".join(LETTERS[d.kind.name] for d in group.devices) for group in allocation.groups)


def ids(allocation: Allocation) -> list[list[str]]:
    return [[device.id for device in group.devices] for group in allocation.groups]


def powers(allocation: Allocation) -> list[float]:
    return [sum(d.kind.fp32_tflops for d in group.devices) for group in allocation.groups]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("NP", "VVVV RRRR GGGG QQQQ"), ("ED", "VRGQ VRGQ VRGQ VRGQ"), ("HD", "VVQQ VVQQ RRGG RRGG")],
)
def test_the_papers_table(policy: str, expected: str) -> None:
    allocation = allocate(paper_cluster(), policy)
    assert letters(allocation) == expected
    assert allocation.policy == policy
    assert allocation.unused == ()
    assert not any(group.ordered for group in allocation.groups)
    assert allocate(paper_cluster(), policy.lower()) == allocation


def test_ed_takes_the_ith_device_of_every_node() -> None:
    assert ids(allocate(paper_cluster(), "ED")) == [[f"n{node}:{i}" for node in range(4)] for i in range(4)]


def test_ed_with_unequal_nodes_balances_power() -> None:
    # Two virtual workers come out equal; three or four would not.
    allocation = allocate(cluster_of({"titan-v": 4}, {"titan-v": 4}, {"rtx-2060": 2}), "ED")
    assert ids(allocation) == [["n0:0", "n0:2", "n1:0", "n1:2", "n2:0"], ["n0:1", "n0:3", "n1:1", "n1:3", "n2:1"]]


def test_ed_does_not_collapse_into_one_long_pipeline() -> None:
    # min(8, 1) would give a single virtual worker of nine stages.
    assert len(allocate(cluster_of({"h100": 8}, {"t4": 1}), "ED").groups) >= 3


def test_ed_with_kinds_mixed_inside_nodes_balances_power() -> None:
    allocation = allocate(cluster_of({"titan-v": 2, "rtx-2060": 2}, {"titan-v": 2, "rtx-2060": 2}), "ED")
    assert len(set(powers(allocation))) == 1
    assert [len(group) for group in ids(allocation)] == [2, 2, 2, 2]


def test_hd_keeps_devices_of_a_node_together() -> None:
    allocation = allocate(cluster_of({"titan-v": 2, "rtx-2060": 2}, {"titan-v": 2, "rtx-2060": 2}), "HD")
    assert ids(allocation) == [["n0:0", "n0:1", "n0:2", "n0:3"], ["n1:0", "n1:1", "n1:2", "n1:3"]]


def test_hd_leaves_the_middle_of_three_kinds_alone() -> None:
    allocation = allocate(cluster_of({"titan-rtx": 4}, {"titan-v": 4}, {"quadro-p4000": 4}), "HD")
    assert letters(allocation) == "RRQQ RRQQ VVVV"


def test_hd_of_one_kind_is_np() -> None:
    cluster = cluster_of({"t4": 4}, {"t4": 4})
    assert allocate(cluster, "HD").groups == allocate(cluster, "NP").groups


kind_names = st.sampled_from(list(load_catalogue().kinds))
node_shapes = st.dictionaries(kind_names, st.integers(1, 5), min_size=1, max_size=3)


@pytest.mark.parametrize("policy", POLICIES)
@given(nodes=st.lists(node_shapes, min_size=1, max_size=5))
def test_every_device_is_used_once_and_no_group_is_empty(policy: str, nodes: list[dict[str, int]]) -> None:
    cluster = cluster_of(*nodes)
    allocation = allocate(cluster, policy)
    used = [device for group in ids(allocation) for device in group]
    assert sorted(used) == sorted(device.id for device in cluster.devices)
    assert all(ids(allocation))
    assert allocation.unused == ()
    order = [device.id for device in cluster.devices]
    assert all(group == sorted(group, key=order.index) for group in ids(allocation))
    assert allocate(cluster_of(*nodes), policy) == allocation


@given(shape=st.lists(kind_names, min_size=1, max_size=5), count=st.integers(1, 6))
def test_ed_gives_equal_workers_when_nodes_are_pure_and_of_one_size(shape: list[str], count: int) -> None:
    groups = ids(allocate(cluster_of(*({kind: count} for kind in shape)), "ED"))
    assert groups == [[f"n{node}:{i}" for node in range(len(shape))] for i in range(count)]


def test_groups_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("virtual_workers: [[n3:0, n0:0], [n1:2]]\nordered: true\n")
    allocation = allocate(paper_cluster(), path)
    assert ids(allocation) == [["n3:0", "n0:0"], ["n1:2"]]
    assert [group.ordered for group in allocation.groups] == [True, True]
    assert allocation.policy == "mine.yaml"
    assert len(allocation.unused) == 13
    assert allocation.unused[0].id == "n0:1"
    assert allocate(paper_cluster(), str(path)) == allocation


def test_groups_are_unordered_unless_said(tmp_path: Path) -> None:
    path = tmp_path / "mine"  # any name, if it is a file
    path.write_text("virtual_workers: [[n3:0, n0:0]]")
    assert not allocate(paper_cluster(), path).groups[0].ordered
