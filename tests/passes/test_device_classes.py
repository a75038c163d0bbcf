"""Classes of interchangeable devices, and the tails of pipelines made of them."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
from planner_cases import FAST, SLOW, chain_of, cluster_of, kind

from hetpipe_compiler.ir.cluster import Link
from hetpipe_compiler.passes.allocate import Group
from hetpipe_compiler.passes.device_classes import device_classes, tails

A, B = kind("a"), kind("b")
CHAIN = chain_of({"a": [1.0] * 9, "b": [1.0] * 9})


def test_same_kind_on_the_same_node_is_one_class():
    cluster = cluster_of([[A, B, A], [A]], FAST, SLOW)
    classes = device_classes(Group(cluster.devices, False), cluster, CHAIN)
    assert [[d.id for d in members] for members in classes.members] == [["n0:0", "n0:2"], ["n1:0"], ["n0:1"]]
    assert [link.name for link in classes.links] == ["fast", "slow"]
    assert classes.link_between.tolist() == [[0, 1, 0], [1, -1, 1], [0, 1, -1]]
    assert [d.id for d in classes.assign((0, 2, 0))] == ["n0:0", "n0:1", "n0:2"]


def test_ordered_groups_keep_each_device_apart():
    cluster = cluster_of([[A, A]], FAST, SLOW)
    classes = device_classes(Group(cluster.devices[::-1], True), cluster, CHAIN)
    assert [[d.id for d in members] for members in classes.members] == [["n0:1"], ["n0:0"]]


def test_key_tells_what_matters_and_no_more():
    cluster = cluster_of([[A, A], [B, B]], FAST, SLOW)
    d = cluster.devices

    def key(*devices, within=cluster):
        return device_classes(Group(devices, False), within, CHAIN).key

    assert key(d[0], d[2]) == key(d[3], d[1])
    assert key(d[0], d[1]) != key(d[2], d[3])
    assert key(d[0], d[2]) != key(d[0], d[1])
    slower = cluster_of([[A, A], [B, B]], FAST, Link("net", 0.5, 20.0))
    assert key(d[0], d[2]) != key(*(slower.devices[i] for i in (0, 2)), within=slower)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("blocks", [9, 2])
def test_tails_spell_every_order_of_every_subset_once(ordered, blocks):
    cluster = cluster_of([[A, A], [A, B]], FAST, SLOW)
    classes = device_classes(Group(cluster.devices, ordered), cluster, CHAIN)
    tree = tails(classes, blocks)

    def spell(tail):
        first = (int(tree.first_class[tail]),)
        rest = tree.successors[tree.starts[tail] : tree.starts[tail + 1]]
        assert all(tree.stages[after] == tree.stages[tail] - 1 for after in rest)
        return [first + word for after in rest for word in spell(after)] if len(rest) else [first]

    words = Counter(word for tail in range(len(tree)) for word in spell(tail))
    names = [index for index, members in enumerate(classes.members) for _ in members]
    expected = {word for count in range(1, min(4, blocks) + 1) for word in permutations(names, count)}
    if ordered:
        expected = {word for word in expected if list(word) == sorted(word)}
    assert words == dict.fromkeys(expected, 1)
