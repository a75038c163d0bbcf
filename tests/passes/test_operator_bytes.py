"""Bytes that kernels move: each rule on an operator small enough to count by hand (float32: 4 bytes a number)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hetpipe_compiler.passes.operator_work import WorkMode

X = 4 * 6 * 5 * 5  # numbers in what `image` makes
CHANNELS = 6


def image(**more: bool) -> Tensor:
    return torch.empty(4, CHANNELS, 5, 5, device="meta", **more)


def vector(**more: bool) -> Tensor:
    return torch.empty(CHANNELS, device="meta", **more)


def rows(count: int, width: int = 8) -> Tensor:
    return torch.empty(count, width, device="meta")


def ids(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.int64, device="meta")


def moved(call, *args) -> int:
    with WorkMode() as mode:
        call(*args)
    return sum(work.bytes for work in mode.work)


@pytest.mark.parametrize(
    ("call", "args", "expected"),
    [
        (torch.relu, [image()], 2 * 4 * X),
        (torch.relu_, [image()], 2 * 4 * X),  # read and written
        (lambda x: x.add_(x), [image()], 2 * 4 * X),  # one operand, read once
        (lambda x: x + 1, [vector().expand(100, CHANNELS)], 4 * (CHANNELS + 100 * CHANNELS)),
        (torch.zeros_like, [image()], 4 * X),  # what lends its shape is not read
        (lambda x: x.new_ones(3), [image()], 4 * 3),
        (torch.empty_like, [image()], 0),
        (lambda x: x.zero_(), [image()], 4 * X),
        (lambda x, y: x.copy_(y), [image(), image()], 2 * 4 * X),
        (lambda x: x.bernoulli_(0.5), [image()], 4 * X),
    ],
)
def test_what_is_written_in_place_is_read_and_what_lends_its_shape_is_not(call, args, expected) -> None:
    assert moved(call, *args) == expected


@pytest.mark.parametrize(
    ("call", "args", "expected"),
    [
        # Rows that are picked, read and written; their numbers of 8 bytes.
        (F.embedding, [ids(3), rows(100)], 3 * 8 + 2 * 3 * 8 * 4),
        (lambda x, i: torch.gather(x, 0, i), [rows(100), ids(8)[None]], 8 * 8 + 2 * 8 * 4),
        # Three rows of values, and the rows that they are added to, read and written.
        (lambda x, i, v: x.index_put_((i,), v, True), [rows(100), ids(3), rows(3)], 3 * 8 + 3 * (3 * 8 * 4)),
        (lambda x, i, v: x.index_add_(0, i, v), [rows(100), ids(3), rows(3)], 3 * 8 + 3 * (3 * 8 * 4)),
        # The table is cleared first.
        (
            lambda g, i: torch.ops.aten.embedding_dense_backward(g, i, 100, -1, False),
            [rows(3), ids(3)],
            100 * 8 * 4 + 3 * 8 + 3 * (3 * 8 * 4),
        ),
    ],
)
def test_a_table_is_read_and_written_where_it_is_looked_up(call, args, expected) -> None:
    assert moved(call, *args) == expected


def backward_of(loss: Tensor, wanted: list[Tensor]) -> int:
    return moved(torch.autograd.grad, loss, wanted, torch.empty_like(loss))


def test_a_loss_reads_one_score_of_a_row_and_its_backward_none() -> None:
    scores, target = rows(5, 1000).requires_grad_(), ids(5)
    # A picked score counts as much as its target's number; the loss and the sum of the weights come out.
    assert moved(F.nll_loss, scores, target) == 5 * 8 + 5 * 8 + 2 * 4
    # The loss's gradient, the targets and the sum of the weights are read, and every score has a gradient.
    assert backward_of(F.nll_loss(scores, target), [scores]) == 4 + 5 * 8 + 4 + 5 * 1000 * 4


def test_max_pooling_does_not_read_its_input_again() -> None:
    x = image(requires_grad=True)
    out = F.max_pool2d(x, 2)
    assert backward_of(out, [x]) == out.numel() * 4 + out.numel() * 8 + 4 * X


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_goes_over_its_batch_twice(training: bool) -> None:
    x, weight, bias, mean, variance = image(requires_grad=True), *(vector(requires_grad=at < 2) for at in range(4))
    out = F.batch_norm(x, mean, variance, weight, bias, training)
    passes, per_channel = 2 if training else 1, 16 * 4 * CHANNELS  # at most
    forward = moved(F.batch_norm, x, mean, variance, weight, bias, training)
    assert 0 < forward - 4 * X * (passes + 1) < per_channel
    assert 0 < backward_of(out, [x, weight, bias]) - 4 * X * (2 * passes + 1) < per_channel
    # Rows are short: one stays in the cache.
    assert moved(F.layer_norm, x, (5,)) == 2 * 4 * X + 2 * 4 * (X // 5)
