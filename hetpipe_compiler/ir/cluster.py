"""A mixed cluster: nodes, the devices in them, and the links between them.

`Cluster.load` reads a cluster file (``docs/cluster.md``). All values are resolved: no name is left to look up in the
catalogue, so `Cluster.to_dict` means the same under a later release, and in ``plan.json``.

Units: bytes are bytes, GB are 10^9 bytes, rates are per direction, times as the names say.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple


class Efficiency(NamedTuple):
    """What an operator class reaches of a device.

    Attributes:
        compute, memory: Shares of the peaks, in (0, 1].
        serial: Share of the shorter of computing and moving bytes that is not hidden behind the longer, in [0, 1]: 0 is
            the roofline, 1 is one after the other, as a single CPU thread does it.
    """

    compute: float
    memory: float
    serial: float = 0.0


@dataclass(frozen=True)
class DeviceKind:
    """What all devices of one kind have in common.

    Attributes:
        name: The name in the cluster file.
        memory_bytes: Memory of the device; ``reserve_bytes`` of it are not for the plan.
        fp32_tflops: Peak FP32 rate, 10^12 operations a second.
        tf32_tflops, bf16_tflops, fp16_tflops: Peak rates of those formats, dense, accumulating in FP32; None: no faster
            than FP32.
        memory_bandwidth_gb_s: Peak.
        compute_efficiency, memory_efficiency: Share of the peaks that real kernels reach, in (0, 1].
        launch_overhead_us: Time an operation takes however small it is.
        reserve_bytes: Held by the driver and the framework.
        source: Where the figures come from, for people; no part of `Cluster.digest`.
        efficiencies: For operator classes that were calibrated (`hetpipe_compiler.ir.costs.OPERATOR_CLASSES`); the
            others have the two shares above.
    """

    name: str
    memory_bytes: int
    fp32_tflops: float
    tf32_tflops: float | None
    bf16_tflops: float | None
    fp16_tflops: float | None
    memory_bandwidth_gb_s: float
    compute_efficiency: float
    memory_efficiency: float
    launch_overhead_us: float
    reserve_bytes: int
    source: str
    efficiencies: tuple[tuple[str, Efficiency], ...] = ()

    @property
    def is_cpu(self) -> bool:
        """Whether stages live in the host's own memory."""
        return is_cpu_kind(self.name)

    def efficiency(self, operator_class: str) -> Efficiency:
        """What operators of a class reach."""
        for name, efficiency in self.efficiencies:
            if name == operator_class:
                return efficiency
        return Efficiency(self.compute_efficiency, self.memory_efficiency)


def is_cpu_kind(name: str) -> bool:
    """Whether a device kind is a CPU: it is named ``cpu``, or ``cpu-`` and more."""
    return name == "cpu" or name.startswith("cpu-")


@dataclass(frozen=True)
class Link:
    """A way for bytes: ``bandwidth_gb_s`` per direction (may be infinite) and ``latency_us`` per message."""

    name: str
    bandwidth_gb_s: float
    latency_us: float

    def ms(self, n_bytes: float) -> float:
        """Milliseconds for one message of ``n_bytes``; 0.0 for none, since no message is sent."""
        if n_bytes <= 0:
            return 0.0
        return self.latency_us * 1e-3 + n_bytes / (self.bandwidth_gb_s * 1e6)


@dataclass(frozen=True)
class Device:
    """One device. ``id``: ``node:index``, the index counting the node's devices from 0 in file order."""

    id: str
    node: str
    kind: DeviceKind


@dataclass(frozen=True)
class Node:
    """One machine. ``link``: between its devices; ``address``: host name or IP that others reach it by, or None."""

    name: str
    devices: tuple[Device, ...]
    link: Link
    address: str | None = None


@dataclass(frozen=True)
class Emulate:
    """CPU processes pace themselves: computing or sending takes at least ``time_scale`` x its predicted time."""

    time_scale: float = 1.0


SAME_DEVICE = Link("same device", math.inf, 0.0)


@dataclass(frozen=True)
class Cluster:
    """All nodes, in file order, and the ``network`` between them (the node's own link if there is one node only)."""

    name: str
    nodes: tuple[Node, ...]
    network: Link
    emulate: Emulate | None = None

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """All devices in file order."""
        return tuple(device for node in self.nodes for device in node.devices)

    def device(self, device_id: str) -> Device:
        """The device with that id; `KeyError` if there is none."""
        return self._devices_by_id[device_id]

    def node(self, name: str) -> Node:
        """The node with that name; `KeyError` if there is none."""
        return self._nodes_by_name[name]

    def link_between(self, a: Device, b: Device) -> Link:
        """The link a message from ``a`` to ``b`` takes: none at all, the node's, or the network."""
        if a.id == b.id:
            return SAME_DEVICE
        return self.node(a.node).link if a.node == b.node else self.network

    def kinds(self) -> tuple[DeviceKind, ...]:
        """The distinct kinds, in file order."""
        return tuple({device.kind.name: device.kind for device in self.devices}.values())

    def to_dict(self) -> dict[str, Any]:
        """A cluster file's content that `from_dict` reads back to an equal cluster, whatever the catalogue says then.

        Plain JSON: an infinite bandwidth is the text ``.inf``.
        """
        nodes = []
        for node in self.nodes:
            names = [device.kind.name for device in node.devices]
            entry: dict[str, Any] = {
                "name": node.name,
                "devices": [{name: len(list(run))} for name, run in groupby(names)],
                "link": _link_dict(node.link),
            }
            if node.address is not None:
                entry["address"] = node.address
            nodes.append(entry)
        kinds = {kind.name: _kind_dict(kind) for kind in self.kinds()}
        return {
            "name": self.name,
            "nodes": nodes,
            "network": _link_dict(self.network),
            "kinds": kinds,
            "emulate": asdict(self.emulate) if self.emulate else None,
        }

    @classmethod
    def from_dict(cls, content: object, where: str = "cluster") -> Cluster:
        """A cluster from a cluster file's content; ``where`` names the file. Raises `ClusterError` HP203-HP208."""
        from hetpipe_compiler.ir.cluster_file import build_cluster

        return build_cluster(content, where)

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a cluster file. Raises `ClusterError` HP201-HP208."""
        from hetpipe_compiler.ir.config_file import read_yaml

        path = Path(path)
        return cls.from_dict(read_yaml(path, "docs/cluster.md"), str(path))

    def digest(self) -> str:
        """SHA-256 of the resolved content: equal for files that differ in spelling, units or key order only."""
        content = self.to_dict()
        for kind in content["kinds"].values():
            del kind["source"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @cached_property
    def _devices_by_id(self) -> dict[str, Device]:
        return {device.id: device for device in self.devices}

    @cached_property
    def _nodes_by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}


def _kind_dict(kind: DeviceKind) -> dict[str, Any]:
    figures = {k: v for k, v in asdict(kind).items() if k not in ("name", "efficiencies")}
    if kind.efficiencies:
        figures["efficiencies"] = {
            name: {"compute": e.compute, "memory": e.memory} | ({"serial": e.serial} if e.serial else {})
            for name, e in kind.efficiencies
        }
    return figures


def _link_dict(link: Link) -> dict[str, Any]:
    # JSON has no infinity, and pydantic would write null for it.
    bandwidth = ".inf" if math.isinf(link.bandwidth_gb_s) else link.bandwidth_gb_s
    return {"name": link.name, "bandwidth_gb_s": bandwidth, "latency_us": link.latency_us}
