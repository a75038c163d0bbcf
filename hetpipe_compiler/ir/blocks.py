"""The planner's view of a model: a chain of blocks with costs, the values between them, and what stays in memory.

The passes up to `coarsen` make it from an fx graph; a profiled graph file makes it directly. Everything after
(partition, concurrency, simulation) reads nothing else, so plans can be made without a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

#: More bytes than any device has.
NO_REPLAY = 1 << 50

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Block:
    """A run of atomic components that is never cut.

    Attributes:
        name: The module path that most of it belongs to, for people.
        nodes: Names of its fx nodes (or ids of a profiled graph), in execution order.
    """

    name: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CrossingValue:
    """Something that block ``producer`` makes and later blocks read, for one minibatch.

    A value counts once for each stage that reads it, however many of its blocks do.

    Attributes:
        name: fx node name, or a parameter's name where the value of a shared parameter travels.
        producer: Index of the block that makes it.
        consumers: Indices of the blocks that read it, ascending, all greater than ``producer``.
        forward_bytes: Bytes sent in the forward pass.
        backward_bytes: Bytes of its gradient; 0 where none flows.
    """

    name: str
    producer: int
    consumers: tuple[int, ...]
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True, slots=True)
class SharedBytes:
    """Bytes that a stage holds once if it holds any of ``blocks`` (ascending indices)."""

    name: str
    bytes: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class BlockChain:
    """A model as a chain of blocks in topological order; a stage is an interval of it.

    Attributes:
        name: The model's name.
        batch_size: Samples in one minibatch.
        blocks: In execution order; the loss is in the last.
        forward_ms: Per device kind, an array over blocks: milliseconds of one minibatch.
        backward_ms: The same for the backward pass.
        measured: Per device kind, whether each block's times were measured (else estimated); a bool: all, or none.
        values: What crosses when the chain is cut.
        parameters: Trainable parameter bytes (a tied parameter: one entry with its owner's block, and a value that
            carries it to the others).
        frozen: Bytes of frozen parameters, buffers and constants: resident once, no gradient, no versions.
        saved: Storages that autograd keeps from a forward until its backward, per minibatch in flight.
        optimizer_factor: Bytes of optimizer state per byte of trainable parameter.
        workspace: Bytes of each block that live only while one of its nodes runs forward or backward, beyond what is
            saved; none: 0 for all.
        step_factor: Bytes that the optimizer's step needs for a moment per byte of the stage's parameters, where it
            takes all at once (PyTorch's default on GPUs).
        loop_factor: The same per byte of the largest parameter, where it takes one after the other (on CPUs).
        replay: Bytes of each block that running its forward again needs, per minibatch in flight, beside the values
            received: the buffers that the forward changes, and in block 0 the batch; `NO_REPLAY` where it cannot run
            again; none: 0 for all.
        resident: Bytes that each block occupies where a profiled graph says so itself (``resident_bytes``): then a
            stage's memory is their sum and nothing else.
        colocate: Groups of blocks (ascending indices) that must share a stage.
        ends_fixed: Whether block 0 must be in the first stage and the last block in the last one: a model's batch
            enters the one, its loss leaves the other.
    """

    name: str
    batch_size: int
    blocks: tuple[Block, ...]
    forward_ms: dict[str, FloatArray]
    backward_ms: dict[str, FloatArray]
    measured: bool | dict[str, BoolArray]
    values: tuple[CrossingValue, ...]
    parameters: tuple[SharedBytes, ...]
    frozen: tuple[SharedBytes, ...]
    saved: tuple[SharedBytes, ...]
    optimizer_factor: float
    workspace: tuple[int, ...] = ()
    step_factor: float = 0.0
    loop_factor: float = 0.0
    replay: tuple[int, ...] = ()
    resident: tuple[int, ...] | None = None
    colocate: tuple[tuple[int, ...], ...] = ()
    ends_fixed: bool = False

    def __str__(self) -> str:
        return "\n".join(f"{at:4} {b.name:40} {' '.join(b.nodes)}" for at, b in enumerate(self.blocks))

    def __len__(self) -> int:
        return len(self.blocks)

    def measured_share(self, kind: str, blocks: tuple[int, int] | None = None) -> float:
        """Share of the measured in the milliseconds of ``blocks`` (a half-open interval; None: all) on ``kind``."""
        lo, hi = blocks or (0, len(self))
        if isinstance(self.measured, bool):
            return float(self.measured)
        known = self.measured[kind][lo:hi]
        times = (self.forward_ms[kind] + self.backward_ms[kind])[lo:hi]
        return float(times[known].sum() / times.sum()) if times.sum() > 0 else float(known.all())

    def permuted(self, order: Sequence[int]) -> BlockChain:
        """The same chain with its blocks in another topological order: block i of the result is ``order[i]`` here."""
        if list(order) == list(range(len(self))):
            return self
        at = {block: index for index, block in enumerate(order)}
        values = tuple(
            CrossingValue(
                v.name, at[v.producer], tuple(sorted([at[b] for b in v.consumers])), v.forward_bytes, v.backward_bytes
            )
            for v in self.values
        )
        if any(v.producer >= v.consumers[0] for v in values):
            raise ValueError("not a topological order: a block would come before what it reads")
        return self.picked(order, values)

    def picked(self, blocks: Sequence[int], values: tuple[CrossingValue, ...]) -> BlockChain:
        """These blocks alone, in this order, with what belongs to them; between them ``values``, in the new indices."""
        at = {block: index for index, block in enumerate(blocks)}
        pick = np.array(blocks)

        def moved(indices: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(sorted([at[b] for b in indices if b in at]))

        def held(items: tuple[SharedBytes, ...]) -> tuple[SharedBytes, ...]:
            found = [SharedBytes(item.name, item.bytes, moved(item.blocks)) for item in items]
            return tuple([item for item in found if item.blocks])

        measured = self.measured
        return replace(
            self,
            blocks=tuple(self.blocks[b] for b in blocks),
            forward_ms={kind: times[pick] for kind, times in self.forward_ms.items()},
            backward_ms={kind: times[pick] for kind, times in self.backward_ms.items()},
            measured=measured if isinstance(measured, bool) else {kind: m[pick] for kind, m in measured.items()},
            values=values,
            parameters=held(self.parameters),
            frozen=held(self.frozen),
            saved=held(self.saved),
            workspace=tuple(self.workspace[b] for b in blocks) if self.workspace else (),
            replay=tuple(self.replay[b] for b in blocks) if self.replay else (),
            resident=None if self.resident is None else tuple(self.resident[b] for b in blocks),
            colocate=tuple(group for group in map(moved, self.colocate) if len(group) > 1),
        )
