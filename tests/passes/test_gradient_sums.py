"""What roofline times are made of beside FLOPs and bytes: operator classes, gathers, and sums of gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hetpipe_compiler import Workload
from hetpipe_compiler.frontend.capture import capture
from hetpipe_compiler.frontend.load import LoadedWorkload
from hetpipe_compiler.ir.cluster import DeviceKind, Efficiency
from hetpipe_compiler.ir.costs import Work
from hetpipe_compiler.passes.annotate_cost import count_calls

BATCH, WIDTH, ROWS = 4, 16, 1000
MATRIX = ("matrix", Efficiency(0.25, 0.5))
KIND = DeviceKind("k", 1 << 34, 1.0, 8.0, None, None, 100.0, 0.5, 0.5, 0.0, 0, "", (MATRIX,))


class Net(nn.Module):
    """``embed`` is read twice (tied), and ``x`` three times."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 1)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids):
        x = self.embed(ids)
        y = self.conv(x.transpose(1, 2)).transpose(1, 2)
        z = torch.relu(x) + self.norm(y) * x
        return (z @ self.embed.weight.T).mean(1)


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.py"
    path.write_text("")
    workload = Workload(
        model=Net,
        loss=nn.functional.cross_entropy,
        example=lambda: (torch.zeros(BATCH, 6, dtype=torch.int64), torch.zeros(BATCH, dtype=torch.int64)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    return count_calls(capture(LoadedWorkload(workload, path, {})))


def one(costs, prefix):
    found = [cost for cost in costs.values() if cost.key.startswith(prefix)]
    assert len(found) == 1, [cost.key for cost in costs.values()]
    return found[0]


def test_gradients_of_what_several_nodes_read_are_added_up(counted):
    costs, calls = counted
    embedding = one(costs, "aten.embedding")
    value, parameter = sorted(embedding.sums, key=lambda s: s.work.bytes)
    # Its value goes to transpose, relu and mul; the table to the embedding and the head.
    assert (value.count, value.work.bytes) == (2, 3 * BATCH * 6 * WIDTH * 4)
    assert (parameter.count, parameter.work.bytes) == (1, 3 * ROWS * WIDTH * 4)
    assert {value.key, parameter.key} <= set(calls)
    others = [cost for cost in costs.values() if cost.sums and cost is not embedding]
    assert others == []


def test_their_time_is_part_of_the_backward(counted):
    embedding = one(counted[0], "aten.embedding")
    alone = sum(work.ms(KIND) for work in embedding.backward)
    added = sum(s.count * s.work.ms(KIND) for s in embedding.sums)
    assert added > 0
    assert embedding.backward_ms(KIND) == pytest.approx(alone + added)


def test_an_embedding_reads_rows_and_not_its_table(counted):
    forward = one(counted[0], "aten.embedding").forward
    assert sum(work.bytes for work in forward) < ROWS * WIDTH * 4
    assert {work.operator_class for work in forward} == {"embedding"}


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("aten.conv1d", "convolution"),
        ("aten.matmul", "matrix"),
        ("aten.layer_norm", "normalisation"),
        ("aten.relu", "elementwise"),
        ("aten.cross_entropy_loss", "normalisation"),
    ],
)
def test_classes(counted, prefix, expected):
    cost = one(counted[0], prefix)
    assert expected in {work.operator_class for work in cost.forward}


def test_efficiency_of_a_class_and_tf32_convolutions():
    compute = 10**9
    assert Work(compute, 1, "float32", "matrix").ms(KIND) == pytest.approx(1 / 0.25)
    assert Work(compute, 1, "float32", "elementwise").ms(KIND) == pytest.approx(1 / 0.5)
    # cuDNN's convolutions use TF32 where there is any.
    assert Work(compute, 1, "float32", "convolution").ms(KIND) == pytest.approx(1 / 8 / 0.5)
    assert Work(0, 10**9, "float32", "matrix").ms(KIND) == pytest.approx(10 / 0.5)
