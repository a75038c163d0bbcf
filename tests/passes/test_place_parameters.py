"""Placement of parameters on servers, and the servers' memory."""

from __future__ import annotations

import pytest

from hetpipe_compiler.passes.place_parameters import place_parameters, server_memory_bytes

NODES = ["a", "b", "c"]
SIZES = {"conv.weight": 90, "conv.bias": 10, "fc1.weight": 500, "fc1.bias": 5, "fc2.weight": 30, "scale": 1}


def everywhere(node: str) -> dict[str, str]:
    return dict.fromkeys(SIZES, node)


def test_local_follows_the_stages_when_they_agree() -> None:
    # As under ED with equal cuts: stage i of both virtual workers sits on the same node.
    owner = {name: "a" if name.startswith("conv") else "c" for name in SIZES}
    assert place_parameters([owner, owner], SIZES, NODES, "local") == owner


def test_local_goes_where_most_virtual_workers_have_it() -> None:
    placed = place_parameters([everywhere("a"), everywhere("b"), everywhere("b")], SIZES, NODES, "local")
    assert placed == everywhere("b")


def test_local_shares_the_load_when_every_worker_is_elsewhere() -> None:
    # As under NP. By bytes: the large fc1.weight keeps its node free of all that follows.
    placed = place_parameters([everywhere(node) for node in NODES], SIZES, NODES, "local")
    assert placed == {
        "conv.weight": "a",
        "conv.bias": "b",
        "fc1.weight": "c",
        "fc1.bias": "b",
        "fc2.weight": "b",
        "scale": "b",
    }


def test_local_never_uses_a_node_that_holds_the_parameter_in_no_worker() -> None:
    placed = place_parameters([everywhere("a"), everywhere("c")], SIZES, NODES, "local")
    assert set(placed.values()) == {"a", "c"}


def test_round_robin_hands_out_layers_not_single_parameters() -> None:
    assert place_parameters([everywhere("a")], SIZES, NODES, "round-robin") == {
        "conv.weight": "a",
        "conv.bias": "a",
        "fc1.weight": "b",
        "fc1.bias": "b",
        "fc2.weight": "c",
        "scale": "a",
    }


def test_the_order_of_parameters_is_kept() -> None:
    for placement in ("local", "round-robin"):
        assert list(place_parameters([everywhere("a")], SIZES, NODES, placement)) == list(SIZES)


@pytest.mark.parametrize(
    ("n_workers", "staleness", "reproducible", "copies"),
    [(4, 4, False, 1), (1, 0, True, 1), (2, 0, True, 2), (4, 0, True, 4), (4, 4, True, 5 + 15)],
)
def test_server_memory(n_workers: int, staleness: int, reproducible: bool, copies: int) -> None:
    assert server_memory_bytes(n_workers, 1000, staleness, reproducible) == 1000 * copies
