"""Hold what export has captured to what the model computes in eager mode, operator by operator.

Export calls ``forward`` with tensors and sizes of its own kinds, and with parameters that are not the model's own
objects. Code that asks about those may go another way than in eager mode. So the model is called once more, with plain
tensors, and the captured graph too; both must make the loss and the buffers with the same operators from the same
inputs. At another batch size as well: what the code makes of it other than by arithmetic (a name, a key) export takes
from the example.

Not compared: a model that plain tensors without values cannot go through (many of transformers ask whether a mask is
all ones), one under ``--opaque``, and one of a library that goes another way because it is exported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.checkpointing import followed_checkpoints
from hetpipe_compiler.frontend.dataflow import Call, Dataflow, Numbers
from hetpipe_compiler.frontend.eager_answers import no_gradients_in_eval_mode
from hetpipe_compiler.frontend.own_gradients import derived_by_autograd
from hetpipe_compiler.frontend.python_state import PythonState
from hetpipe_compiler.frontend.regions import autocast_on_cpu, contexts_of, enter
from hetpipe_compiler.frontend.training_step import TrainingStep
from hetpipe_compiler.user_code import USER_ERRORS, first_line, line_of


@dataclass(frozen=True)
class Difference:
    """Where eager mode parts from the graph.

    Attributes:
        operator: The first that only eager mode calls; '' where it calls none that the graph does not.
        where: The user's line that calls it.
        of_gradients: Whether the values are the same, and other ones have gradients.
    """

    operator: str
    where: str
    of_gradients: bool


class CapturedOtherwiseError(WorkloadError):
    """HP128."""


_HINT = (
    "do not ask what kind of object a tensor, a parameter or a size is, and read parameters from their modules; or "
    "keep its module whole: --opaque MODULE"
)


class EagerCheck:
    """Compares graphs with eager mode.

    Args:
        step: The training step; it is left as it was.
        path: The user's file.
    """

    def __init__(self, step: TrainingStep, path: Path) -> None:
        self._step, self._path = step, path

    def check(self, graph_module: fx.GraphModule, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Hold the graph to the example.

        Returns:
            Whether they could be compared.

        Raises:
            CapturedOtherwiseError: HP128 if the graph computes something else.
        """
        try:
            difference = self._difference(graph_module, tensors)
        except CapturedOtherwiseError:
            raise
        except USER_ERRORS:
            return False
        if difference is not None:
            what = f"{difference.operator} is not in the graph" if difference.operator else "the graph does more"
            if difference.of_gradients:
                what = f"the gradients are not those of {difference.operator or 'the graph'}"
            raise CapturedOtherwiseError(
                "HP128",
                f"torch.export has captured something else than eager mode computes: {what}",
                where=difference.where,
                hint=_HINT,
            )
        return True

    def note_on_batch(
        self, graph_module: fx.GraphModule, program: ExportedProgram, tensors: tuple[torch.Tensor, ...]
    ) -> str | None:
        """Why a graph with a free batch size is not the model at another one; None if it is."""
        others = _at_another_size(program, tensors)
        size = others[0].shape[0]
        try:
            difference = self._difference(graph_module, others)
        except CapturedOtherwiseError as error:
            return error.message
        except USER_ERRORS as error:
            return f"the model raises at batch size {size}: {first_line(error)}"
        if difference is None:
            return None
        return f"the model computes something else at batch size {size}" + (
            f" ({difference.where.replace(str(self._path), self._path.name)})" if difference.where else ""
        )

    def _difference(self, graph_module: fx.GraphModule, tensors: tuple[torch.Tensor, ...]) -> Difference | None:
        numbers = Numbers()
        eager, made = self._run(numbers, tensors)
        try:
            graph, captured = self._run(numbers, tensors, graph_module)
        except USER_ERRORS as error:
            if tensors[0].is_meta:
                raise
            raise CapturedOtherwiseError(
                "HP128",
                f"the graph that torch.export has captured raises, the model does not: {first_line(error)}",
                where=str(self._path),
                hint=_HINT,
            ) from error
        if made == captured or eager.asks_values:  # what a library asks that knows export goes on to the same result
            return None
        call = _first_call_of_one(eager, [n for n, m in zip(made, captured, strict=True) if n != m], graph)
        of_gradients = self._has_the_same_values(graph_module, tensors)
        if call is None:
            return Difference("", str(self._path), of_gradients)
        return Difference(call.operator, self._line_of(call, tensors), of_gradients)

    def _has_the_same_values(self, graph_module: fx.GraphModule, tensors: tuple[torch.Tensor, ...]) -> bool:
        numbers = Numbers(gradients=False)
        return self._run(numbers, tensors)[1] == self._run(numbers, tensors, graph_module)[1]

    def _line_of(self, call: Call, tensors: tuple[torch.Tensor, ...]) -> str:
        place: list[str] = []
        self._run(Numbers(), tensors, watch=call.at, on_watched=lambda: place.append(line_of(self._path)))
        return place[0] if place else str(self._path)

    def _run(
        self,
        numbers: Numbers,
        tensors: tuple[torch.Tensor, ...],
        graph_module: fx.GraphModule | None = None,
        watch: int | None = None,
        on_watched: Callable[[], None] | None = None,
    ) -> tuple[Dataflow, list[int]]:
        """Follow the step, or the graph; returns the numbers of the loss and of each parameter and buffer after it."""
        dataflow = Dataflow(numbers, tensors[0].is_meta, watch, on_watched)
        given = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        for n, tensor in enumerate(given):
            dataflow.name(f"input {n}", tensor)
        held = dict(_held(self._step))
        for name, tensor in held.items():
            dataflow.name(name, tensor)
        with _left_as_it_was(self._step), autocast_on_cpu(), _saving_nothing(), dataflow.followed():
            if graph_module is None:
                with (
                    derived_by_autograd(),
                    followed_checkpoints(self._step, self._path),
                    no_gradients_in_eval_mode(self._step),
                ):
                    loss = self._step(*given)
                _write_assigned(held, dict(_held(self._step)))
            else:
                loss = _InRegions(graph_module).run(*given)
        while isinstance(loss, (tuple, list)):
            loss = loss[0]
        return dataflow, [dataflow.value(loss), *(dataflow.value(tensor) for tensor in held.values())]


@torch.no_grad()
def _write_assigned(held: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    """Write what the step has put in buffers' places into them, as the graph does."""
    values = {name: after[name].clone() for name, tensor in held.items() if after[name] is not tensor}
    for name, value in values.items():
        held[name].copy_(value)


def _nothing(_: Any) -> Any:
    return None


@contextlib.contextmanager
def _saving_nothing() -> Iterator[None]:
    """Autograd is on, but keeps no activations: nobody runs a backward."""
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_nothing, _nothing):
        yield


class _InRegions(fx.Interpreter):
    """Runs a graph, each node in its contexts."""

    def run_node(self, n: fx.Node) -> Any:
        with enter(contexts_of(n)):
            return super().run_node(n)


def _first_call_of_one(eager: Dataflow, numbers: list[int], graph: Dataflow) -> Call | None:
    """The first call behind the numbers that the graph does not make."""
    seen, stack, found = set(numbers), list(numbers), []
    while stack:
        number = stack.pop()
        call = eager.made_by.get(number)
        if call is None or number in graph.made_by:
            continue
        found.append(call)
        new = [n for n in call.reads if n not in seen]
        seen.update(new)
        stack += new
    return min(found, key=lambda call: call.at, default=None)


def _held(step: TrainingStep) -> Iterator[tuple[str, torch.Tensor]]:
    yield from step.named_parameters(remove_duplicate=False)
    yield from step.named_buffers(remove_duplicate=False)


def _at_another_size(program: ExportedProgram, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The example with a batch larger by one; free sizes that are the batch's in the example grow with it."""
    names = program.graph_signature.user_inputs
    vals = {n.name: n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"}
    sizes = [vals[name].shape[0] if vals[name].dim() else None for name in names]
    first = sizes[0]
    assert isinstance(first, torch.SymInt)
    grown = {
        symbol: symbol_size + 1
        for size in sizes
        if isinstance(size, torch.SymInt)
        and (size.node.expr.free_symbols & first.node.expr.free_symbols or size.node.hint == first.node.hint)
        for symbol, symbol_size in _hints(size)
    }
    return tuple(
        tensor
        if not isinstance(size, torch.SymInt)
        else _resized(tensor, int(size.node.expr.xreplace({**dict(_hints(size)), **grown})))
        for tensor, size in zip(tensors, sizes, strict=True)
    )


def _hints(size: torch.SymInt) -> Iterator[tuple[Any, int]]:
    """The symbols of a size, and what they are in the example."""
    env = size.node.shape_env
    assert env is not None
    return ((symbol, int(env.guarding_hint_or_throw(symbol))) for symbol in size.node.expr.free_symbols)


def _resized(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """The tensor with so many rows; new ones repeat the first ones."""
    return tensor[torch.arange(size, device=tensor.device) % tensor.shape[0]]


@contextlib.contextmanager
def _left_as_it_was(step: TrainingStep) -> Iterator[None]:
    """Puts back what a call of the step changes: random numbers, buffers, what lies in Python, and tensors' values."""
    state = PythonState.of(step)
    buffers = [(module._buffers, dict(module._buffers)) for module in step.modules()]
    tensors = [
        t for t in state.values.values() if isinstance(t, torch.Tensor) and not t.is_meta and not t.is_inference()
    ]
    values = [(t, t._version, t.clone()) for t in tensors]
    leaves = [t for t in step.buffers() if t.is_leaf and not t.requires_grad and not t._is_view()]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for holder, held in buffers:
            holder.clear()
            holder.update(held)
        with torch.no_grad():
            for tensor, version, value in values:
                if tensor._version != version:
                    tensor.copy_(value)
        for tensor in leaves:
            tensor.detach_()
        state.put_back()
