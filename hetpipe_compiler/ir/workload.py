"""What model.py hands over: the model, its loss, an example batch, and how to train it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Workload:
    """A training job, as ``workload()`` in model.py returns it; ``--set lr=0.1`` calls ``workload(lr=0.1)``.

    Attributes:
        model: Builds the model. Called on the meta device to plan, and once for real to make the initial weights.
        loss: Module or callable ``(output, *targets) -> scalar``. None: the model computes its own loss and returns it,
            or an output with ``.loss`` (as transformers does with ``labels``).
        example: A batch, or a callable that makes one: a tuple ``(inputs..., targets...)`` or a dict of keyword inputs.
            Only its shapes and dtypes matter, unless there is no ``data``: then training repeats it.
        targets: How many trailing items of the tuple, or which keys of the dict, go to the loss. Without a loss it
            counts for nothing.
        optimizer: Makes the optimizer of a stage from the stage's parameters. If its first parameter is called
            ``named_parameters`` it gets ``(name, parameter)`` pairs with the model's own names.
        scheduler: Makes a learning-rate scheduler from that optimizer; it steps once a minibatch.
        data: ``(shard, num_shards, seed)`` -> iterable over one epoch's batches of that shard, in the example's form.
            Shards must come from the same seed: each epoch calls it with another one, the same for all shards.
        evaluate: Gets the user's own model with the trained weights, in eval mode; returns named numbers.
        evaluation_data: ``()`` -> iterable over the batches to evaluate on, in the example's form; the last may be
            smaller. For ``hetpipe-run --evaluate``, which says the loss on them. It must yield the same ones each time.
    """

    model: Callable[[], torch.nn.Module]
    example: Any
    optimizer: Callable[[Any], torch.optim.Optimizer]
    loss: Any = None
    targets: int | tuple[str, ...] | list[str] = 1
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    data: Callable[[int, int, int], Iterable[Any]] | None = None
    evaluate: Callable[[torch.nn.Module], dict[str, float]] | None = None
    evaluation_data: Callable[[], Iterable[Any]] | None = None

    def example_batch(self) -> Any:
        """The example itself, made if it is a callable."""
        return self.example() if callable(self.example) else self.example


def make_optimizer(make: Callable[[Any], Any], parameters: Mapping[str, Any]) -> Any:
    """Call a workload's optimizer maker.

    It gets the parameters, or ``(name, parameter)`` pairs if its first positional parameter is ``named_parameters``.
    """
    first = next(iter(positional_parameters(make)), None)
    return make(list(parameters.items()) if first == "named_parameters" else list(parameters.values()))


def positional_parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """The positional parameters of a function with their defaults; nothing for what has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {p.name: p.default for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)}
