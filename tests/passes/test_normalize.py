"""Which operators lose their in-place form, and which must not."""

from __future__ import annotations

import pytest
import torch
from graphs import calls, captured
from torch import Tensor
from torch.nn import functional as F

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.passes.normalize import Storages, mutated_arguments, normalize


def operators(then: object) -> list[str]:
    return calls(normalize(captured(then)))


def test_an_in_place_chain_becomes_functional() -> None:
    def then(_: object, h: Tensor) -> Tensor:
        return F.dropout(h.mul_(2).add_(1), 0.5, True, inplace=True)

    assert operators(then) == ["linear.default", "mul.Tensor", "add.Tensor", "dropout.default", "mean.default"]


def test_an_unused_result_still_counts() -> None:
    def then(_: object, h: Tensor) -> Tensor:
        torch.relu_(h)
        return h * 2

    assert operators(then) == ["linear.default", "relu.default", "mul.Tensor", "mean.default"]


def test_names_change_with_the_operator() -> None:
    graph = normalize(captured(lambda _, h: torch.relu_(h))).graph_module.graph
    assert "relu" in [n.name for n in graph.nodes]


def test_a_live_view_keeps_it_in_place() -> None:
    def then(_: object, h: Tensor) -> Tensor:
        row = h[0]
        h.mul_(2)
        return h + row

    assert "mul_.Tensor" in operators(then)


def test_a_write_through_a_view_of_a_live_tensor_stays() -> None:
    def then(_: object, h: Tensor) -> Tensor:
        h = h.clone()
        h[:, 0].mul_(2)
        return h

    assert "mul_.Tensor" in operators(then)


def test_a_view_that_dies_before_does_not_matter() -> None:
    def then(_: object, h: Tensor) -> Tensor:
        total = h.view(-1).sum()
        return h.neg_() + total

    assert "neg.default" in operators(then)


def test_a_twin_without_a_derivative_is_none_where_a_gradient_flows() -> None:
    assert "copy_.default" in operators(lambda module, h: (h + 1).copy_(module.fc2(h)))
    assert "copy_.default" in operators(lambda _, h: torch.zeros(3, 4).copy_(h) + h)
    assert "copy.default" in operators(lambda module, h: torch.zeros(3, 4).copy_(module.state) + h)


def test_another_dtype_would_be_another_result() -> None:
    def then(_: object, h: Tensor) -> Tensor:
        mask = h.detach().clone()
        mask.gt_(0)
        return h * mask

    assert "gt_.Scalar" in operators(then)


def test_buffers_and_the_batch_are_written_in_place_and_buffers_are_marked() -> None:
    def then(module: torch.nn.Module, h: Tensor) -> Tensor:
        module.state[:2].add_(h.detach().mean())
        return h + module.state

    result = normalize(captured(then))
    assert "add_.Tensor" in calls(result)
    assert [(b.name, b.mutated) for b in result.buffers] == [("state", True)]


def test_a_buffer_that_is_only_read_is_not_marked() -> None:
    result = normalize(captured(lambda module, h: h + module.state))
    assert [b.mutated for b in result.buffers] == [False]


def test_writing_a_parameter_is_refused() -> None:
    def then(module: torch.nn.Module, h: Tensor) -> Tensor:
        with torch.no_grad():
            module.fc2.weight.view(-1)[0] = 0
        return module.fc2(h)

    with pytest.raises(WorkloadError) as caught:
        normalize(captured(then))
    assert caught.value.code == "HP117"
    assert "'fc2.weight'" in caught.value.message


def test_a_sparse_gradient_is_refused() -> None:
    def then(module: torch.nn.Module, h: Tensor) -> Tensor:
        return h + F.embedding(h.detach().argmax(-1), module.fc2.weight, sparse=True)

    with pytest.raises(WorkloadError, match="sparse gradient") as caught:
        operators(then)
    assert caught.value.code == "HP125"


def test_what_nobody_reads_goes_but_random_numbers_stay() -> None:
    def then(_: object, h: Tensor) -> Tensor:
        h.exp()
        torch.rand(2)
        return h

    assert operators(then) == ["linear.default", "rand.default", "mean.default"]


def test_an_idle_conversion_goes_and_a_real_one_stays() -> None:
    def then(_: object, h: Tensor) -> Tensor:
        return h.to(h.device).float().to(torch.float64)

    assert [c for c in operators(then) if c.startswith("to.")] == ["to.dtype"]


def test_under_autocast_no_conversion_is_idle() -> None:
    def then(module: torch.nn.Module, h: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module.fc2(h).float()

    assert "to.dtype" in operators(then)


def test_a_number_in_a_tensor_is_no_write() -> None:
    result = normalize(captured(lambda _, h: h * torch.tensor(2.0)))
    assert not [n for n in result.graph_module.graph.nodes if mutated_arguments(n)]


def test_batch_norm_writes_its_statistics_only_in_train_mode() -> None:
    def norm(training: bool) -> list[list[str]]:
        def then(module: torch.nn.Module, h: Tensor) -> Tensor:
            return F.batch_norm(h, module.state, module.state + 1, training=training)

        graph = captured(then).graph_module.graph
        return [[str(a) for a in mutated_arguments(n)] for n in graph.nodes if "batch_norm" in str(n.target)]

    assert norm(False) == [[]]
    assert [len(written) for written in norm(True)] == [2]


def test_lists_written_in_place_are_seen() -> None:
    def then(_: object, h: Tensor) -> Tensor:
        parts = [h * 1, h * 2]
        torch._foreach_add_(parts, 1.0)
        return parts[0] + parts[1]

    graph = captured(then).graph_module.graph
    written = [len(mutated_arguments(n)) for n in graph.nodes if "_foreach_add_" in str(n.target)]
    assert written == [2]


def test_storages_follow_views_and_reads_of_one_attribute() -> None:
    def then(module: torch.nn.Module, h: Tensor) -> Tensor:
        a, b = h.chunk(2, -1)
        return a.t().reshape(-1).sum() + b + module.state.view(2, 2)[0]

    graph = captured(then).graph_module.graph
    storages = Storages(graph)
    by = {n.name: n for n in graph.nodes}
    assert storages.of(by["linear"]) is storages.of(by["t"])
    state = next(n for n in graph.nodes if n.target == "state")
    assert storages.of(state) is storages.of(by["view"])
    assert storages.of(state) is not storages.of(by["linear"])


def test_a_view_of_unwritten_memory_becomes_a_reshape() -> None:
    def then(_: object, h: Tensor) -> Tensor:
        written = h * 2
        view = written.view(-1)
        written.add_(1)
        return h.view(2, -1).sum() + view

    names = [name for name in operators(then) if name.startswith(("view", "reshape"))]
    assert names == ["view.default", "reshape.default"]


def test_what_may_share_memory_elsewhere_counts_as_sharing() -> None:
    """Here the transpose is copied; where kernels lay out their results otherwise it may be contiguous as it is."""
    graph = captured(lambda _, h: h.t().contiguous() + 1).graph_module.graph
    storages = Storages(graph)
    by = {n.name: n for n in graph.nodes}
    assert by["contiguous"].meta["val"].untyped_storage()._cdata != by["t"].meta["val"].untyped_storage()._cdata
    assert storages.of(by["contiguous"]) is storages.of(by["t"])
