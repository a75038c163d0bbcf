"""Keys: equal for calls that cost the same, different where shape, dtype, layout, gradient or a constant differs."""

from __future__ import annotations

import torch

from hetpipe_compiler.passes.node_key import node_key

ADD = torch.ops.aten.add.Tensor


def key(*args, contexts=(), target=ADD, **kwargs):
    return node_key(target, args, kwargs, contexts)


def test_it_reads_well():
    x = torch.empty(2, 3, requires_grad=True)
    assert key(x, 1.5, alpha=2) == "aten.add.Tensor(float32[2, 3] grad, 1.5, alpha=2)"


def test_values_do_not_matter():
    assert key(torch.zeros(2), torch.ones(2)) == key(torch.ones(2), torch.empty(2, device="meta"))


def test_what_matters():
    x = torch.empty(4, 4)
    others = [
        key(torch.empty(4, 5), 1),
        key(x.double(), 1),
        key(x.T, 1),
        key(x[:1].expand(4, 4), 1),
        key(torch.empty(4, 4, requires_grad=True), 1),
        key(x, 2),
        key(x, 1.0),
        key(x, 1, alpha=3),
        key(x, 1, contexts=(("autocast", "cpu", torch.bfloat16, True),)),
        key(x, 1, contexts=(("grad", False),)),
        key(x, 1, target=torch.ops.aten.mul.Tensor),
    ]
    assert len({key(x, 1), *others}) == len(others) + 1


def test_the_device_does_not():
    empty = torch.ops.aten.empty.memory_format
    assert key([2], target=empty, device=torch.device("cpu")) == key([2], target=empty, device=torch.device("meta"))
