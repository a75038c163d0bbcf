"""From a cluster file's content to a `Cluster`: check the shape, look names up, and say what is wrong where.

One mistake is one `ClusterError`; of several the first in the file's own terms is reported (an unknown key before the
required key that is missing because of it).

======  =====================================================================================
HP203   an unknown key, a missing key, or a value of the wrong type
HP204   a device kind that neither ``kinds`` nor the catalogue has
HP205   a link that the catalogue does not have
HP206   a figure out of its range: zero, negative, not finite, more than 1 for a share
HP207   nodes that cannot be: no nodes, no devices, one name twice, several without a network
HP208   a kind that is incomplete or contradicts itself
======  =====================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from hetpipe_compiler.devices.catalogue import Catalogue, load_catalogue
from hetpipe_compiler.errors import ClusterError
from hetpipe_compiler.ir.cluster import Cluster, Device, DeviceKind, Emulate, Link, Node
from hetpipe_compiler.ir.cluster_schema import (
    ALTERNATIVE,
    NO_ALTERNATIVE,
    ClusterSpec,
    EmulateSpec,
    KindSpec,
    LinkSpec,
    NodeSpec,
    Spec,
    make_kind,
)
from hetpipe_compiler.ir.config_file import Loc, place, shown, suggestion

_EXAMPLE = "see docs/cluster.md"


def build_cluster(content: object, where: str) -> Cluster:
    """A cluster from parsed YAML. ``where`` names the file in errors. Raises `ClusterError` HP203-HP208."""
    if not isinstance(content, dict):
        raise ClusterError("HP203", f"expected a mapping, got {shown(content)}", where=where, hint=_EXAMPLE)
    try:
        spec = ClusterSpec.model_validate(content)
    except ValidationError as error:
        raise _shape_error(error, where) from None
    return _Builder(spec, where).cluster()


class _Builder:
    """Looks up the names of one cluster file."""

    def __init__(self, spec: ClusterSpec, where: str) -> None:
        self.spec = spec
        self.where = where
        self.catalogue: Catalogue = load_catalogue()

    def cluster(self) -> Cluster:
        self.kinds = self.catalogue.kinds | self._own_kinds()
        nodes: list[Node] = []
        for index, node in enumerate(self.spec.nodes):
            first = next((i for i, other in enumerate(nodes) if other.name == node.name), None)
            if first is not None:
                message = f"'{node.name}' is also the name of nodes[{first}]"
                raise self._error("HP207", message, ("nodes", index, "name"), "give each node its own name")
            nodes.append(self._node(node, ("nodes", index)))
        network = self._network(nodes)
        emulate = Emulate(self.spec.emulate.time_scale) if self.spec.emulate else None
        return Cluster(self.spec.name, tuple(nodes), network, emulate)

    def _own_kinds(self) -> dict[str, DeviceKind]:
        kinds = {}
        for name, spec in self.spec.kinds.items():
            known = self.catalogue.kinds.get(name)
            base = vars(known) if known else self.catalogue.defaults
            try:
                kinds[name] = make_kind(name, spec.figures(), base)
            except ValueError as error:
                needs = "a new kind needs memory_gb (or memory_gib), fp32_tflops and memory_bandwidth_gb_s"
                hint = needs if str(error).startswith("missing") else "correct the kind; docs/cluster.md has the units"
                raise self._error("HP208", str(error), ("kinds", name), hint) from None
        return kinds

    def _node(self, node: NodeSpec, loc: Loc) -> Node:
        runs: list[tuple[str, int, Loc]] = []
        items = [node.devices] if isinstance(node.devices, dict) else node.devices
        for index, item in enumerate(items):
            at = (*loc, "devices") if isinstance(node.devices, dict) else (*loc, "devices", index)
            if isinstance(item, str):
                runs.append((item, 1, at))
            else:
                runs += [(kind, count, (*at, kind)) for kind, count in item.items()]
        if not runs:
            raise self._error("HP207", "a node without devices", (*loc, "devices"), "for example {titan-v: 4}")
        kinds = [self._kind(name, at) for name, count, at in runs for _ in range(count)]
        devices = tuple(Device(f"{node.name}:{i}", node.name, kind) for i, kind in enumerate(kinds))
        return Node(node.name, devices, self._link(node.link, (*loc, "link")), node.address)

    def _network(self, nodes: list[Node]) -> Link:
        if self.spec.network is not None:
            return self._link(self.spec.network, ("network",))
        if len(nodes) > 1:
            message = f"missing: {len(nodes)} nodes need a network between them"
            raise self._error("HP207", message, ("network",), "for example network: ethernet-10g")
        return nodes[0].link

    def _kind(self, name: str, loc: Loc) -> DeviceKind:
        if name not in self.kinds:
            hint = suggestion(name, self.kinds, "describe it under kinds:")
            raise self._error("HP204", f"no device kind '{name}'", loc, hint)
        return self.kinds[name]

    def _link(self, choice: str | LinkSpec, loc: Loc) -> Link:
        if isinstance(choice, LinkSpec):
            return choice.link()
        if choice not in self.catalogue.links:
            spelled_out = "spell it out: {bandwidth_gb_s: 12.0, latency_us: 6}"
            hint = suggestion(choice, self.catalogue.links, spelled_out)
            raise self._error("HP205", f"no link '{choice}'", loc, hint)
        return self.catalogue.links[choice]

    def _error(self, code: str, message: str, loc: Loc, hint: str) -> ClusterError:
        return ClusterError(code, message, where=place(self.where, loc), hint=hint)


def _shape_error(error: ValidationError, where: str) -> ClusterError:
    """The one error to report out of pydantic's list."""
    errors = error.errors(include_url=False)
    details = min(errors, key=lambda e: e["type"] != "extra_forbidden")
    loc: Loc = tuple(part for part in details["loc"] if not str(part).startswith(ALTERNATIVE) and part != "[key]")
    kind, message, hint = details["type"], details["msg"], _HINTS.get(str(loc[-1]) if loc else "", _EXAMPLE)
    code = kind if kind.startswith("HP") else "HP203"
    if kind == "extra_forbidden":
        message = f"unknown key '{loc[-1]}'"
        hint = suggestion(str(loc[-1]), _model_at(loc[:-1]).model_fields)
    elif kind == "missing":
        message = "missing"
    elif kind == "too_short":
        code, message, hint = "HP207", "no nodes", "list at least one node"
    elif kind in ("model_type", "dict_type"):
        message = f"expected a mapping, got {shown(details['input'])}"
    elif kind == NO_ALTERNATIVE:
        message += f", got {shown(details['input'])}"
    elif kind == "list_type":
        message = f"expected a list, got {shown(details['input'])}"
    elif message.startswith("expected a text") and isinstance(details["input"], (bool, int, float)):
        hint = "put it in quotes"
    elif message.startswith("expected a number"):
        hint = "write a plain number; its unit is in the key's name"
    elif message.startswith("expected a whole number") or (code == "HP206" and "devices" in loc):
        hint = f"for example {loc[-1]}: 4"
    elif code == "HP206":
        hint = "correct the figure; docs/cluster.md has units and ranges"
    return ClusterError(code, message, where=place(where, loc), hint=hint)


# By the last key of the place.
_HINTS = {
    "name": "for example name: n0",
    "nodes": "for example nodes: [{name: n0, devices: {titan-v: 4}, link: pcie3-x16}]",
    "devices": "for example devices: {titan-v: 4}",
    "link": "the link between the node's devices, for example link: pcie3-x16",
    "network": "the link between nodes, for example network: ethernet-10g",
    "kinds": "for example kinds: {my-card: {memory_gb: 8, fp32_tflops: 5.3, memory_bandwidth_gb_s: 243}}",
    "emulate": "emulate: null, or emulate: {time_scale: 1.0}",
    "bandwidth_gb_s": "gigabytes (10^9) a second and direction, for example bandwidth_gb_s: 12.0",
}


def _model_at(loc: Loc) -> type[Spec]:
    """The model that describes the mapping at ``loc``, for the keys it knows."""
    if not loc:
        return ClusterSpec
    by_last: Mapping[Any, type[Spec]] = {"link": LinkSpec, "network": LinkSpec, "emulate": EmulateSpec}
    if loc[0] == "kinds":
        return KindSpec
    return by_last.get(loc[-1], NodeSpec)
