"""The look that all tables for terminals share."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text


def simple_table(title: Text) -> Table:
    """An empty table without frames."""
    return Table(title=title, title_justify="left", title_style="none", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)


def plain(renderables: Sequence[RenderableType], width: int) -> str:
    """What a terminal of ``width`` columns would show, without colours and trailing blanks."""
    console = Console(width=width, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(Group(*renderables))
    return "".join(line.rstrip() + "\n" for line in capture.get().splitlines())
