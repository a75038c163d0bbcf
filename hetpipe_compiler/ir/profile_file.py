"""A profile file: what one kind of device took for each operator, by `passes.node_key`. Needs no torch.

======  =====================================================================================
HP230   no such file, it cannot be read, or it is not JSON
HP231   no profile file: an unknown key, a missing key, a value of the wrong type or out of its range
HP232   it was measured on another kind or device, with another torch or number of threads
======  =====================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetpipe_compiler.errors import ClusterError
from hetpipe_compiler.files import write_text
from hetpipe_compiler.ir.config_file import place

Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_HINT = "make one with hetpipe-profile"


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Operator(_Spec):
    """Times of one key.

    Attributes:
        forward_ms, backward_ms: Medians; None if it was not measured.
        forward_spread, backward_spread: Half the distance between the quartiles, relative to the median.
        saved_bytes: Kept from forward to backward, parameters excluded.
        peak_bytes: Most memory in use at once beyond the arguments; None where the device does not tell.
        runs: Measured runs.
        skipped: Why it was not measured: its times stay estimates.
        estimated: Whether its times are an estimate after all, which only those that were measured together with it
            make better than a roofline.
    """

    forward_ms: Milliseconds | None = None
    backward_ms: Milliseconds | None = None
    forward_spread: float = 0.0
    backward_spread: float = 0.0
    saved_bytes: int = 0
    peak_bytes: int | None = None
    runs: int = 0
    skipped: str | None = None
    estimated: bool = False


class Profile(_Spec):
    """One file.

    Attributes:
        kind: The device kind of cluster files that it stands for.
        device: Name of the hardware.
        backend: ``cpu`` or ``cuda``.
        threads: CPU threads; 0 on a GPU.
        run: The run whose stage times were shared out among the operators; None: each operator was measured.
    """

    format: Literal["hetpipe-profile"] = "hetpipe-profile"
    version: Literal[1] = 1
    kind: str
    device: str
    backend: str
    torch: str
    threads: int
    run: str | None = None
    operators: dict[str, Operator] = Field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the file at once (beside its place, then renamed). Raises `ArtifactError` HP411."""
        write_text(path, self.model_dump_json(indent=1, exclude_none=True) + "\n")

    def where_measured(self) -> dict[str, Any]:
        """What must agree for two profiles to be one."""
        return {"kind": self.kind, "device": self.device, "torch": self.torch, "threads": self.threads}


def load_profile(path: Path) -> Profile:
    """Read a profile file. Raises `ClusterError` HP230-HP231."""
    where = str(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = (error.strerror or "cannot be read").lower()
        raise ClusterError("HP230", reason, where=where, hint=_HINT) from None
    except ValueError as error:
        raise ClusterError("HP230", f"not JSON: {error}", where=where, hint=_HINT) from None
    try:
        return Profile.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise ClusterError("HP231", first["msg"], where=place(where, first["loc"]), hint=_HINT) from None


def resumed(path: Path, fresh: Profile) -> Profile:
    """The profile at ``path`` if there is one, to be added to; else ``fresh``. Raises `ClusterError` HP230-HP232."""
    if not path.exists():
        return fresh
    there = load_profile(path)
    for name, value in fresh.where_measured().items():
        old = there.where_measured()[name]
        if old != value:
            raise ClusterError(
                "HP232",
                f"was measured with {name} {old}, this is {name} {value}",
                where=str(path),
                hint="write to another file with -o; hetpipe-compile takes --profile more than once",
            )
    return there


def merged(profiles: Sequence[Profile]) -> dict[str, dict[str, Operator]]:
    """Device kind -> key -> times. Where several profiles of a kind have a key, the last that measured it counts."""
    kinds: dict[str, dict[str, Operator]] = {}
    for profile in profiles:
        known = kinds.setdefault(profile.kind, {})
        for key, times in profile.operators.items():
            if times.skipped is None and not (times.estimated and key in known and not known[key].estimated):
                known[key] = times
    return kinds
