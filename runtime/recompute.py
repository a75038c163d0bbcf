"""Recomputation: a stage that keeps its inputs instead of what autograd saves, and runs its forward again before B.

F runs with gradients on, as always, so that every operator takes the path it takes without recomputation; only what
it saves for its backward is thrown away at once (`nothing_saved`). Kept until B, for each minibatch in flight:

1. the values received, which no stage writes into;
2. the batch's own tensors, as copies, because the model may write into its batch (`kept_inputs`);
3. the values that buffers which the forward changes had before F (`WeightVersions.mutated_buffers`). The second run
   reads and writes these instead of the stage's buffers (`buffers_replaced`), which are so updated once only;
4. no random state: the generator is seeded from (run, virtual worker, minibatch, stage) before both runs, and
   `random_state_kept` gives it back what it had before the second.

The weights need nothing: B uses those of F anyway, and their slot is held until then. So the second run computes the
first one's bits wherever an operator computes the same bits twice (on the CPU always; CUDA kernels that add with
atomics do not promise it).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hetpipe_compiler.runtime.flat import ALIGNMENT_BYTES

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hetpipe_compiler.ir.plan import Port


@contextmanager
def nothing_saved() -> Iterator[None]:
    """What autograd saves inside is dropped: no backward can follow."""
    with torch.autograd.graph.saved_tensors_hooks(lambda _: None, _refuse):
        yield


def _refuse(_: None) -> Tensor:
    raise AssertionError("a backward through a forward whose saved values were thrown away")


def kept_inputs(inputs: Mapping[str, Any], ports: Iterable[Port]) -> dict[str, Any]:
    """Inputs for the second run; what comes from the batch is copied."""
    of_batch = {port.name for port in ports if port.batch_leaf is not None}
    return {
        name: _same_copy(value) if name in of_batch and isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }


def _same_copy(value: Tensor) -> Tensor:
    """A copy with the strides and the alignment of the original: kernels may add in another order without them."""
    lead, rest = divmod(value.data_ptr() % ALIGNMENT_BYTES, value.element_size())
    if value.layout is not torch.strided or value.numel() == 0 or rest:
        return value.clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    room = torch.empty(lead + span, dtype=value.dtype, device=value.device)
    room[lead:].copy_(value.as_strided((span,), (1,)))
    return room.as_strided(value.shape, value.stride(), lead)


@contextmanager
def buffers_replaced(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """``module`` has these tensors for buffers inside, its own again after."""
    own: dict[str, Tensor] = {}
    for name, value in values.items():
        own[name] = module.get_buffer(name)
        _set_buffer(module, name, value)
    try:
        yield
    finally:
        for name, value in own.items():
            _set_buffer(module, name, value)


def _set_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module.get_submodule(path)._buffers[leaf] = value


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Torch's generators (the CPU's and the device's) are after as they were before."""
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        yield
