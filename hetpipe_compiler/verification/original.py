"""The user's own model and loss, run once: what a plan is held to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hetpipe_compiler.frontend.load import LoadedWorkload
from hetpipe_compiler.frontend.regions import autocast_on_cpu
from hetpipe_compiler.frontend.training_step import TrainingStep, loss_for
from hetpipe_compiler.verification.controlled import controlled, noting_autocast, wider
from hetpipe_compiler.verification.outcome import Outcome, outcome


@dataclass
class _Draws:
    """The n-th operator that draws gets ``first + n``."""

    first: int
    count: int = 0

    def seed(self) -> int:
        return self.first + self.count

    def drew(self) -> None:
        self.count += 1


class Original:
    """The model with values, in train mode, and a batch for it.

    Args:
        loaded: The workload.
        model: Its model, with real weights. It is used, not copied: its buffers are put back after each step, its
            dtype is not.
        seed: For random operators (the n-th in the order of execution gets ``seed + n``) and for the batch.

    Attributes:
        leaves: All leaves of the batch in ``tree_flatten`` order. Floating-point leaves that the example leaves all
            equal (they stand for a shape) are drawn anew, integers that are all equal too if the model takes them.
        draws: Random operators that the last step met.
        casts: Whether the last step was under autocast somewhere.
    """

    def __init__(self, loaded: LoadedWorkload, model: torch.nn.Module, seed: int) -> None:
        self._seed = seed
        self.model = model
        self.draws = 0
        self.casts = False
        self._wide = False
        example = loaded.workload.example_batch()
        self._step = TrainingStep(loaded.workload, model, example).train()
        self._step.loss = loss_for(loaded.workload, "cpu")
        self._example: list[Any] = [_own(leaf) for leaf in pytree.tree_leaves(example)]
        self.leaves = self._example
        self._float32 = {name for name, t in self._state() if t.dtype is torch.float32}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers under all their names."""
        return {
            **dict(self.model.named_parameters(remove_duplicate=False)),
            **dict(self.model.named_buffers(remove_duplicate=False)),
        }

    def widen(self, wide: bool) -> None:
        """Compute in double precision from now on, or no more."""
        self._wide = wide
        for name, tensor in self._state():  # by name: a step may put another tensor in a buffer's place
            if name in self._float32:
                tensor.data = tensor.data.to(torch.float64 if wide else torch.float32)

    def _state(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._step.named_parameters()
        yield from self._step.named_buffers()

    def choose_batch(self) -> Outcome:
        """Take the most varied batch that the model accepts and that gives a finite loss; returns its outcome.

        Raises:
            Exception: What the model raises on the example itself.
        """
        for top in (10, 2):
            self.leaves = _varied(self._example, top, self._seed)
            try:
                found = self.run()
            except Exception:
                continue
            if found.finite:
                return found
        self.leaves = self._example
        return self.run()

    def evaluate(self) -> Outcome:
        """The loss in eval mode, and the buffers afterwards."""
        self._step.eval()
        try:
            return self.run(backward=False)
        finally:
            self._step.train()

    def run(self, leaves: Sequence[Any] | None = None, *, backward: bool = True) -> Outcome:
        """One step: forward and, unless told otherwise, backward."""
        leaves = self.leaves if leaves is None else leaves
        tensors = [_input(leaves[at], self._wide) for at in self._step.tensor_leaves]
        before = {name: b.detach().clone() for name, b in self._step.named_buffers()}
        draws = _Draws(self._seed)
        try:
            with (
                controlled(draws, self._wide),
                autocast_on_cpu(),
                noting_autocast() as entered,
                torch.set_grad_enabled(backward),
            ):
                loss = self._step(*tensors)
                if backward:
                    loss.backward()
            self.casts = bool(entered)
            gradients = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
            buffers = {n: b.detach().clone() for n, b in self.model.named_buffers()}
        finally:
            self.draws = draws.count
            for parameter in self._step.parameters():
                parameter.grad = None
            with torch.no_grad():
                for name, buffer in self._step.named_buffers():
                    if name in before and before[name].shape == buffer.shape:
                        buffer.copy_(before[name])
        return outcome(loss, gradients, buffers)

    def run_one_ulp_away(self) -> Outcome:
        """One step with each floating-point input, or else each parameter, moved to its next number."""
        moved = [_next(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        if any(isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in self.leaves):
            return self.run(moved)
        parameters = [p for p in self.model.parameters() if p.is_floating_point()]
        saved = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p in parameters:
                p.copy_(_next(p))
        try:
            return self.run()
        finally:
            with torch.no_grad():
                for p, value in zip(parameters, saved, strict=True):
                    p.copy_(value)


def _own(leaf: Any) -> Any:
    return leaf.detach().to("cpu").clone() if isinstance(leaf, torch.Tensor) else leaf


def _input(leaf: torch.Tensor, wide: bool) -> torch.Tensor:
    """A copy that the model may write into."""
    return wider(leaf.clone()) if wide else leaf.clone()


def _varied(leaves: Sequence[Any], top: int, seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    varied = []
    for leaf in leaves:
        same = isinstance(leaf, torch.Tensor) and leaf.numel() > 1 and bool((leaf == leaf.flatten()[0]).all())
        if same and leaf.is_floating_point():
            leaf = torch.randn(leaf.shape, generator=generator).to(leaf.dtype)
        elif same and leaf.dtype in (torch.int64, torch.int32):
            leaf = torch.randint(0, top, leaf.shape, generator=generator).to(leaf.dtype)
        varied.append(leaf)
    return varied


def _next(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return torch.nextafter(tensor.detach(), torch.tensor(torch.inf, dtype=tensor.dtype))
