"""Initial values of a plan's parameters, buffers and constants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetpipe_compiler.errors import ArtifactError

if TYPE_CHECKING:
    from torch import Tensor

    from hetpipe_compiler.ir.plan import Plan

WEIGHTS_FILE = "weights.safetensors"
CONSTANTS_FILE = "constants.safetensors"


def load_weights(plan: Plan, path: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Parameters and buffers of the plan from a safetensors file; only ``names`` when given.

    Raises:
        ArtifactError: HP416 no such file, or values missing from it.
    """
    return _load(path, list(names) if names is not None else [t.name for t in (*plan.parameters, *plan.buffers)])


def load_constants(plan: Plan, folder: Path) -> dict[str, Tensor]:
    """Values of ``plan.constants``; raises `ArtifactError` HP416."""
    return _load(folder / CONSTANTS_FILE, [t.name for t in plan.constants]) if plan.constants else {}


def check_names(path: Path, names: Iterable[str]) -> None:
    """Look whether the file has these values, without reading them; raises `ArtifactError` HP416."""
    with _opened(path, list(names)):
        pass


def _load(path: Path, names: list[str]) -> dict[str, Tensor]:
    with _opened(path, names) as file:
        return {name: file.get_tensor(name) for name in names}


@contextmanager
def _opened(path: Path, names: list[str]) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ArtifactError("HP416", "no such file", where=str(path), hint="compile again, without --no-weights")
    try:
        with safe_open(path, framework="pt") as file:
            missing = sorted(set(names) - set(file.keys()))
            if missing:
                raise ArtifactError(
                    "HP416",
                    f"has no {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""),
                    where=str(path),
                    hint="compile again, or give weights of the same model",
                )
            yield file
    except (OSError, SafetensorError) as error:
        raise ArtifactError("HP416", f"cannot be read: {error}", where=str(path), hint="compile again") from error
