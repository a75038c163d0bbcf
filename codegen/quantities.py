"""How numbers and lists of ids are written for people: the one place, so that tables, pictures and errors agree.

Bytes use decimal units (1 GB = 1e9 bytes), as the cluster file does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def digits(value: float) -> str:
    """Three significant digits without an exponent: 0.0123, 1.23, 12.3, 123, 1234."""
    if value == 0:
        return "0"
    magnitude = abs(value)
    for limit, decimals in ((99.95, 0), (9.995, 1), (0.9995, 2), (0.09995, 3)):
        if magnitude >= limit:
            return f"{value:.{decimals}f}"
    return f"{value:.3g}" if magnitude < 1e-4 else f"{value:.4f}"


def counted(count: int, one: str, many: str | None = None) -> str:
    """``1 minibatch``, ``2 minibatches``; ``many`` where it is not ``one`` with an s (or es after a hiss)."""
    return f"{count} {one if count == 1 else many or one + ('es' if one.endswith(('s', 'ch')) else 's')}"


def percent(share: float) -> str:
    """``12 %``; one decimal below ten."""
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.1f} %"


def bytes_text(count: int) -> str:
    """``12.8 MB``; whole bytes below 1000."""
    for unit, size in _UNITS:
        if count >= 0.9995 * size:
            return f"{digits(count / size)} {unit}"
    return f"{count} B"


def bytes_of(used: int, capacity: int) -> str:
    """``3.20/12.0 GB``: both in the capacity's unit; ``24.7 kB/4.00 GB`` where less than a thousandth of it is used."""
    for unit, size in _UNITS:
        if capacity >= size:
            if 0 < used < size / 1000:
                return f"{bytes_text(used)}/{bytes_text(capacity)}"
            return f"{digits(used / size)}/{digits(capacity / size)} {unit}"
    return f"{used}/{capacity} B"


def bar(fraction: float, cells: int) -> str:
    """A bar of ``cells`` characters filled by ``fraction`` (clipped to 0..1; anything above 0 shows)."""
    filled = min(cells, max(0, round(fraction * cells)))
    if fraction > 0:
        filled = max(filled, 1)
    return "█" * filled + "░" * (cells - filled)


def number_ranges(numbers: Iterable[int]) -> str:
    """``0-3, 5``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def device_ranges(ids: Sequence[str], limit: int = 2) -> str:
    """``n0:0-3``; ids of more than ``limit`` nodes are cut short: ``n0:0, n1:0 +2``."""
    by_node: dict[str, list[int]] = {}
    for device in ids:
        node, _, index = device.rpartition(":")
        by_node.setdefault(node, []).append(int(index))
    parts = [f"{node}:{number_ranges(indices).replace(' ', '')}" for node, indices in by_node.items()]
    if len(parts) <= limit:
        return ", ".join(parts)
    shown = len(by_node[next(iter(by_node))])
    return f"{parts[0]} +{len(ids) - shown}"
