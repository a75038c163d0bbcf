"""Calls a module of the user's own model inside a stage: one that ``--opaque`` keeps whole.

The module is cut out of a model that is built from the plan folder's model.py, on the meta device where that can be.
It serves as code only: its parameters and buffers lie in the stage, under the model's own names, and are lent to it for
each call. So weight versions, optimizer, saving and moving know nothing of it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree

from hetpipe_compiler.frontend.construct import build_on_meta, build_real
from hetpipe_compiler.frontend.load import load_workload
from hetpipe_compiler.ir.opaque import size_at
from hetpipe_compiler.ir.plan import Plan
from hetpipe_compiler.ir.storage import storage_of


class Opaque:
    """One call of the module, as the stage's file says it.

    Args:
        stage_file: The file that calls it, in the ``stages`` folder of the plan.
        path: The module's path in the user's model.
        batch: Where the batch size is read: ``(tensor, dimension, per_batch, fixed)`` of the arguments.
        returns: What it returned when it was compiled: a list of sizes for a tensor, a size for a number, else a
            constant. A size is a number, or ``(per_batch, fixed)``.
        writes: Names of the buffers that it writes.

    Raises:
        WorkloadError: HP101-HP110, model.py cannot be loaded or the model not built.
    """

    def __init__(
        self,
        stage_file: str,
        path: str,
        batch: tuple[int, int, int, int] | None,
        returns: Sequence[Any],
        writes: Sequence[str],
    ) -> None:
        self._path = path
        self._batch, self._returns, self._writes = batch, returns, frozenset(writes)
        folder = Path(stage_file).parents[1]
        plan = Plan.load(folder)
        assert plan.workload is not None
        loaded = load_workload(folder / plan.workload.path, plan.workload.settings)
        with torch.random.fork_rng(devices=[]), unset_fake_temporarily():
            model = build_on_meta(loaded, plan.seed) or build_real(loaded, plan.seed)
        self._module = model.get_submodule(path)

    def __call__(self, stage: nn.Module, elsewhere: Mapping[str, torch.Tensor], /, *args: Any, **kwargs: Any) -> Any:
        """The tensors that the module returns, in order.

        Args:
            stage: Has the module's parameters and buffers at ``path``, and the mode.
            elsewhere: Those that lie at another place, by name, and plain attributes that are tensors.

        Raises:
            RuntimeError: The module did what the plan does not know of: wrote into something, or returned other sizes
                or values than its arguments' sizes say.
        """
        if torch.compiler.is_exporting():
            raise NotImplementedError(f"'{self._path}' is kept whole (--opaque): there are no operators to export")
        module = self._module
        if module.training != stage.training:
            module.train(stage.training)
        named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        state = {
            name: elsewhere[name] if name in elsewhere else operator.attrgetter(f"{self._path}.{name}")(stage)
            for name, _ in named
        }
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        fixed = [(f"its '{name}'", t) for name, t in state.items() if name not in self._writes]
        fixed += [("an argument", t) for t in tensors]
        versions = [t._version for _, t in fixed]
        lent = dict(state)
        with _attributes(module, {name: t for name, t in elsewhere.items() if name not in state}):
            out = torch.func.functional_call(module, lent, args, kwargs, tie_weights=False, strict=True)
        written = [what for (what, t), version in zip(fixed, versions, strict=True) if t._version != version]
        if written:
            raise RuntimeError(
                f"'{self._path}' wrote into {written[0]}, which the plan does not know of: it did not on the example"
                " batch; take one on which its forward does all that it may do"
            )
        self._keep_replaced(state, lent)
        self._check(pytree.tree_leaves(out), tensors, state)
        return tuple(leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor))

    def _keep_replaced(self, state: Mapping[str, torch.Tensor], lent: Mapping[str, torch.Tensor]) -> None:
        """``self.buffer = value`` writes into the stage's buffer."""
        for name, tensor in state.items():
            if lent[name] is not tensor:
                if name not in self._writes:
                    raise RuntimeError(f"'{self._path}' put another tensor in the place of its '{name}'")
                with torch.no_grad():
                    tensor.copy_(lent[name])

    def _check(self, leaves: Sequence[Any], tensors: Sequence[torch.Tensor], state: Mapping[str, Any]) -> None:
        batch = 0
        if self._batch is not None:
            tensor, dimension, per_batch, fixed = self._batch
            batch = (tensors[tensor].shape[dimension] - fixed) // per_batch
        found, expected = [_form(leaf) for leaf in leaves], [_at(form, batch) for form in self._returns]
        if found != expected:
            raise RuntimeError(
                f"'{self._path}' returned {found}, but the plan was made for {expected}: what a module that is kept"
                " whole returns may depend on values, but not its sizes"
            )
        own = {storage_of(t) for t in state.values()}
        if any(isinstance(t, torch.Tensor) and t.numel() and storage_of(t) in own for t in leaves):
            raise RuntimeError(f"'{self._path}' returned one of its own parameters or buffers, or a view of one")


def _form(leaf: Any) -> Any:
    return list(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf


def _at(form: Any, batch: int) -> Any:
    """An entry of ``returns`` at a batch size."""
    if isinstance(form, list):
        return [size_at(size, batch) for size in form]
    return size_at(form, batch) if isinstance(form, tuple) or type(form) is int else form


@contextmanager
def _attributes(module: nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Plain attributes that are tensors; the module was built where they have no values."""
    before = {}
    for name, value in values.items():
        owner, _, leaf = name.rpartition(".")
        part = module.get_submodule(owner)
        before[name] = part, leaf, getattr(part, leaf)
        setattr(part, leaf, value)
    try:
        yield
    finally:
        for part, leaf, value in before.values():
            setattr(part, leaf, value)
