"""The weights that an evaluation takes: those that a run, a checkpoint or the user's own model saved.

Such a file holds what ``model.state_dict()`` does. Buffers that a model does not save come from elsewhere: the plan
folder's initial weights, or a model that is built for their sake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetpipe_compiler.errors import ArtifactError, RunError
from hetpipe_compiler.runtime import build_model, checkpoint
from hetpipe_compiler.runtime.initial import WEIGHTS_FILE, load_weights

if TYPE_CHECKING:
    from torch import Tensor

    from hetpipe_compiler.frontend.load import LoadedWorkload
    from hetpipe_compiler.ir.plan import Plan, Stage, VirtualWorker
    from hetpipe_compiler.ir.plan import Tensor as PlanTensor

#: In the run folder of an evaluation, where the plan folder has no weights.
BUFFERS_FILE = "buffers.safetensors"


def check_trained(plan: Plan, worker: VirtualWorker, weights: Path, on_note: Callable[[str], None]) -> None:
    """Look whether the file has all values of a virtual worker's stages, without reading them.

    A tied tensor may stand under any of its names. What the file has beyond the model is told, and not used.

    Raises:
        ArtifactError: HP416 the file cannot be read.
        RunError: HP513 a value is missing, or has another shape or dtype.
    """
    with _opened(weights) as file:
        names = frozenset(file.keys())
        for tensor in (t for stage in worker.stages for t in _saved(plan, stage)):
            _check_value(file, names, tensor, weights)
        known = {name for t in (*plan.parameters, *plan.buffers) for name in (t.name, *t.aliases)}
        unknown = sorted(names - known)
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        on_note(f"{weights} has values that the model has not, which are not used: {unknown[0]}{more}")


def unsaved_buffers(plan: Plan, worker: VirtualWorker, folder: Path, loaded: LoadedWorkload, run: Path) -> Path | None:
    """A file with the buffers that these stages need and models do not save; None where there are none.

    Without weights in the plan folder the whole model is built on the CPU, as training does then, and the file made.

    Raises:
        RunError: HP513 the model has no such buffer; HP555-HP557 the model cannot be built, or the file written.
    """
    names = [name for stage in worker.stages for name in _unsaved(plan, stage)]
    if not names:
        return None
    if plan.weights:
        return folder / WEIGHTS_FILE
    values = build_model.initial_values(build_model.build_model(loaded, plan.seed))
    missing = [name for name in names if name not in values]
    if missing:
        raise RunError(
            "HP513",
            "the model has no such buffer",
            where=missing[0],
            hint="the model differs from the planned one: compile again",
        )
    checkpoint.save(run / BUFFERS_FILE, {name: values[name] for name in names})
    return run / BUFFERS_FILE


def load_trained(plan: Plan, stage: Stage, weights: Path, unsaved: Path | None) -> dict[str, Tensor]:
    """The parameters and buffers of one stage, by the plan's names.

    Args:
        weights: What `check_trained` has looked at.
        unsaved: What `unsaved_buffers` found.
    """
    with _opened(weights) as file:
        names = frozenset(file.keys())
        values = {t.name: file.get_tensor(_name_in(names, t)) for t in _saved(plan, stage)}
    return {**values, **(load_weights(plan, unsaved, _unsaved(plan, stage)) if unsaved else {})}


def _saved(plan: Plan, stage: Stage) -> list[PlanTensor]:
    own = {*stage.parameters, *stage.buffers}
    return [t for t in (*plan.parameters, *plan.buffers) if t.name in own and t.persistent]


def _unsaved(plan: Plan, stage: Stage) -> list[str]:
    return [b.name for b in plan.buffers if b.name in stage.buffers and not b.persistent]


def _name_in(names: frozenset[str], tensor: PlanTensor) -> str | None:
    """The first of the tensor's names that the file has."""
    return next((name for name in (tensor.name, *tensor.aliases) if name in names), None)


def _check_value(file: Any, names: frozenset[str], tensor: PlanTensor, path: Path) -> None:
    name = _name_in(names, tensor)
    if name is None:
        raise RunError(
            "HP513",
            f"has no {tensor.name}, which the plan needs",
            where=str(path),
            hint="give weights that a run of this plan wrote, or a model's whole state_dict",
        )
    values = file.get_slice(name)
    shape = tuple(values.get_shape())
    dtype = str((values[:0] if shape else file.get_tensor(name)).dtype).removeprefix("torch.")
    if (shape, dtype) != (tensor.shape, tensor.dtype):
        raise RunError(
            "HP513",
            f"{name} is {dtype} {list(shape)}, the plan wants {tensor.dtype} {list(tensor.shape)}",
            where=str(path),
            hint="give weights of the model that the plan was made from",
        )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        inside = path / WEIGHTS_FILE
        what = "no such file" if not path.exists() else "is a folder" if path.is_dir() else "is no file of weights"
        hint = f"give {inside}" if inside.is_file() else "a run writes RUN/weights.safetensors at its end"
        raise ArtifactError("HP416", what, where=str(path), hint=hint)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ArtifactError(
            "HP416", f"cannot be read: {error}", where=str(path), hint="give a safetensors file, as a run writes it"
        ) from error
