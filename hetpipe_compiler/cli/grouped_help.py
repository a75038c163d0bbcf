"""``--help`` with the options under headings: the ``rich_help_panel`` that an option names, in plain text."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

#: Heading of options that name none; it has ``--help`` too.
_OTHERS = "Options"


class GroupedHelp(TyperCommand):
    """A command whose help lists the options of each heading together, in the order in which headings first appear."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the options to ``formatter``."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                heading = getattr(param, "rich_help_panel", None) or _OTHERS
                groups.setdefault("Arguments" if param.param_type_name == "argument" else heading, []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)
