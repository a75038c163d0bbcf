"""What may stand in a cluster file and in the catalogue, as pydantic models. Meaning and names are checked afterwards.

Every number refuses booleans and says what was expected in our own words: the type of a validation error made here is
the code of the `ClusterError` it becomes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from hetpipe_compiler.ir.cluster import DeviceKind, Efficiency, Link
from hetpipe_compiler.ir.config_file import shown, user_message

_BYTES = {"bytes": 1, "mib": 2**20, "gb": 10**9, "gib": 2**30}
# More of one kind in one node is a slip of the finger; every device becomes an object.
MAX_COUNT = 1024
# Marks the alternatives of a union in pydantic's locations, which are not places in the user's file.
ALTERNATIVE = "@"
# The type of the error when no alternative fits.
NO_ALTERNATIVE = "no_alternative"


def _number(value: object) -> float:
    """A float from YAML; ``1e3`` and ``.inf`` are text to PyYAML or JSON, and numbers to people."""
    number: float | None = None
    try:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            number = float(value)
        elif isinstance(value, str):
            number = float(value.replace(".inf", "inf"))
    except (ValueError, OverflowError):
        number = None
    if number is None:
        raise user_message("HP203", f"expected a number, got {shown(value)}")
    return number


def _figure(
    *, low: float = 0.0, low_allowed: bool = False, high: float = math.inf, infinite: bool = False
) -> BeforeValidator:
    """A check that a number lies in a range; the bound ``high`` is allowed."""

    def check(value: object) -> float:
        number = _number(value)
        if math.isnan(number) or (math.isinf(number) and not (infinite and number > 0)):
            raise user_message("HP206", f"must be a finite number, got {shown(value)}")
        if number < low or (number == low and not low_allowed) or number > high:
            bound = f"{'at least' if low_allowed else 'more than'} {low:g}"
            bound += f" and at most {high:g}" if math.isfinite(high) else ""
            raise user_message("HP206", f"must be {bound}, got {shown(value)}")
        return number

    return BeforeValidator(check)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise user_message("HP203", f"expected a whole number of devices, got {shown(value)}")
    if not 1 <= value <= MAX_COUNT:
        raise user_message("HP206", f"must be at least 1 and at most {MAX_COUNT}, got {shown(value)}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise user_message("HP203", f"expected a text, got {shown(value)}")
    return value


def _one_of(expected: str, **types: type | tuple[type, ...]) -> Discriminator:
    """Choose a union's alternative by the YAML type; pydantic would report the errors of every alternative."""

    def choose(value: object) -> str | None:
        return next((ALTERNATIVE + tag for tag, kind in types.items() if isinstance(value, kind)), None)

    return Discriminator(choose, NO_ALTERNATIVE, f"expected {expected}")


Positive = Annotated[float, _figure()]
NonNegative = Annotated[float, _figure(low_allowed=True)]
Share = Annotated[float, _figure(high=1.0)]
ShareFromZero = Annotated[float, _figure(low_allowed=True, high=1.0)]
Bandwidth = Annotated[float, _figure(infinite=True)]
Count = Annotated[int, BeforeValidator(_count)]
Text = Annotated[str, BeforeValidator(_text)]
OperatorClass = Literal[
    "matrix", "convolution", "attention", "normalisation", "embedding", "transcendental", "elementwise"
]


class Spec(BaseModel):
    """Base: a key that the model does not know is an error."""

    model_config = ConfigDict(extra="forbid")


class LinkSpec(Spec):
    """A link spelled out. ``name`` is for tables; without it the figures stand there."""

    name: Text | None = None
    bandwidth_gb_s: Bandwidth
    latency_us: NonNegative = 0.0
    source: Text | None = None

    def link(self, name: str | None = None) -> Link:
        """The link under ``name``, or its own name, or its figures."""
        figures = f"{self.bandwidth_gb_s:g} GB/s, {self.latency_us:g} us"
        return Link(name or self.name or figures, self.bandwidth_gb_s, self.latency_us)


class EfficiencySpec(Spec):
    """What one operator class reaches: see `hetpipe_compiler.ir.cluster.Efficiency`."""

    compute: Share
    memory: Share
    serial: ShareFromZero = 0.0


class KindSpec(Spec):
    """A kind spelled out, or the figures of a known kind that are to change. See `DeviceKind` for their meaning."""

    memory_bytes: Positive | None = None
    memory_mib: Positive | None = None
    memory_gb: Positive | None = None
    memory_gib: Positive | None = None
    reserve_bytes: NonNegative | None = None
    reserve_mib: NonNegative | None = None
    reserve_gb: NonNegative | None = None
    reserve_gib: NonNegative | None = None
    fp32_tflops: Positive | None = None
    tf32_tflops: Positive | None = None
    bf16_tflops: Positive | None = None
    fp16_tflops: Positive | None = None
    memory_bandwidth_gb_s: Positive | None = None
    compute_efficiency: Share | None = None
    memory_efficiency: Share | None = None
    launch_overhead_us: NonNegative | None = None
    efficiencies: dict[OperatorClass, EfficiencySpec] | None = None
    source: Text | None = None

    def figures(self) -> dict[str, Any]:
        """What is given, under the names of `DeviceKind`. Raises `ValueError` if a size is given in two units."""
        given = self.model_dump(exclude_unset=True)
        for size in ("memory", "reserve"):
            keys = [f"{size}_{unit}" for unit in _BYTES if given.get(f"{size}_{unit}") is not None]
            if len(keys) > 1:
                raise ValueError(f"{keys[0]} and {keys[1]} are both given")
            for unit, factor in _BYTES.items():
                amount = given.pop(f"{size}_{unit}", None)
                if amount is not None:
                    given[f"{size}_bytes"] = round(amount * factor)
        if given.get("efficiencies") is not None:
            given["efficiencies"] = tuple((n, Efficiency(**e)) for n, e in given["efficiencies"].items())
        # null only says something where a kind can lack a rate; elsewhere it is as good as not given.
        rates = ("tf32_tflops", "bf16_tflops", "fp16_tflops")
        return {key: value for key, value in given.items() if value is not None or key in rates}


_NEEDED = {"memory_bytes": "memory_gb", "fp32_tflops": "fp32_tflops", "memory_bandwidth_gb_s": "memory_bandwidth_gb_s"}


def make_kind(name: str, figures: dict[str, Any], base: dict[str, Any]) -> DeviceKind:
    """The kind ``name``: ``figures``, what they leave out from ``base``. Raises `ValueError` if it is incomplete."""
    absent: dict[str, Any] = {"tf32_tflops": None, "bf16_tflops": None, "fp16_tflops": None}
    values = absent | {"source": "the cluster file"} | base | figures | {"name": name}
    missing = [key for field, key in _NEEDED.items() if field not in values]
    if missing:
        raise ValueError(f"missing: {', '.join(missing)}")
    if values["reserve_bytes"] >= values["memory_bytes"]:
        reserve, memory = (round(values[f"{size}_bytes"] / 2**20) for size in ("reserve", "memory"))
        raise ValueError(f"reserves {reserve} MiB of {memory} MiB: nothing is left")
    if figures and "source" in base and "source" not in figures:
        values["source"] = f"{base['source']}; changed in the cluster file: {', '.join(sorted(figures))}"
    return DeviceKind(**values)


_KindCounts = dict[Text, Count]
_DeviceItem = Annotated[
    Annotated[_KindCounts, Tag("@mapping")] | Annotated[Text, Tag("@name")],
    _one_of("a kind or {kind: count}", mapping=dict, name=str),
]
LinkChoice = Annotated[
    Annotated[Text, Tag("@name")] | Annotated[LinkSpec, Tag("@figures")],
    _one_of("a link's name or {bandwidth_gb_s: ..., latency_us: ...}", name=str, figures=dict),
]


def _named(pattern_says: str, allowed: Callable[[str], bool]) -> BeforeValidator:
    def check(value: object) -> str:
        text = _text(value)
        if not allowed(text):
            raise user_message("HP203", f"'{text}': {pattern_says}")
        return text

    return BeforeValidator(check)


# Names become parts of device ids (n0:2), process names and file names.
NodeName = Annotated[
    str,
    _named(
        "a node's name is made of letters, digits, '.', '-' and '_'",
        lambda text: text.isascii() and text[0].isalnum() and all(c.isalnum() or c in "._-" for c in text),
    ),
]


class NodeSpec(Spec):
    """One node."""

    name: NodeName
    devices: Annotated[
        Annotated[_KindCounts, Tag("@mapping")] | Annotated[list[_DeviceItem], Tag("@list")],
        _one_of("{kind: count} or a list", mapping=dict, list=list),
    ]
    link: LinkChoice
    address: Text | None = None


class EmulateSpec(Spec):
    """Emulation on CPUs."""

    time_scale: Positive = 1.0


class ClusterSpec(Spec):
    """A whole cluster file."""

    name: Text = "cluster"
    nodes: list[NodeSpec] = Field(min_length=1)
    network: LinkChoice | None = None
    kinds: dict[Text, KindSpec] = {}
    emulate: EmulateSpec | None = None


class CatalogueSpec(Spec):
    """``catalogue.yaml``."""

    defaults: KindSpec
    kinds: dict[Text, KindSpec]
    links: dict[Text, LinkSpec]
