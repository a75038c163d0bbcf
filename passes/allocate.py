"""Allocation: which devices make up which virtual worker (the paper's resource allocator).

All virtual workers run the same number of minibatches in flight; groups may have unequal sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetpipe_compiler.errors import ClusterError
from hetpipe_compiler.ir.cluster import Cluster, Device
from hetpipe_compiler.ir.config_file import Loc, place, read_yaml, shown, suggestion

_EXAMPLE = "virtual_workers: [[n0:0, n1:0], [n0:1, n1:1]]"
_KEYS = ("virtual_workers", "ordered")


@dataclass(frozen=True)
class Group:
    """The devices of one virtual worker.

    ``ordered``: the stages run on these devices in this order, though some may have no stage; otherwise the partitioner
    chooses the order.
    """

    devices: tuple[Device, ...]
    ordered: bool = False


@dataclass(frozen=True)
class RunnerUp:
    """Another allocation that was planned, and its rate."""

    policy: str
    samples_per_s: float


@dataclass(frozen=True)
class Allocation:
    """What `allocate` decides.

    Attributes:
        policy: ``NP``, ``ED``, ``HD``, the name of the groups file, or what ``auto`` chose.
        groups: One a virtual worker.
        unused: Devices in no group, in file order.
        runners_up: What ``auto`` planned besides, best first.
        bound_samples_per_s: What no allocation can exceed, where ``auto`` computed it.
    """

    policy: str
    groups: tuple[Group, ...]
    unused: tuple[Device, ...]
    runners_up: tuple[RunnerUp, ...] = field(default=(), repr=False)
    bound_samples_per_s: float | None = field(default=None, repr=False)


def allocate(cluster: Cluster, policy: str | Path) -> Allocation:
    """Group the cluster's devices by a named policy (any case), or by a groups file.

    Raises:
        ClusterError: HP201, HP202 the groups file cannot be read; HP210 no such policy; HP211 the groups file has
            another form; HP212 a device that the cluster does not have; HP213 a device named twice; HP214 a group
            without devices.
    """
    name = str(policy).upper()
    if name in POLICIES:
        groups = [Group(tuple(sorted(devices, key=cluster.devices.index))) for devices in POLICIES[name](cluster)]
        return _allocation(cluster, name, groups)
    path = Path(policy)
    if path.suffix.lower() not in (".yaml", ".yml") and not path.is_file():
        hint = suggestion(name, [*POLICIES, "auto"], f"give a groups file (.yaml) with {_EXAMPLE}")
        raise ClusterError("HP210", f"no policy '{policy}'", where="--policy", hint=hint)
    return _allocation(cluster, path.name, read_groups(read_yaml(path, "docs/cluster.md"), cluster, str(path)))


def _allocation(cluster: Cluster, policy: str, groups: Iterable[Group]) -> Allocation:
    groups = tuple(groups)
    used = {device.id for group in groups for device in group.devices}
    return Allocation(policy, groups, tuple(device for device in cluster.devices if device.id not in used))


def node_partition(cluster: Cluster) -> list[list[Device]]:
    """NP.

    1. A node is a virtual worker, whatever devices it has.
    """
    return [list(node.devices) for node in cluster.nodes]


def equal_distribution(cluster: Cluster) -> list[list[Device]]:
    """ED: the i-th virtual worker takes the i-th device of every node.

    Where the nodes have the same number of devices, all of one kind, that is all. In general:

    1. The number N of virtual workers lies between the smallest and the largest number of devices of a node, and is at
       least half their mean. Of these, N is the one whose virtual workers come out most alike in power (FP32 rate x
       ``compute_efficiency``); the largest of equally good ones.
    2. Each node in file order hands out rounds of N devices, its strongest first, one to each virtual worker: the
       strongest device of a round to the virtual worker with the least power so far, of equals the lowest index.
    3. What does not make a full round on its node is handed out last, strongest first, each device to the virtual
       worker with the least power then. So every device is used.
    """
    counts = [len(node.devices) for node in cluster.nodes]
    low = max(min(counts), -(-sum(counts) // (2 * len(counts))))
    candidates = [_deal_nodes(cluster, n) for n in range(max(counts), low - 1, -1)]
    return min(candidates, key=_unevenness)


def _deal_nodes(cluster: Cluster, n: int) -> list[list[Device]]:
    workers: list[list[Device]] = [[] for _ in range(n)]
    rest: list[Device] = []
    for node in cluster.nodes:
        devices = sorted(node.devices, key=_power, reverse=True)
        rounds = len(devices) // n
        for first in range(0, rounds * n, n):
            weakest_first = sorted(workers, key=_total_power)
            for worker, device in zip(weakest_first, devices[first : first + n], strict=True):
                worker.append(device)
        rest += devices[rounds * n :]
    _deal_rest(workers, rest)
    return workers


def hybrid_distribution(cluster: Cluster) -> list[list[Device]]:
    """HD: kinds in pairs of similar total power and memory, each pair split evenly.

    1. A kind's strength is total FP32 rate x total memory over all its devices. (The rate alone would pair the TITAN
       RTX with the P4000; the paper pairs by power and memory, which gives VVQQ and RRGG.)
    2. Kinds are sorted by strength and paired from both ends: the strongest with the weakest, the second strongest
       with the second weakest. With an odd number the middle one stays alone.
    3. A pair becomes as many virtual workers as nodes hold its devices. Pairs come in the order in which the file first
       names one of their kinds.
    4. Each of a pair's n virtual workers takes an equal run, in file order, of each kind's devices, so that devices of
       one node stay together. What is over goes, strongest first, to the virtual worker of the pair with the least
       power then. So every device is used.
    """
    devices = {kind.name: [d for d in cluster.devices if d.kind.name == kind.name] for kind in cluster.kinds()}
    ranked = sorted(devices, key=lambda name: _strength(devices[name]), reverse=True)
    pairs = [{name, ranked[-1 - i]} for i, name in enumerate(ranked[: (len(ranked) + 1) // 2])]
    workers: list[list[Device]] = []
    for pair in sorted(pairs, key=lambda pair: min(list(devices).index(name) for name in pair)):
        workers += _split_evenly([devices[name] for name in devices if name in pair])
    return workers


def _split_evenly(kinds: Sequence[Sequence[Device]]) -> list[list[Device]]:
    n = len({device.node for devices in kinds for device in devices})
    workers: list[list[Device]] = [[] for _ in range(n)]
    rest: list[Device] = []
    for devices in kinds:
        share = len(devices) // n
        for index, worker in enumerate(workers):
            worker += devices[index * share : (index + 1) * share]
        rest += devices[n * share :]
    _deal_rest(workers, rest)
    return workers


def _deal_rest(workers: list[list[Device]], rest: Iterable[Device]) -> None:
    for device in sorted(rest, key=_power, reverse=True):
        min(workers, key=_total_power).append(device)


def _power(device: Device) -> float:
    return device.kind.fp32_tflops * device.kind.compute_efficiency


def _total_power(devices: Iterable[Device]) -> float:
    # Rounded, because equal groups must tie even if their figures were added in another order.
    return round(sum(map(_power, devices)), 9)


def _strength(devices: Sequence[Device]) -> float:
    return sum(d.kind.fp32_tflops for d in devices) * sum(d.kind.memory_bytes for d in devices)


def _unevenness(workers: Sequence[Sequence[Device]]) -> float:
    """Relative spread of power: 0.0 for equal virtual workers."""
    powers = [_total_power(worker) for worker in workers]
    return round((max(powers) - min(powers)) / max(powers), 9)


POLICIES: dict[str, Callable[[Cluster], list[list[Device]]]] = {
    "NP": node_partition,
    "ED": equal_distribution,
    "HD": hybrid_distribution,
}


def read_groups(content: object, cluster: Cluster, where: str) -> list[Group]:
    """The groups that a groups file's content names. ``where`` names the file. Raises `ClusterError` HP211-HP214."""
    if not isinstance(content, dict):
        raise _error("HP211", f"expected a mapping, got {shown(content)}", where, ())
    for key in content:
        if key not in _KEYS:
            raise _error("HP211", f"unknown key '{key}'", where, (str(key),), suggestion(str(key), _KEYS))
    ordered = content.get("ordered", False)
    if not isinstance(ordered, bool):
        raise _error(
            "HP211", f"expected true or false, got {shown(ordered)}", where, ("ordered",), "true keeps the order"
        )
    workers = content.get("virtual_workers")
    if not isinstance(workers, list) or not workers:
        message = f"expected a list of lists of device ids, got {shown(workers or None)}"
        raise _error("HP211", message, where, ("virtual_workers",))
    groups: list[Group] = []
    first_places: dict[str, str] = {}
    for w, ids in enumerate(workers):
        loc: Loc = ("virtual_workers", w)
        if not isinstance(ids, list):
            raise _error("HP211", f"expected a list of device ids, got {shown(ids)}", where, loc)
        if not ids:
            raise _error("HP214", "a virtual worker without devices", where, loc)
        devices = [_device(name, cluster, where, (*loc, i), first_places) for i, name in enumerate(ids)]
        groups.append(Group(tuple(devices), ordered))
    return groups


def _device(name: object, cluster: Cluster, where: str, loc: Loc, first_places: dict[str, str]) -> Device:
    if not isinstance(name, str):
        raise _error(
            "HP211", f"expected a device id, got {shown(name)}", where, loc, "ids are node:index, for example n0:0"
        )
    try:
        device = cluster.device(name)
    except KeyError:
        hint = suggestion(name, [device.id for device in cluster.devices])
        raise _error("HP212", f"the cluster '{cluster.name}' has no device '{name}'", where, loc, hint) from None
    if name in first_places:
        raise _error("HP213", f"'{name}' is also {first_places[name]}", where, loc, "use each device once")
    first_places[name] = place("", loc).removeprefix(": ")
    return device


def _error(code: str, message: str, where: str, loc: Loc, hint: str = f"for example {_EXAMPLE}") -> ClusterError:
    return ClusterError(code, message, where=place(where, loc), hint=hint)
