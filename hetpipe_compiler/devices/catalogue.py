"""The device kinds and links that cluster files may name; the figures and their sources are in ``catalogue.yaml``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from hetpipe_compiler.ir.cluster import DeviceKind, Link
from hetpipe_compiler.ir.cluster_schema import CatalogueSpec, make_kind
from hetpipe_compiler.ir.config_file import parse_yaml


@dataclass(frozen=True)
class Catalogue:
    """What `load_catalogue` returns.

    Attributes:
        kinds: Name -> kind, in file order.
        links: Name -> link.
        link_sources: Name -> where the link's bandwidth comes from.
        defaults: Figures of a kind whose own entry does not state them (efficiencies, overhead, reserve).
    """

    kinds: dict[str, DeviceKind]
    links: dict[str, Link]
    link_sources: dict[str, str]
    defaults: dict[str, Any]


@cache
def load_catalogue() -> Catalogue:
    """The catalogue of this release; read once a process."""
    name = "catalogue.yaml"
    text = resources.files("hetpipe_compiler.devices").joinpath(name).read_text(encoding="utf-8")
    spec = CatalogueSpec.model_validate(parse_yaml(text, name))
    defaults = spec.defaults.figures()
    return Catalogue(
        kinds={name: make_kind(name, kind.figures(), defaults) for name, kind in spec.kinds.items()},
        links={name: link.link(name) for name, link in spec.links.items()},
        link_sources={name: link.source or "" for name, link in spec.links.items()},
        defaults=defaults,
    )
