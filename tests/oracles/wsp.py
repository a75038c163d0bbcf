"""Wave Synchronous Parallel (HetPipe) written out as a loop over whole models: plain PyTorch, one process.

There are no stages, messages or weight versions here. A virtual worker is one whole model. Pipelining shows only as
*delay*: when minibatch p starts, a parameter whose stage keeps w minibatches in flight holds the worker's own updates
up to p - w, for forward and backward alike. So in round p a worker first applies the updates that are due, then (last
minibatch of a wave) takes global weights, then computes the gradients of p with what it has; the optimizer will use
them w rounds later.

Global weights, per parameter, in reproducible mode: ``S[c+1] = S[c] + scale * (U[0][c] + U[1][c] + ...)``, where
``U[n][c]`` is the sum of worker n's updates in wave c, and update = weights after the optimizer's step - weights
before. The forward of minibatch (c+1)*Nm uses ``((S[c-D] + own[c-D]) + own[c-D+1]) + ...`` once c - D >= 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Group:
    """Parameters of one virtual worker that share a delay (a stage): their names, and minibatches in flight."""

    names: tuple[str, ...]
    in_flight: int


@dataclass
class Outcome:
    """``weights``: the global ones at the end; ``losses[vw][p - 1]``; ``models``: the local ones, for their buffers."""

    weights: dict[str, torch.Tensor]
    losses: list[list[float]]
    models: list[torch.nn.Module]


class _Worker:
    """One virtual worker: a model, an optimizer per group, gradients not applied yet, and sums of own updates per
    wave."""

    def __init__(
        self, model: torch.nn.Module, groups: Sequence[Group], make_optimizer: Any, make_scheduler: Any
    ) -> None:
        self.model = model
        self.groups = groups
        self.parameters = dict(model.named_parameters())
        self.optimizers = [make_optimizer([self.parameters[n] for n in group.names]) for group in groups]
        self.schedulers = [make_scheduler(o) if make_scheduler else None for o in self.optimizers]
        self.gradients: dict[tuple[str, int], torch.Tensor | None] = {}
        self.own: dict[tuple[str, int], torch.Tensor] = {}

    def update(self, index: int, minibatch: int, nm: int) -> None:
        """Step the optimizer of a group with the gradients of ``minibatch``."""
        names = self.groups[index].names
        before = {n: self.parameters[n].detach().clone() for n in names}
        for n in names:
            self.parameters[n].grad = self.gradients.pop((n, minibatch))
        self.optimizers[index].step()
        if self.schedulers[index] is not None:
            self.schedulers[index].step()
        wave = (minibatch - 1) // nm
        for n in names:
            change = self.parameters[n].detach() - before[n]
            self.own[n, wave] = self.own[n, wave] + change if (n, wave) in self.own else change

    def compute(self, minibatch: int, batch: Any, loss_of: Callable[[Any, Any], torch.Tensor]) -> float:
        """Gradients of ``minibatch`` with the weights as they are now."""
        self.model.zero_grad(set_to_none=True)
        loss = loss_of(self.model, batch)
        loss.backward()
        for n, p in self.parameters.items():
            self.gradients[n, minibatch] = None if p.grad is None else p.grad.detach().clone()
        return loss.item()


def train(
    models: Sequence[torch.nn.Module],
    groups: Sequence[Sequence[Group]],
    batches: Sequence[Sequence[Any]],
    *,
    nm: int,
    staleness: int,
    scale: float,
    make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    loss_of: Callable[[Any, Any], torch.Tensor],
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> Outcome:
    """Train N equal models (changed in place) on ``batches[vw][p - 1]``, all with the same number of minibatches."""
    workers = [_Worker(m, g, make_optimizer, make_scheduler) for m, g in zip(models, groups, strict=True)]
    names = [n for n, p in models[0].named_parameters() if p.requires_grad]
    servers = {n: [workers[0].parameters[n].detach().clone()] for n in names}
    total = len(batches[0])

    def global_weights(name: str, clock: int) -> torch.Tensor:
        known = servers[name]
        while len(known) <= clock:
            c = len(known) - 1
            pushed = workers[0].own[name, c]
            for worker in workers[1:]:
                pushed = pushed + worker.own[name, c]
            known.append(known[c] + scale * pushed)
        return known[clock]

    losses: list[list[float]] = [[] for _ in workers]
    # Rounds beyond the last minibatch apply the updates that are still due.
    for p in range(1, total + nm + 1):
        for worker in workers:
            for index, group in enumerate(worker.groups):
                due = p - group.in_flight
                if 1 <= due <= total:
                    worker.update(index, due, nm)
        if p > total:
            continue
        wave = p // nm - 1
        if p % nm == 0 and wave - staleness >= 1:
            for worker in workers:
                for n in names:
                    value = global_weights(n, wave - staleness)
                    for c in range(wave - staleness, wave + 1):
                        if (n, c) in worker.own:
                            value = value + worker.own[n, c]
                    with torch.no_grad():
                        worker.parameters[n].copy_(value)
        for vw, worker in enumerate(workers):
            losses[vw].append(worker.compute(p, batches[vw][p - 1], loss_of))
    waves = -(-total // nm)
    return Outcome({n: global_weights(n, waves) for n in names}, losses, list(models))
