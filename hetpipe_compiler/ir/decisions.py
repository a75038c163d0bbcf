"""What a plan decides, as a YAML file that people edit: ``decisions.yaml`` in a plan folder.

It says who works where and nothing of what that costs. Names are looked up later (`hetpipe_compiler.passes.decided`),
when the model is known.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetpipe_compiler.errors import ClusterError
from hetpipe_compiler.ir.config_file import place, read_yaml, shown, suggestion
from hetpipe_compiler.ir.limits import MOST_CLOCKS, MOST_IN_FLIGHT

_HEAD = """\
# What hetpipe-compile decided. Edit it, and have it checked, costed and written again:
#   hetpipe-compile MODEL --cluster CLUSTER.yaml --decisions THIS_FILE -o DIR
# docs/own-plan.md explains the entries.
"""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class DecidedStage(_Entry):
    """One stage.

    Attributes:
        device: Its id.
        in_flight: w_s, minibatches between F and B.
        recompute: Whether it keeps its inputs only and runs its forward again before its backward.
        begins_at: A node, module or block, as for ``--split``: the stage reaches from there to the next one's.
        blocks: Instead, its blocks as ranges, ``0-57 60``: for stages that are no run of the model's own order.
    """

    device: str
    in_flight: int = Field(ge=1)
    recompute: bool = False
    begins_at: str | int | None = None
    blocks: str | int | None = None


class DecidedWorker(_Entry):
    """One virtual worker.

    Attributes:
        unused: Devices of its group that no stage uses.
        ordered: All its devices in the order that was fixed for them; empty: none was. It matters to the bound.
    """

    stages: tuple[DecidedStage, ...] = Field(min_length=1)
    unused: tuple[str, ...] = ()
    ordered: tuple[str, ...] = ()


class Decisions(_Entry):
    """All decisions of a plan.

    Attributes:
        policy, partitioner: Who made the groups and the stages.
        recompute: Which stages the search may let recompute: for the bound that the plan is held against.
        update_scale: None: 1 / number of virtual workers.
        digest: Of all else, as the compiler wrote it: tells whether anything was edited.
    """

    policy: str = "by hand"
    partitioner: str = "hand"
    objective: Literal["hetpipe", "overlapped"] = "hetpipe"
    nm: int = Field(ge=1, le=MOST_IN_FLIGHT)
    staleness: int = Field(default=0, ge=0, le=MOST_CLOCKS)
    placement: Literal["local", "round-robin"] = "local"
    recompute: Literal["never", "auto", "always"] = "auto"
    update_scale: float | None = Field(default=None, gt=0)
    virtual_workers: tuple[DecidedWorker, ...] = Field(min_length=1)
    digest: str | None = None

    @classmethod
    def load(cls, path: Path) -> Decisions:
        """Read a file. Raises `ClusterError` HP201, HP202, HP240 another form."""
        content = read_yaml(path, "docs/own-plan.md")
        if not isinstance(content, dict):
            raise _error("HP240", f"expected a mapping, got {shown(content)}", str(path), ())
        try:
            text = json.dumps(content, default=str)
        except (TypeError, ValueError, RecursionError):
            message = "a key that is no text, or an anchor that holds itself"
            raise _error("HP240", message, str(path), (), "put keys in quotes, and write entries out") from None
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise _shape_error(error, str(path)) from None

    def to_yaml(self) -> str:
        """The file's text: a stage a line, with a new digest."""
        lines = [f"{name}: {_flow(value)}" for name, value in self._content().items() if name != "virtual_workers"]
        lines.append("virtual_workers:")
        for worker in self._content()["virtual_workers"]:
            lines.append("- stages:")
            lines += [f"  - {_flow(stage)}" for stage in worker.pop("stages")]
            lines += [f"  {name}: {_flow(value)}" for name, value in worker.items()]
        lines.append(f"digest: {_flow(self._digest())}")  # of digits alone it would be a number
        return _HEAD + "\n".join(lines) + "\n"

    @property
    def edited(self) -> bool:
        """Whether a file that the compiler wrote says something else now."""
        return self.digest is not None and self.digest != self._digest()

    def author(self, name: str) -> str:
        """``policy`` or ``partitioner``, or that it was edited."""
        return f"{name}, edited" if self.edited and not name.endswith("edited") else name

    def _content(self) -> dict[str, Any]:
        content: dict[str, Any] = self.model_dump(mode="json", exclude={"digest"}, exclude_defaults=True)
        required: dict[str, Any] = {"policy": self.policy, "partitioner": self.partitioner, "objective": self.objective}
        required |= {"nm": self.nm, "staleness": self.staleness, "placement": self.placement}
        return required | content

    def _digest(self) -> str:
        return hashlib.sha256(json.dumps(self._content(), sort_keys=True).encode()).hexdigest()[:16]


def _flow(value: object) -> str:
    """One line of YAML."""
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf"), allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _shape_error(error: ValidationError, where: str) -> ClusterError:
    details = min(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    # Of a union, pydantic also names the alternative.
    loc = tuple(part for part in details["loc"] if part not in ("str", "int"))
    if details["type"] == "extra_forbidden":
        entry: dict[str, type[_Entry]] = {"stages": DecidedStage, "virtual_workers": DecidedWorker}
        lists = [part for part in loc[:-1] if isinstance(part, str)]
        known: type[_Entry] = entry[lists[-1]] if lists else Decisions
        return _error("HP240", f"unknown key '{loc[-1]}'", where, loc, suggestion(str(loc[-1]), known.model_fields))
    if details["type"] == "missing":
        return _error("HP240", "missing", where, loc)
    message = details["msg"].replace("Input should be", "should be")
    return _error("HP240", f"{message}, got {shown(details['input'])}", where, loc)


def _error(code: str, message: str, where: str, loc: tuple[int | str, ...], hint: str = "") -> ClusterError:
    return ClusterError(code, message, where=place(where, loc), hint=hint or "see docs/own-plan.md for the entries")
