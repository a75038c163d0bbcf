"""The examples are what people copy: each must train in plain PyTorch, and its data must shard."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from hetpipe_compiler import Cluster, Workload
from hetpipe_compiler.frontend.load import load_workload

EXAMPLES = Path(__file__).parents[2] / "examples"
#: Settings that keep a test quick; every one of them must be a parameter of the example's workload().
SMALL: dict[str, dict[str, Any]] = {
    "bert5b": {"batch_size": 4, "seq_len": 64, "layers": 2, "hidden": 32, "heads": 2, "vocab_size": 300},
    "digits": {"batch_size": 4},
    "gpt2": {"batch_size": 4, "seq_len": 64, "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 300},
    "llama7b": {
        "batch_size": 4,
        "seq_len": 64,
        "layers": 2,
        "hidden": 32,
        "intermediate": 48,
        "heads": 2,
        "vocab_size": 300,
    },
    "resnet152": {"batch_size": 4, "image_size": 64, "num_classes": 10, "images": 15},
    "vgg19": {"batch_size": 4, "image_size": 64, "num_classes": 10, "images": 15},
}
#: Parameters of the models as people know them (millions), and devices of the clusters.
FULL_MILLIONS = {"bert5b": 4901, "digits": 0.0823, "gpt2": 124.4, "llama7b": 6738, "resnet152": 60.2, "vgg19": 143.7}
DEVICES = {"bert5b": 16, "digits": 4, "gpt2": 4, "llama7b": 12, "resnet152": 16, "vgg19": 16}
NAMES = sorted(SMALL)


def load(name: str, **settings: Any) -> Workload:
    return load_workload(EXAMPLES / name / "model.py", settings).workload


def loss_of(workload: Workload, model: nn.Module, batch: Any) -> Tensor:
    """What training computes, written out: the loss callable, or the model's own loss."""
    if workload.loss is None:
        return model(**batch).loss  # type: ignore[no-any-return]
    inputs, targets = batch[: -int(workload.targets)], batch[-int(workload.targets) :]  # type: ignore[arg-type]
    return workload.loss(model(*inputs), *targets)  # type: ignore[no-any-return]


def sample_prints(batch: Any) -> list[str]:
    """One fingerprint a sample: of all its tensors."""
    leaves = tree_flatten(batch)[0]
    return [hashlib.sha256(b"".join(t[i].numpy().tobytes() for t in leaves)).hexdigest() for i in range(len(leaves[0]))]


def test_every_example_is_tested() -> None:
    assert sorted(p.parent.name for p in EXAMPLES.glob("*/model.py")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_default_size_is_the_well_known_one(name: str) -> None:
    with torch.device("meta"):
        model = load(name).model()
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    assert millions == pytest.approx(FULL_MILLIONS[name], rel=0.01)
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_one_step_of_plain_training(name: str) -> None:
    workload = load(name, **SMALL[name])
    torch.manual_seed(0)
    model = workload.model()
    loss = loss_of(workload, model, workload.example_batch())
    loss.backward()
    assert loss.shape == ()
    assert torch.isfinite(loss)
    assert all(p.grad is not None for p in model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    workload.optimizer(model.parameters()).step()
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_data_has_the_examples_form(name: str) -> None:
    workload = load(name, **SMALL[name])
    assert workload.data is not None
    wanted, wanted_form = tree_flatten(workload.example_batch())
    sizes = []
    for batch in workload.data(0, 2, 0):
        leaves, form = tree_flatten(batch)
        assert form == wanted_form
        for leaf, example in zip(leaves, wanted, strict=True):
            assert leaf.dtype == example.dtype
            assert leaf.shape[1:] == example.shape[1:]
            assert leaf.is_contiguous()
        sizes.append(len(leaves[0]))
    assert set(sizes[:-1]) == {len(wanted[0])}
    assert 0 < sizes[-1] <= len(wanted[0])


@pytest.mark.parametrize("name", NAMES)
def test_shards_split_the_data(name: str) -> None:
    data = load(name, **SMALL[name]).data
    assert data is not None

    def prints(shard: int, num_shards: int, seed: int = 3) -> Counter[str]:
        return Counter(p for batch in data(shard, num_shards, seed) for p in sample_prints(batch))

    whole = prints(0, 1)
    shards = [prints(shard, 3) for shard in range(3)]
    assert sum(shards, Counter()) == whole
    assert max(s.total() for s in shards) - min(s.total() for s in shards) <= 1
    assert prints(0, 1, seed=4) == whole


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_alone_decides_the_order(name: str) -> None:
    data = load(name, **SMALL[name]).data
    assert data is not None

    def order(seed: int) -> list[str]:
        return [p for batch in data(0, 2, seed) for p in sample_prints(batch)]

    assert order(0) == order(0)
    assert order(0) != order(1)


@pytest.mark.parametrize("name", NAMES)
def test_cluster_file_loads(name: str) -> None:
    cluster = Cluster.load(EXAMPLES / name / "cluster.yaml")
    assert len(cluster.devices) == DEVICES[name]
    assert len(cluster.kinds()) > 1
    assert (cluster.emulate is not None) == (name == "digits")


def test_digits_can_be_learned() -> None:
    workload = load("digits")
    assert workload.data is not None
    assert workload.evaluate is not None
    torch.manual_seed(0)
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    for epoch in range(3):
        for batch in workload.data(0, 1, epoch):
            optimizer.zero_grad()
            loss_of(workload, model, batch).backward()
            optimizer.step()
    assert workload.evaluate(model.eval())["test_accuracy"] >= 0.95


def test_gpt2_ties_its_embeddings_and_evaluates() -> None:
    workload = load("gpt2", **SMALL["gpt2"])
    assert workload.evaluate is not None
    torch.manual_seed(0)
    model = workload.model()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight  # type: ignore[operator]
    numbers = workload.evaluate(model.eval())
    # An untrained model guesses: one of 300 tokens.
    assert numbers["bits_per_byte"] == pytest.approx(8.23, abs=0.15)


def test_bert_hides_some_tokens_and_asks_for_those_only() -> None:
    workload = load("bert5b", **SMALL["bert5b"])
    assert workload.data is not None
    assert workload.evaluate is not None
    batch = next(iter(workload.data(0, 1, 0)))
    hidden = batch["input_ids"] == 256
    assert torch.equal(hidden, batch["labels"] != -100)
    assert 0.1 < hidden.float().mean() < 0.2
    torch.manual_seed(0)
    accuracy = workload.evaluate(workload.model().eval())["masked_accuracy"]
    assert 0 <= accuracy < 0.1
