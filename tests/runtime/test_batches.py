"""Batches for stage 0: epochs, shards of unequal length, seeds, and checks against the plan."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy import Network, Toy, write_toy

from hetpipe_compiler.errors import RunError
from hetpipe_compiler.frontend.load import LoadedWorkload
from hetpipe_compiler.ir.workload import Workload
from hetpipe_compiler.runtime.batches import BatchSource, shard_lengths
from hetpipe_compiler.runtime.randomness import epoch_seed


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return write_toy(tmp_path / "p", Network(), cuts=[[2], []], in_flight=[[2, 1], [1]], nm=2, staleness=0)


def make(x: float, size: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((size, 8), float(x)), torch.zeros(size, dtype=torch.long)


def load(data: Any, example: Any = None) -> LoadedWorkload:
    return LoadedWorkload(
        Workload(
            model=torch.nn.Identity,
            example=example if example is not None else make(0),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            data=data,
        ),
        Path("model.py"),
        {},
    )


def values(source: BatchSource, minibatches: range) -> list[float]:
    return [source(p)[0][0, 0].item() for p in minibatches]


def test_epochs_follow_each_other_and_a_shorter_shard_wraps_round(toy: Toy) -> None:
    calls: list[tuple[int, int, int]] = []

    def data(shard: int, num_shards: int, seed: int) -> list[Any]:
        calls.append((shard, num_shards, seed))
        return [make(10 * shard + i) for i in range(3 if shard == 0 else 2)]

    notes: list[str] = []
    workload = load(data)
    lengths = shard_lengths(workload, 2, 5)
    assert lengths == (3, 2)
    sources = [BatchSource(toy.plan, vw, workload, 5, lengths, notes.append) for vw in (0, 1)]
    assert sources[0].minibatches_per_epoch == sources[1].minibatches_per_epoch == 3
    calls.clear()
    assert values(sources[0], range(1, 8)) == [0, 1, 2, 0, 1, 2, 0]
    assert calls == [(0, 2, epoch_seed(5, e)) for e in range(3)]
    assert values(sources[1], range(1, 8)) == [10, 11, 10, 10, 11, 10, 10]
    assert notes == ["vw1: its shard has 2 batches where the largest has 3: it wraps round, repeating 1 in every epoch"]


def test_batches_without_a_length_are_counted(toy: Toy) -> None:
    def data(shard: int, num_shards: int, seed: int) -> Any:  # noqa: ARG001
        return (make(i) for i in range(4 - shard))

    assert shard_lengths(load(data), 2, 0) == (4, 3)
    assert BatchSource(toy.plan, 0, load(data), 0).minibatches_per_epoch == 4


def test_an_endless_stream_is_counted_as_far_as_the_run_goes() -> None:
    def data(shard: int, num_shards: int, seed: int) -> Any:  # noqa: ARG001
        return (make(i) for i in itertools.count())

    assert shard_lengths(load(data), 2, 0, at_most=50) == (50, 50)


def test_a_loader_of_a_stream_is_counted() -> None:
    """It has a ``__len__`` that raises."""

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return (make(i) for i in range(3))

    def data(shard: int, num_shards: int, seed: int) -> Any:  # noqa: ARG001
        return torch.utils.data.DataLoader(Stream(), batch_size=None)

    assert shard_lengths(load(data), 1, 0) == (3,)


def test_long_counting_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetpipe_compiler.runtime.batches._COUNTING_S", 0.0)

    def data(shard: int, num_shards: int, seed: int) -> Any:  # noqa: ARG001
        return (make(i) for i in range(2))

    notes: list[str] = []
    assert shard_lengths(load(data), 1, 0, on_note=notes.append) == (2,)
    assert "no len(): 2 so far" in notes[-1]


def broken_stream() -> Any:
    yield make(0)
    raise OSError("disk broke")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda *_: 1 // 0, "raised ZeroDivisionError"),
        (lambda *_: broken_stream(), "raised OSError: disk broke"),
        (lambda: [], "raised TypeError"),
        (lambda *_: sys.exit(0), "raised SystemExit: 0"),
        (lambda *_: None, "returned NoneType, which yields no batches"),
        (lambda *_: 5, "returned int, which yields no batches"),
    ],
)
def test_data_that_fails_is_the_users_error(data: Any, message: str) -> None:
    with pytest.raises(RunError, match=message) as caught:
        shard_lengths(load(data), 2, 0)
    assert caught.value.code == "HP517"


@pytest.mark.parametrize("fails", ["call", "stream"])
def test_data_that_fails_in_the_second_epoch(toy: Toy, fails: str) -> None:
    first = epoch_seed(0, 0)

    def data(_shard: int, _shards: int, seed: int) -> Any:
        if fails == "call" and seed != first:
            raise OSError("disk broke")
        return [make(1), make(2)] if seed == first else broken_stream()

    source = BatchSource(toy.plan, 0, load(data), 0)
    source(1)
    source(2)
    with pytest.raises(RunError, match=r"data\(shard=0, num_shards=2, ...\) raised OSError: disk broke") as caught:
        list(map(source, (3, 4)))
    assert caught.value.code == "HP517"


def test_a_batch_is_a_function_of_seed_worker_and_minibatch(toy: Toy) -> None:
    """Augmentations may draw from torch, NumPy or random; asking again, or only for later ones, gives the same."""

    def data(shard: int, num_shards: int, seed: int) -> Any:  # noqa: ARG001
        for _ in range(4):
            x, y = make(0)
            x[0, :3] = torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()])
            yield x, y

    workload = load(data)
    lengths = shard_lengths(workload, 2, 0)
    source = BatchSource(toy.plan, 0, workload, 0, lengths)
    once = [source(p)[0] for p in range(1, 10)]
    assert torch.equal(source(2)[0], once[1])
    torch.rand(3), np.random.rand(), random.random()
    assert torch.equal(BatchSource(toy.plan, 0, workload, 0, lengths)(7)[0], once[6])
    assert not torch.equal(once[0], once[4])
    assert not torch.equal(BatchSource(toy.plan, 1, workload, 0, lengths)(1)[0], once[0])
    assert not torch.equal(BatchSource(toy.plan, 0, workload, 1, lengths)(1)[0], once[0])
    assert (once[0][0, :3] != once[1][0, :3]).all()


def test_without_data_the_example_repeats(toy: Toy) -> None:
    source = BatchSource(toy.plan, 0, load(None, make(3)), 0)
    assert values(source, range(1, 4)) == [3, 3, 3]
    assert source.minibatches_per_epoch is None


def test_a_meta_example_is_filled(toy: Toy) -> None:
    example = tuple(t.to("meta") for t in make(0))
    first, again, other = (BatchSource(toy.plan, 0, load(None, example), seed)(1) for seed in (0, 0, 1))
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])
    assert first[0].std() > 0.5
    assert torch.equal(first[1], torch.zeros(6, dtype=torch.long))


def test_dictionaries_are_read_in_the_examples_order(toy: Toy) -> None:
    x, y = make(4)
    batch = {"y": y, "x": x}

    def data(shard: int, num_shards: int, seed: int) -> list[Any]:  # noqa: ARG001
        return [batch]

    source = BatchSource(toy.plan, 0, load(data, {"x": x, "y": y}), 0)
    assert torch.equal(source(1)[0], x)
    batch["z"] = batch.pop("y")
    with pytest.raises(RunError, match=r"HP516.*missing \['y'\], unknown \['z'\]"):
        source(2)


X, Y = make(0)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((X.double(), Y), r"minibatch 1: item \[0\]: has dtype float64, the plan wants float32"),
        ((X, Y.int()), r"item \[1\]: has dtype int32"),
        ((X[:, :4], Y), r"item \[0\]: has shape \[6, 4\], the plan wants \['s0', 8\]"),
        ((X, Y[:3]), r"item \[1\]: has shape \[3\]"),
        ((X, 3), r"item \[1\]: is int, the plan wants a int64 tensor"),
        ((X,), "has 1 tensors and values, the example has 2"),
    ],
)
def test_a_batch_that_does_not_fit_is_named(toy: Toy, batch: Any, message: str) -> None:
    def data(shard: int, num_shards: int, seed: int) -> list[Any]:  # noqa: ARG001
        return [batch]

    with pytest.raises(RunError, match="HP516.*" + message):
        BatchSource(toy.plan, 0, load(data), 0)(1)


@pytest.mark.parametrize(
    ("item", "other"),
    [(0.5, 0.25), (None, X), (True, 1), ("mean", "sum"), (float("nan"), 1.0), ([1, 2], [1, 3]), (Path("a"), Path("b"))],
)
def test_what_is_no_tensor_must_stay_the_examples(toy: Toy, item: Any, other: Any) -> None:
    """The graph has it as a constant: another value would change nothing, without a word."""

    def data(shard: int, num_shards: int, seed: int) -> list[Any]:  # noqa: ARG001
        return [(X, Y, item), (X, Y, other)]

    source = BatchSource(toy.plan, 0, load(data, (X, Y, item)), 0)
    assert torch.equal(source(1)[0], X)
    with pytest.raises(RunError, match=r"HP516.*minibatch 2: item \[2\].*what is no tensor never changes"):
        source(2)


def test_a_short_batch_fits_when_the_size_is_free(toy: Toy) -> None:
    def data(shard: int, num_shards: int, seed: int) -> list[Any]:  # noqa: ARG001
        return [make(1, 2)]

    assert len(BatchSource(toy.plan, 0, load(data), 0)(1)[0]) == 2


def test_an_empty_shard_is_an_error(toy: Toy) -> None:
    def data(shard: int, num_shards: int, seed: int) -> list[Any]:  # noqa: ARG001
        return [make(1)] if shard == 0 else []

    with pytest.raises(RunError, match=r"HP515.*shard=1, num_shards=2"):
        BatchSource(toy.plan, 0, load(data), 0)
