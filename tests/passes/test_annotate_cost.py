"""Counts against torch's own counter and closed forms; saved bytes against what autograd really keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from kinds import MODELS, cluster_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from hetpipe_compiler.devices.catalogue import load_catalogue
from hetpipe_compiler.frontend.capture import capture
from hetpipe_compiler.frontend.construct import build_real
from hetpipe_compiler.frontend.load import LoadedWorkload, load_workload
from hetpipe_compiler.frontend.training_step import TrainingStep
from hetpipe_compiler.ir.captured import Captured
from hetpipe_compiler.ir.costs import NodeCost, Work
from hetpipe_compiler.ir.workload import Workload
from hetpipe_compiler.passes import annotate_cost
from hetpipe_compiler.passes.annotate_cost import AnnotateCost, count_costs
from hetpipe_compiler.passes.base import Compilation
from hetpipe_compiler.passes.normalize import normalize


def loaded(model: Callable[[], nn.Module], example: Any, loss: Any) -> LoadedWorkload:
    workload = Workload(model, example, lambda p: torch.optim.SGD(p, lr=0.1), loss)
    return LoadedWorkload(workload, Path(__file__), {})


def counted(job: LoadedWorkload) -> tuple[Captured, dict[str, NodeCost]]:
    captured = normalize(capture(job))
    return captured, count_costs(captured)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 10))


class ConvNet(nn.Module):
    """Convolutions (strided, grouped), batch norm, dropout, pooling and an in-place activation."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 16, 3, stride=2, groups=2), nn.BatchNorm2d(16)
        self.drop, self.fc = nn.Dropout(dropout), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)), inplace=True)
        h = F.max_pool2d(h, 2)
        h = F.relu(self.bn2(self.conv2(h)))
        return self.fc(self.drop(F.adaptive_avg_pool2d(h, 1).flatten(1)))


class LowNorms(nn.Module):
    """Normalisations of what autocast has made bfloat16, with weights in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.batch, self.group = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(4, 8)
        self.rows, self.fc = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.group(self.conv(self.batch(self.conv(x))[:, :3]))
            return self.fc(self.rows(h.mean((2, 3))))


class Block(nn.Module):
    """A small transformer with explicit attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down, self.head = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        q, k, v = (t.view(*ids.shape, 2, 8).transpose(1, 2) for t in self.qkv(self.norm(h)).chunk(3, -1))
        scores = (q @ k.transpose(-2, -1) / 8**0.5).softmax(-1)
        h = h + self.out((scores @ v).transpose(1, 2).reshape(h.shape))
        return self.head(h + self.down(F.gelu(self.up(h))))


class Attention(nn.Module):
    """Fused attention, and a layer that is used twice; ``autocast``: all of it in bfloat16, the weights cast."""

    def __init__(self, autocast: bool = False) -> None:
        super().__init__()
        self.embed, self.norm, self.qkv = nn.Embedding(50, 16), nn.LayerNorm(16), nn.Linear(16, 48)
        self.out, self.head, self.autocast = nn.Linear(16, 16), nn.Linear(16, 50), autocast

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, self.autocast):
            h = self.embed(ids)
            q, k, v = (t.view(*ids.shape, 2, 8).transpose(1, 2) for t in self.qkv(self.norm(h)).chunk(3, -1))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(h.shape)
            h = h + self.out(torch.relu(h + self.out(attended)))
            return self.head(F.gelu(h))


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 3, 16, 16), torch.randint(0, 5, (6,))


def ids() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 50, (3, 7)), torch.randint(0, 50, (3, 7))


JOBS = {
    "mlp": lambda: loaded(mlp, (torch.randn(4, 20), torch.randint(0, 10, (4,))), nn.CrossEntropyLoss()),
    "conv": lambda: loaded(ConvNet, images, nn.CrossEntropyLoss()),
    "transformer": lambda: loaded(Block, ids, models.token_loss),
    "attention": lambda: loaded(Attention, ids, models.token_loss),
    "autocast": lambda: loaded(lambda: Attention(autocast=True), ids, models.token_loss),
    "low_norms": lambda: loaded(LowNorms, images, nn.CrossEntropyLoss()),
    "bfloat16": lambda: loaded(lambda: Attention().bfloat16(), ids, models.token_loss),
}


@pytest.mark.parametrize("name", JOBS)
def test_flops_are_those_of_torchs_counter(name: str) -> None:
    job = JOBS[name]()
    _, costs = counted(job)
    batch = job.workload.example_batch()
    step = TrainingStep(job.workload, build_real(job, 0), batch).train()
    with FlopCounterMode(display=False) as counter:
        step(*pytree.tree_leaves(batch)).backward()
    products = ("linear", "conv", "matmul", "addmm", "bmm", "mm")
    ours = sum(c.flops for n, c in costs.items() if n.startswith(products))
    # What torch has no formula for we count too (one for each element that comes out): in those nodes only biases.
    assert counter.get_total_flops() <= ours <= 1.02 * counter.get_total_flops() + 2000


def test_closed_forms_of_a_linear_layer() -> None:
    _, costs = counted(JOBS["mlp"]())
    linear = costs["linear"]
    (work,) = linear.forward
    assert (work.flops, work.dtype) == (2 * 4 * 20 * 30, "float32")
    assert work.bytes == 4 * (4 * 20 + 20 * 30 + 30 + 4 * 30)
    # The input needs no gradient: one product for the weight, and the sum for the bias.
    assert max(w.flops for w in linear.backward) == 2 * 4 * 20 * 30
    assert sum(w.flops >= 2 * 4 * 20 * 30 for w in linear.backward) == 1
    assert sum(w.flops == 2 * 4 * 30 * 10 for w in costs["linear_1"].backward) == 2
    assert (linear.shape, linear.dtype, linear.output_bytes, linear.requires_grad) == ((4, 30), "float32", 480, True)
    assert not costs["input_0"].requires_grad


def test_closed_forms_of_a_convolution() -> None:
    _, costs = counted(JOBS["conv"]())
    assert costs["conv2d"].forward[0].flops == 2 * 6 * 8 * 16 * 16 * 3 * 9
    (grouped,) = costs["conv2d_1"].forward
    assert grouped.flops == 2 * 6 * 16 * 3 * 3 * (8 // 2) * 9


def test_closed_forms_of_attention() -> None:
    """Batch 3, 2 heads, 7 positions, width 8 a head: two products forward, and for each of them two backward."""
    _, costs = counted(JOBS["transformer"]())
    product = 2 * 3 * 2 * 7 * 7 * 8
    for name in ("matmul", "matmul_1"):
        assert sum(w.flops for w in costs[name].forward if w.operator_class == "matrix") == product
        assert [w.flops for w in costs[name].backward if w.operator_class == "matrix"] == [product, product]


class Twice(nn.Module):
    """Layers alike but that the first one's input wants no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(self.one(x)))


def test_what_is_alike_has_one_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    job = loaded(Twice, (torch.randn(4, 16), torch.randn(4, 16)), nn.MSELoss())
    runs: list[Any] = []
    run = annotate_cost._run_backward
    monkeypatch.setattr(annotate_cost, "_run_backward", lambda out, inputs: (runs.append(out), run(out, inputs))[1])
    _, costs = counted(job)
    # The input wants no gradient, a hidden value does: a second product.
    assert costs["linear"].flops < costs["linear_1"].flops
    assert costs["linear_1"].backward == costs["linear_2"].backward
    assert len(runs) == sum(c.requires_grad for c in costs.values()) - 1


@pytest.mark.parametrize("name", JOBS)
def test_counting_twice_gives_the_same(name: str) -> None:
    captured, costs = counted(JOBS[name]())
    assert all(count_costs(captured) == costs for _ in range(5))


@pytest.mark.parametrize("name", JOBS)
def test_saved_bytes_are_what_autograd_keeps(name: str) -> None:
    job = JOBS[name]()
    _, costs = counted(job)
    batch = job.workload.example_batch()
    step = TrainingStep(job.workload, build_real(job, 0), batch).train()
    own = {t.untyped_storage()._cdata for t in (*step.parameters(), *step.buffers())}
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        step(*pytree.tree_leaves(batch))
    assert sum(s.bytes for c in costs.values() for s in c.saved) == sum(kept.values())


def test_each_saved_storage_counts_once_and_with_the_node_that_made_it() -> None:
    _, costs = counted(JOBS["mlp"]())
    saved = {(n, s.producer): s.bytes for n, c in costs.items() for s in c.saved}
    # relu keeps its own result, which the second layer keeps too; the first layer keeps the batch.
    assert saved["linear", "input_0"] == 4 * 20 * 4
    assert saved["relu", "relu"] == 4 * 30 * 4
    assert ("linear_1", "relu") not in saved


def test_views_and_shape_operators_cost_nothing() -> None:
    _, costs = counted(JOBS["transformer"]())
    free = [n for n in costs if n.startswith(("view", "transpose", "chunk", "getitem"))]
    assert len(free) > 5
    assert all(not costs[n].forward for n in free)


def test_no_gradient_where_none_flows() -> None:
    _, costs = counted(load_workload(MODELS, {"name": "FrozenLoRA"}))
    assert costs["linear"].backward == ()
    assert not costs["linear"].requires_grad
    assert costs["cross_entropy_loss"].requires_grad


def test_autocast_is_counted_in_its_dtype() -> None:
    _, costs = counted(load_workload(MODELS, {"name": "Autocast"}))
    assert costs["linear"].dtype == "float32"
    assert costs["linear_1"].dtype == "bfloat16"
    assert any(w.dtype == "bfloat16" and w.flops == 2 * 4 * 8 * 8 for w in costs["linear_1"].forward)


def test_casts_of_weights_are_kept_for_each_minibatch_and_counted_once() -> None:
    """Each layer keeps a cast of its weight in two bytes; `out` is used twice and cast once."""
    _, costs = counted(JOBS["autocast"]())
    qkv, first, second, head = (sorted(s.bytes for s in c.saved) for n, c in costs.items() if n.startswith("linear"))
    value = 2 * 3 * 7 * 16
    assert qkv == sorted([2 * 48 * 16, value])
    assert first == [2 * 16 * 16]  # what it reads, attention keeps already
    assert second == [value]
    assert head == sorted([2 * 50 * 16, value])


def test_attention_is_priced_by_its_products() -> None:
    _, costs = counted(JOBS["attention"]())
    products = 4 * 3 * 2 * 7 * 7 * 8
    forward, backward = costs["scaled_dot_product_attention"].forward, costs["scaled_dot_product_attention"].backward
    assert sum(w.flops for w in forward if w.operator_class == "attention") == products
    assert sum(w.flops for w in backward if w.operator_class == "attention") == 5 * products // 2


def test_work_takes_the_peak_of_its_precision() -> None:
    card = load_catalogue().kinds["a100-40"]

    def ms(dtype: str, operator_class: str) -> float:
        return Work(10**12, 0, dtype, operator_class).ms(card) - card.launch_overhead_us * 1e-3

    at_peak = {"float32": card.fp32_tflops, "bfloat16": card.bf16_tflops, "float16": card.fp16_tflops}
    for dtype, tflops in at_peak.items():
        assert ms(dtype, "matrix") == pytest.approx(1e3 / (tflops * card.compute_efficiency))
    assert ms("float32", "convolution") == pytest.approx(1e3 / (card.tf32_tflops * card.compute_efficiency))
    assert ms("bfloat16", "convolution") == pytest.approx(1e3 / (card.bf16_tflops * card.compute_efficiency))


def test_counting_leaves_the_random_state_alone() -> None:
    job = load_workload(MODELS, {"name": "RandomInForward"})
    captured = normalize(capture(job))
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    count_costs(captured)
    assert torch.equal(torch.rand(3), expected)


def test_roofline_takes_the_slower_of_computing_and_moving() -> None:
    (kind,) = cluster_of(1).kinds()
    compute = Work(10**12, 8, "float32").ms(kind) - kind.launch_overhead_us * 1e-3
    assert compute == pytest.approx(1e15 / (kind.fp32_tflops * 1e12 * kind.compute_efficiency))
    moving = Work(1, 10**9, "float32").ms(kind) - kind.launch_overhead_us * 1e-3
    assert moving == pytest.approx(1e3 / (kind.memory_bandwidth_gb_s * kind.memory_efficiency))


def test_dump_lists_every_node() -> None:
    captured, costs = counted(JOBS["mlp"]())
    text = AnnotateCost().dump(Compilation(None, captured=captured, costs=costs))
    assert all(name in text for name in costs)
