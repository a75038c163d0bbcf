"""Batches for stage 0 of a virtual worker: a function of (seed, virtual worker, minibatch), checked against the plan.

An epoch is as long as the largest shard; a shorter shard wraps round within it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from hetpipe_compiler.codegen.quantities import counted
from hetpipe_compiler.errors import RunError
from hetpipe_compiler.runtime.batch_form import BatchForm
from hetpipe_compiler.runtime.randomness import data_seed, epoch_seed, seed_everything
from hetpipe_compiler.user_code import telling

if TYPE_CHECKING:
    from hetpipe_compiler.frontend.load import LoadedWorkload
    from hetpipe_compiler.ir.plan import Plan

_COUNTING_S = 10.0


def shard_lengths(
    workload: LoadedWorkload,
    num_shards: int,
    seed: int,
    *,
    at_most: int | None = None,
    on_note: Callable[[str], None] | None = None,
) -> tuple[int, ...] | None:
    """Batches in each shard in the first epoch; None for a workload without ``data``.

    ``len()`` of what ``data`` returns where it has one, else its batches are counted once.

    Args:
        at_most: Count no further: a run of so many minibatches meets no more of them.
        on_note: Told when counting takes long.

    Raises:
        RunError: HP515 when a shard has none; HP517 when ``data`` raises, or returns what yields nothing.
    """
    data = workload.workload.data
    if data is None:
        return None
    lengths = []
    for shard in range(num_shards):
        seed_everything(epoch_seed(seed, 0))
        call = _call(shard, num_shards)
        with _telling(workload, call):
            batches: Any = data(shard, num_shards, epoch_seed(seed, 0))
            length = length_of(batches)
            if length is None and hasattr(batches, "__iter__"):
                each = counted_aloud(batches, call, on_note, "--steps needs no count")
                length = sum(1 for _ in islice(each, at_most))
        if length is None:
            raise yields_nothing(call, batches, workload)
        if not length:
            raise _no_batches(workload, shard, num_shards)
        lengths.append(length)
    return tuple(lengths)


def length_of(batches: Any) -> int | None:
    """``len()``; None where it has none, as a DataLoader over an IterableDataset, for all its ``__len__``."""
    try:
        return len(batches)
    except TypeError:
        return None


def yields_nothing(call: str, returned: Any, workload: LoadedWorkload) -> RunError:
    """HP517 for a function of the workload that returned what cannot be gone through."""
    return RunError(
        "HP517",
        f"{call} returned {type(returned).__name__}, which yields no batches",
        where=str(workload.path),
        hint="return a list of batches, a DataLoader, or make it a generator",
    )


def counted_aloud(
    batches: Iterable[Any], call: str, on_note: Callable[[str], None] | None, advice: str
) -> Iterator[Any]:
    """The batches, counted; says so now and then, because a stream may be long or have no end."""
    told = time.monotonic()
    for count, batch in enumerate(batches, 1):
        if on_note is not None and time.monotonic() - told > _COUNTING_S:
            told = time.monotonic()
            on_note(f"counting the batches of {call}, which has no len(): {count} so far; {advice}")
        yield batch


class BatchSource:
    """minibatch (from 1) -> the leaves of its batch, in ``tree_flatten`` order. Ask in rising order: back is slow.

    Without ``data`` in the workload every minibatch is the example; an example on the meta device is filled: floating
    point with a normal distribution seeded from the run's seed, anything else with zeros.

    Args:
        plan: Its stage 0 of ``vw`` says what the leaves must look like.
        vw: Virtual worker, which is the shard.
        workload: Where the batches come from.
        seed: The run's seed.
        lengths: What `shard_lengths` says; None: ask it.
        on_note: Gets a sentence when something is worth saying, once (a shard that wraps round).

    Attributes:
        lengths: Batches in each shard; None without ``data``.

    Raises:
        RunError: HP515 a shard without batches; HP516 a batch that is not what the plan was made for, naming the leaf;
            HP517 ``data`` raises.
    """

    def __init__(
        self,
        plan: Plan,
        vw: int,
        workload: LoadedWorkload,
        seed: int,
        lengths: tuple[int, ...] | None = None,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        self._workload, self._vw, self._seed = workload, vw, seed
        self._shards = len(plan.virtual_workers)
        self._example = workload.workload.example_batch()
        self._form = BatchForm(plan, vw, self._example)
        self.lengths = lengths or shard_lengths(workload, self._shards, seed)
        self._filled: list[Any] | None = None
        self._iterator: Iterator[Any] = iter(())
        self._next = 0
        if self.lengths and self.lengths[vw] < max(self.lengths) and on_note:
            own, most = self.lengths[vw], max(self.lengths)
            on_note(
                f"vw{vw}: its shard has {counted(own, 'batch')} where the largest has {most}: "
                f"it wraps round, repeating {most - own} in every epoch"
            )

    @property
    def minibatches_per_epoch(self) -> int | None:
        """Minibatches of each virtual worker in an epoch; None without ``data``."""
        return max(self.lengths) if self.lengths else None

    def __call__(self, minibatch: int) -> list[Any]:
        """The leaves of a minibatch's batch."""
        assert minibatch >= 1
        if self._workload.workload.data is None:
            return self._example_leaves()
        per_epoch = self.minibatches_per_epoch
        assert per_epoch is not None
        epoch = (minibatch - 1) // per_epoch
        if minibatch < self._next or epoch * per_epoch + 1 > self._next:
            self._next = epoch * per_epoch + 1
        batch: Any = None
        while self._next <= minibatch:  # more than one turn only after a jump
            batch = self._fetch(self._next, start=(self._next - 1) % per_epoch == 0, epoch=epoch)
            self._next += 1
        return self._form.leaves(batch, f"vw{self._vw}, batch of minibatch {minibatch}")

    def _fetch(self, minibatch: int, *, start: bool, epoch: int) -> Any:
        if start:
            self._restart(epoch)
        missing = object()
        for attempt in range(2):
            seed_everything(data_seed(self._seed, self._vw, minibatch))
            with _telling(self._workload, _call(self._vw, self._shards)):
                batch = next(self._iterator, missing)
            if batch is not missing:
                return batch
            if attempt == 0:
                self._restart(epoch)
        raise _no_batches(self._workload, self._vw, self._shards)

    def _restart(self, epoch: int) -> None:
        data = self._workload.workload.data
        assert data is not None
        seed = epoch_seed(self._seed, epoch)
        # Seeded alike on all virtual workers, so that a shuffle that ignores the argument still gives disjoint shards.
        seed_everything(seed)
        with _telling(self._workload, _call(self._vw, self._shards)):
            self._iterator = iter(data(self._vw, self._shards, seed))

    def _example_leaves(self) -> list[Any]:
        if self._filled is None:
            generator = torch.Generator().manual_seed(data_seed(self._seed, 0, 0))
            leaves = [_filled(leaf, generator) for leaf in pytree.tree_leaves(self._example)]
            batch = pytree.tree_unflatten(leaves, pytree.tree_structure(self._example))
            self._filled = self._form.leaves(batch, f"vw{self._vw}, the example")
        # Copies: forward may write into its batch, and each minibatch starts from the example.
        return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in self._filled]


def _filled(leaf: Any, generator: torch.Generator) -> Any:
    if not isinstance(leaf, torch.Tensor) or not leaf.is_meta:
        return leaf
    if leaf.is_floating_point():
        return torch.randn(leaf.shape, generator=generator).to(leaf.dtype)
    return torch.zeros(leaf.shape, dtype=leaf.dtype)


def _call(shard: int, num_shards: int) -> str:
    return f"data(shard={shard}, num_shards={num_shards}, ...)"


def _telling(workload: LoadedWorkload, call: str) -> AbstractContextManager[None]:
    hint = "call it once in plain Python: for batch in data(0, 1, seed=0)"
    return telling(RunError, "HP517", f"{call} raised", workload.path, hint=hint)


def _no_batches(workload: LoadedWorkload, shard: int, num_shards: int) -> RunError:
    return RunError(
        "HP515",
        f"{_call(shard, num_shards)} yields no batches",
        where=str(workload.path),
        hint="every virtual worker needs at least one: use a smaller batch size or more data",
    )
