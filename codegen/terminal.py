"""The look that all tables for terminals share."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text


def simple_table() -> Table:
    """An empty table without frames."""
    return Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)


def titled(title: Text, table: Table) -> Group:
    """The table below its title, which takes the terminal's whole width (rich would break it at the table's)."""
    return Group(title, table) if title else Group(table)


def plain(renderables: Sequence[RenderableType], width: int) -> str:
    """What a terminal of ``width`` columns would show, without colours and trailing blanks."""
    console = Console(width=width, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(Group(*renderables))
    return "".join(line.rstrip() + "\n" for line in capture.get().splitlines())
