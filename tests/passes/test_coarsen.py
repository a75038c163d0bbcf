"""From components to a chain: what it costs, what crosses, what stays."""

from __future__ import annotations

import models
import numpy as np
import pytest
import torch
from graphs import captured
from kinds import MODELS, cluster_of

from hetpipe_compiler.frontend.capture import capture
from hetpipe_compiler.frontend.load import load_workload
from hetpipe_compiler.ir.blocks import BlockChain
from hetpipe_compiler.ir.captured import Captured
from hetpipe_compiler.ir.costs import NodeCost
from hetpipe_compiler.passes.annotate_cost import count_costs
from hetpipe_compiler.passes.coarsen import build_chain
from hetpipe_compiler.passes.fuse_atomic import Components, fuse_atomic
from hetpipe_compiler.passes.multilevel import shorten_chain
from hetpipe_compiler.passes.normalize import normalize

KINDS = cluster_of(1).kinds()


def chain_of(graph: Captured, max_blocks: int = 256) -> tuple[BlockChain, dict[str, NodeCost], Components]:
    graph = normalize(graph)
    costs, components = count_costs(graph), fuse_atomic(graph)
    chain = build_chain(graph, costs, components.nodes, KINDS, name="m", optimizer_factor=1.0)
    return shorten_chain(chain, max_blocks), costs, components


def of_kind(name: str, max_blocks: int = 256) -> tuple[BlockChain, dict[str, NodeCost], Components]:
    return chain_of(capture(load_workload(MODELS, {"name": name})), max_blocks)


def test_a_small_model_keeps_a_block_for_each_component() -> None:
    chain, costs, components = of_kind("BranchyDAG")
    assert [b.nodes for b in chain.blocks] == list(components.nodes)
    (kind,) = KINDS
    expected = [sum(costs[n].forward_ms(kind) for n in b.nodes) for b in chain.blocks]
    assert np.allclose(chain.forward_ms["titan-v"], expected)


@pytest.mark.parametrize("blocks", [1, 2, 7, 30])
def test_coarsening_keeps_costs_and_nodes(blocks: int) -> None:
    chain, _, components = of_kind("BranchyDAG", blocks)
    fine, _, _ = of_kind("BranchyDAG")
    assert len(chain) == blocks
    assert sorted(n for b in chain.blocks for n in b.nodes) == sorted(n for names in components.nodes for n in names)
    for kind in chain.forward_ms:
        assert chain.forward_ms[kind].sum() == pytest.approx(fine.forward_ms[kind].sum())
        assert chain.backward_ms[kind].sum() == pytest.approx(fine.backward_ms[kind].sum())
    assert sum(s.bytes for s in chain.saved) == sum(s.bytes for s in fine.saved)
    assert sum(p.bytes for p in chain.parameters) == sum(p.bytes for p in fine.parameters)


@pytest.mark.parametrize("name", ["BigVocab"])
def test_an_embedding_reads_some_rows_of_its_table_and_the_head_all(name: str) -> None:
    chain, costs, _ = of_kind(name)
    table = 4096 * models.WIDTH * 4
    first, *_, head = [cost for name, cost in costs.items() if name.startswith(("embedding", "linear"))]
    assert sum(work.bytes for work in first.forward) < table / 10
    assert sum(work.bytes for work in head.forward) > table
    assert [p.bytes for p in chain.parameters if p.bytes >= table] == [table, table]


def test_what_crosses_under_autocast_weighs_what_it_is_sent_in() -> None:
    chain, costs, _ = of_kind("Autocast")
    values = {v.name: v for v in chain.values}
    for name, width in (("linear", 4), ("linear_1", 2)):
        shape = costs[name].shape
        assert shape is not None
        assert (values[name].forward_bytes, values[name].backward_bytes) == (width * np.prod(shape),) * 2


def test_a_value_names_its_readers_and_its_gradient() -> None:
    chain, _, _ = chain_of(captured(lambda module, h: module.fc2(torch.relu(h)) + h))
    values = {v.name: v for v in chain.values}
    linear = values["linear"]
    assert (linear.producer, linear.consumers, linear.forward_bytes, linear.backward_bytes) == (0, (1, 3), 48, 48)
    assert "input_0" not in values, "only block 0 reads the batch"


def test_the_batch_comes_from_block_0_and_needs_no_gradient() -> None:
    chain, _, _ = of_kind("SkipOver")
    target = next(v for v in chain.values if v.name == "target_0")
    assert target.producer == 0
    assert min(target.consumers) > 0
    assert target.backward_bytes == 0


def test_a_tied_parameter_is_owned_once_and_travels() -> None:
    chain, _, _ = of_kind("TiedLM")
    owned = [p for p in chain.parameters if p.name == "embed.weight"]
    assert len(owned) == 1
    assert len(owned[0].blocks) == 1
    size = models.VOCABULARY * models.WIDTH * 4
    value = next(v for v in chain.values if v.name == "embed.weight")
    assert (value.producer, value.forward_bytes, value.backward_bytes) == (owned[0].blocks[0], size, size)
    assert not any(p.name == "head.weight" for p in chain.parameters)


def test_frozen_tensors_stay_wherever_they_are_read() -> None:
    chain, _, _ = of_kind("RoPEDecoder")
    tables = {s.name: s for s in chain.frozen}
    assert len(tables["cos"].blocks) > 1
    assert {p.name for p in of_kind("FrozenLoRA")[0].parameters} == {"down", "up"}


def test_running_again_needs_the_batch_and_the_buffers_that_change() -> None:
    chain, _, _ = of_kind("BufferWrites")
    x, y = models.vectors()
    assert sum(chain.replay) == x.nbytes + y.nbytes + 5 * models.WIDTH * 4
    assert chain.replay[0] >= x.nbytes + y.nbytes


def test_numbers_cross_without_a_gradient() -> None:
    chain, _, _ = of_kind("SizesCross")
    sizes = [v for v in chain.values if v.forward_bytes == 0]
    assert sizes
    assert all(v.backward_bytes == 0 for v in sizes)


def test_blocks_are_called_after_their_modules() -> None:
    chain, _, _ = of_kind("TiedLM")
    names = [b.name for b in chain.blocks]
    assert names[0] == "embed"
    assert "first.norm" in names
    assert "head" in names
