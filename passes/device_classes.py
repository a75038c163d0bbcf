"""Device classes: what the partition search sees of a virtual worker's devices.

Devices of the same kind on the same node are interchangeable, so an order of devices is an order of *classes*, each
used at most as often as it has devices. In a group with ``ordered`` each device is a class of its own and the classes
keep the group's order. Two groups with equal `DeviceClasses.key` have the same plans.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetpipe_compiler.errors import PlanningError
from hetpipe_compiler.ir.blocks import BlockChain
from hetpipe_compiler.ir.cluster import Cluster, Device, DeviceKind, Link
from hetpipe_compiler.passes.allocate import Group

#: More tails than this are not searched.
MAX_TAILS = 200_000


@dataclass(frozen=True)
class DeviceClasses:
    """The classes of one group, in a canonical order, and the distinct links between them.

    Attributes:
        members: Per class, its devices in the group's order.
        ordered: Whether stages must follow the order of the classes.
        links: Distinct links, by figures.
        link_between: ``[a, b]``: index into ``links`` for neighbours of classes a and b; -1 where there are no such
            two.
    """

    members: tuple[tuple[Device, ...], ...]
    ordered: bool
    links: tuple[Link, ...]
    link_between: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.members)

    @property
    def kinds(self) -> tuple[DeviceKind, ...]:
        """The kind of each class."""
        return tuple(devices[0].kind for devices in self.members)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return sum(map(len, self.members))

    @property
    def key(self) -> Hashable:
        """Equal for groups that have the same plans."""
        links = tuple((link.bandwidth_gb_s, link.latency_us) for link in self.links)
        counts = tuple(map(len, self.members))
        return self.ordered, self.kinds, counts, links, self.link_between.tobytes()

    def assign(self, classes: tuple[int, ...]) -> tuple[Device, ...]:
        """A device for each stage, given the stages' classes: the members of a class in turn."""
        waiting = [iter(devices) for devices in self.members]
        return tuple(next(waiting[index]) for index in classes)


def device_classes(group: Group, cluster: Cluster, chain: BlockChain) -> DeviceClasses:
    """Sort the devices of ``group`` into classes. Raises HP304 if the chain has no times for a device's kind."""
    for device in group.devices:
        if device.kind.name not in chain.forward_ms or device.kind.name not in chain.backward_ms:
            raise PlanningError(
                "HP304",
                f"{chain.name} has no times for device kind '{device.kind.name}';"
                f" it has {', '.join(sorted(chain.forward_ms))}",
                where=device.id,
                hint="add the kind's forward_ms and backward_ms to the profile, or group other devices",
            )
    members = [(device,) for device in group.devices] if group.ordered else _interchangeable(group, cluster)
    count = len(members)
    figures: dict[tuple[float, float], int] = {}
    links: list[Link] = []
    between = np.full((count, count), -1, dtype=np.int64)
    for a in range(count):
        for b in range(count):
            if a == b and len(members[a]) == 1:
                continue
            link = cluster.link_between(members[a][0], members[b][-1])
            index = figures.setdefault((link.bandwidth_gb_s, link.latency_us), len(links))
            if index == len(links):
                links.append(link)
            between[a, b] = index
    return DeviceClasses(tuple(members), group.ordered, tuple(links), between)


def _interchangeable(group: Group, cluster: Cluster) -> list[tuple[Device, ...]]:
    """Devices by (kind, node); classes sorted by kind, then larger first, then by node, in the cluster file's order."""
    classes: dict[tuple[str, str], list[Device]] = {}
    for device in group.devices:
        classes.setdefault((device.kind.name, device.node), []).append(device)
    kinds = [kind.name for kind in cluster.kinds()]
    nodes = [node.name for node in cluster.nodes]

    def rank(item: tuple[tuple[str, str], list[Device]]) -> tuple[int, int, int]:
        (kind, node), devices = item
        return kinds.index(kind), -len(devices), nodes.index(node)

    return [tuple(devices) for _, devices in sorted(classes.items(), key=rank)]


@dataclass(frozen=True)
class Tails:
    """The device side of the search's states, shortest tails first.

    A *tail* is the rest of a pipeline: how many devices of each class it uses, and the class of its first stage.

    Attributes:
        first_class, stages: Per tail, the class of its first stage and its number of stages.
        starts, successors: Tail t minus its first stage can be any of ``successors[starts[t]:starts[t + 1]]``.
        longer: ``[tail, class]``: the tail made by a stage of that class before this one, -1 where there is none.
        after, before: ``[tail, class]``: devices that the tail can use at most, and that can stand before it.
    """

    first_class: npt.NDArray[np.int64]
    stages: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    successors: npt.NDArray[np.int64]
    longer: npt.NDArray[np.int64]
    after: npt.NDArray[np.int64]
    before: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.first_class)


def tails(classes: DeviceClasses, blocks: int) -> Tails:
    """Enumerate the tails that at most ``blocks`` stages can have. Raises HP302 if there are too many to search."""
    if _count_tails(classes) > MAX_TAILS:
        raise PlanningError(
            "HP302",
            f"{classes.devices} devices in {len(classes)} classes (kind and node) can be used in"
            f" {_count_tails(classes):.1e} ways, the limit is {MAX_TAILS:.1e}",
            where=f"virtual worker of {classes.members[0][0].id}",
            hint="make smaller virtual workers, or fix the devices' order with a groups file that says 'ordered: true'",
        )
    counts = tuple(map(len, classes.members))
    rows = _ordered_tails(len(classes)) if classes.ordered else _free_tails(counts)
    rows = [row for row in rows if row[1] <= blocks]
    starts = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row[2]) for row in rows], out=starts[1:])
    first_class = np.array([row[0] for row in rows], dtype=np.int64)
    successors = np.array([tail for row in rows for tail in row[2]], dtype=np.int64)
    longer = np.full((len(rows), len(classes)), -1, dtype=np.int64)
    of_tail = np.repeat(np.arange(len(rows)), np.diff(starts))
    longer[successors, first_class[of_tail]] = of_tail
    after = np.array([row[3] for row in rows], dtype=np.int64)
    before = np.arange(len(classes)) < first_class[:, None] if classes.ordered else np.array(counts) - after
    return Tails(
        first_class=first_class,
        stages=np.array([row[1] for row in rows], dtype=np.int64),
        starts=starts,
        successors=successors,
        longer=longer,
        after=after,
        before=before.astype(np.int64),
    )


def _count_tails(classes: DeviceClasses) -> int:
    if classes.ordered:
        return len(classes) ** 2
    vectors = 1
    for devices in classes.members:
        vectors *= len(devices) + 1
    return vectors * len(classes)


_Row = tuple[int, int, list[int], tuple[int, ...]]


def _free_tails(counts: tuple[int, ...]) -> list[_Row]:
    """(first class, stages, successors, devices used) for every use of the classes up to ``counts``, in any order."""
    used_up = np.array(list(np.ndindex(*(count + 1 for count in counts))), dtype=np.int64)
    order = np.lexsort((*used_up.T[::-1], used_up.sum(axis=1)))
    rows: list[_Row] = []
    tails_of: dict[tuple[int, ...], list[int]] = {}
    for used in (tuple(int(count) for count in used_up[index]) for index in order):
        mine = tails_of[used] = []
        for first, count in enumerate(used):
            if count:
                rest = (*used[:first], count - 1, *used[first + 1 :])
                mine.append(len(rows))
                rows.append((first, sum(used), tails_of[rest], used))
    return rows


def _ordered_tails(count: int) -> list[_Row]:
    """The same where a stage's device must come later in the order than the one before."""
    rows: list[_Row] = []
    previous: dict[int, int] = {}
    for stages in range(1, count + 1):
        current: dict[int, int] = {}
        for first in range(count - stages + 1):
            current[first] = len(rows)
            rest = [tail for later, tail in previous.items() if later > first]
            rows.append((first, stages, rest, (0,) * first + (1,) * (count - first)))
        previous = current
    return rows
