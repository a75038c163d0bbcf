"""All models of the zoo by name: ``torchvision:resnet18``, ``timm:levit_128s``, ``transformers:bert``."""

from __future__ import annotations

from types import ModuleType

import zoo_timm
import zoo_torchvision
import zoo_transformers

from hetpipe_compiler import Workload

LIBRARIES: dict[str, ModuleType] = {
    "torchvision": zoo_torchvision,
    "transformers": zoo_transformers,
    "timm": zoo_timm,
}


def names() -> list[str]:
    """Every model, library by library."""
    return [f"{library}:{name}" for library, module in LIBRARIES.items() for name in module.names()]


def workload(name: str) -> Workload:
    """The model with a small batch and a loss."""
    library, _, model = name.partition(":")
    made: Workload = LIBRARIES[library].workload(model)
    return made


def opaque(name: str) -> tuple[str, ...]:
    """Submodules that are kept whole (`--opaque`): what they do depends on values."""
    library, _, model = name.partition(":")
    return zoo_transformers.OPAQUE.get(model, ()) if library == "transformers" else ()


def note(name: str) -> str:
    """How the configuration differs from what the library ships; '' if it does not."""
    library, _, model = name.partition(":")
    return str(LIBRARIES[library].note(model))
