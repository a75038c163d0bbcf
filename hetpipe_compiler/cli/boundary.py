"""The border between our commands and the shell: every command's ``main`` goes through `run_app`.

======================================  ===========  ==================================================
what ends the command                   exit status  what is printed on stderr
======================================  ===========  ==================================================
nothing                                 0
a wrong option (typer's usage errors)   2            usage
`HetpipeError`                          2            one error: code, place, amount, next step
Ctrl-C                                  130
any other exception                     1            "this is a bug in hetpipe-compiler" and its traceback
======================================  ===========  ==================================================
"""

from __future__ import annotations

import io
import platform
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import typer

from hetpipe_compiler.errors import HetpipeError


def single_command(function: Callable[..., Any]) -> typer.Typer:
    """A typer application with one command and nothing else (no completion commands, no decorated tracebacks)."""
    import typer

    from hetpipe_compiler.cli.grouped_help import GroupedHelp

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(cls=GroupedHelp)(function)
    return app


def run_app(app: Callable[[], Any]) -> NoReturn:
    """Call ``app`` (a `typer.Typer` or any function) and end the process with the status of the table above."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that has no such letter shows ? and the command goes on
            stream.reconfigure(errors="replace")
    try:
        app()
    except HetpipeError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        print(_bug_report(error), file=sys.stderr)
        raise SystemExit(1) from None
    raise SystemExit(0)


def _bug_report(error: Exception) -> str:
    from hetpipe_compiler import __version__

    trace = "".join(traceback.format_exception(error))
    return (
        f"{trace}\nthis is a bug in hetpipe-compiler {__version__}: {type(error).__name__}: {error}\n"
        f"  next: please report it with the lines above, your command and your files"
        f" (Python {platform.python_version()}, {platform.platform()})"
    )
