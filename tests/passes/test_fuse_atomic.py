"""The smallest pieces: what may never be separated, and the order of the rest."""

from __future__ import annotations

import cProfile
from collections.abc import Callable
from pathlib import Path

import models
import pytest
import torch
from graphs import captured
from kinds import MODELS
from torch import Tensor, nn

from hetpipe_compiler.frontend.capture import capture
from hetpipe_compiler.frontend.load import LoadedWorkload, load_workload
from hetpipe_compiler.ir.captured import Captured
from hetpipe_compiler.ir.workload import Workload
from hetpipe_compiler.passes.fuse_atomic import Components, fuse_atomic
from hetpipe_compiler.passes.normalize import mutated_arguments, normalize


def fused(then: Callable[..., Tensor]) -> tuple[Captured, Components]:
    graph = normalize(captured(then))
    return graph, fuse_atomic(graph)


def test_plain_operators_stay_apart() -> None:
    _, components = fused(lambda module, h: module.fc2(torch.relu(h)))
    assert components.nodes == (("linear",), ("relu",), ("linear_1",), ("mean",))


def test_tuples_stay_with_their_items() -> None:
    _, components = fused(lambda _, h: h.chunk(2, -1)[1])
    assert any({"chunk", "getitem_1"} <= set(names) for names in components.nodes)


def test_what_touches_a_written_tensor_stays_together() -> None:
    def then(_: object, h: Tensor) -> Tensor:
        h = h.clone()
        row = h[0]
        other = torch.sin(h * 1)
        h.mul_(2)
        return (h + row) * other

    graph, components = fused(then)
    (home,) = (names for names in components.nodes if "mul_" in names)
    assert {"clone", "select", "mul_", "add"} <= set(home)
    position = {n.name: at for at, n in enumerate(graph.graph_module.graph.nodes)}
    assert list(home) == sorted(home, key=position.__getitem__), "program order inside"


def test_what_no_value_ties_goes_with_its_module() -> None:
    """The count of batches stands between two operators of other modules, and belongs to neither."""

    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(self.first(x))).mean()

    workload = Workload(Normalised, (torch.ones(8, 4),), lambda p: torch.optim.SGD(p, lr=0.1), targets=0)
    graph = normalize(capture(LoadedWorkload(workload, Path(__file__), {})))
    assert fuse_atomic(graph).nodes == (("linear",), ("add_", "batch_norm"), ("linear_1",), ("mean",))


def test_constants_are_in_no_component() -> None:
    def then(_: object, h: Tensor) -> Tensor:
        steps = torch.arange(4) * 2
        return h * steps + steps.sum()

    _, components = fused(then)
    assert {"arange", "mul", "sum_1"} <= components.constants
    assert not {"arange", "mul"} & {n for names in components.nodes for n in names}


def test_what_derives_from_a_written_constant_is_none() -> None:
    def then(_: object, h: Tensor) -> Tensor:
        mask = torch.zeros(4)
        mask[:2] = 1
        return h * (mask + 1)

    _, components = fused(then)
    assert not {"zeros", "add"} & components.constants


def test_random_numbers_are_drawn_once() -> None:
    _, components = fused(lambda _, h: h * torch.rand(4))
    assert "rand" not in components.constants


def test_strides_do_not_travel() -> None:
    _, components = fused(lambda _, h: torch.relu(h).as_strided((4, 3), (1, 4)))
    assert any({"relu", "as_strided"} <= set(names) for names in components.nodes)


@pytest.mark.parametrize("name", models.KINDS)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_every_order_is_a_legal_execution(name: str) -> None:
    graph = normalize(capture(load_workload(MODELS, {"name": name}), opaque=models.OPAQUE.get(name, ())))
    components = fuse_atomic(graph)
    home = {n: at for at, names in enumerate(components.nodes) for n in names}
    nodes = {n.name: n for n in graph.graph_module.graph.nodes}
    listed = [n for names in components.nodes for n in names]
    assert len(listed) == len(set(listed))
    assert set(listed) | components.constants == {n for n, v in nodes.items() if v.op not in ("placeholder", "output")}
    for name_, at in home.items():
        for source in nodes[name_].all_input_nodes:
            assert home.get(source.name, at) <= at, f"{source.name} comes after {name_}"
        for written in mutated_arguments(nodes[name_]):
            assert home.get(written.name, at) == at, "a write stays with what it writes into"
    assert home[graph.loss_node().name] == len(components.nodes) - 1


def test_the_work_grows_with_the_graph_and_no_faster() -> None:
    def calls(layers: int) -> int:
        def then(_: object, h: Tensor) -> Tensor:
            for _ in range(layers):
                h = h + torch.tanh(h)
            return h

        graph = normalize(captured(then))
        profile = cProfile.Profile()
        profile.runcall(fuse_atomic, graph)
        return sum(entry.callcount for entry in profile.getstats())

    assert calls(400) < 6 * calls(100)
