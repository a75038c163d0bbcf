"""The border between our commands and the shell: every command's ``main`` goes through `run_app`.

==============================================  ===========  ====================================================
what ends the command                           exit status  what is printed on stderr
==============================================  ===========  ====================================================
nothing                                         0
a wrong option (typer's usage errors)           2            usage
`HetpipeError`                                  2            one error: code, place, amount, next step
``sys.exit`` and the like in a user's function  2            the same: HP127
Ctrl-C                                          130          interrupted
nobody reads what is printed (``| head``)       141
no room for what is printed (a full disk)       2            one error: HP444
any other exception                             1            "this is a bug in hetpipe-compiler" and its traceback
==============================================  ===========  ====================================================
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import platform
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import typer

from hetpipe_compiler.errors import ArtifactError, HetpipeError, WorkloadError
from hetpipe_compiler.user_code import told, user_place


def single_command(function: Callable[..., Any]) -> typer.Typer:
    """A typer application with one command and nothing else (no completion commands, no decorated tracebacks)."""
    import typer

    from hetpipe_compiler.cli.grouped_help import GroupedHelp

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

    @functools.wraps(function)
    def ended(*args: Any, **options: Any) -> Any:
        """Here and not around typer, which has statuses of its own for some exceptions."""
        with _statuses():
            try:
                return function(*args, **options)
            except (Exception, KeyboardInterrupt):
                raise
            except BaseException as error:  # none of ours: a user's function raised it
                raise WorkloadError(
                    "HP127",
                    f"your code ended the program: {told(error)}",
                    where=user_place(error),
                    hint="raise an Exception there if something is wrong, else return",
                ) from error

    app.command(cls=GroupedHelp)(ended)
    return app


def run_app(app: Callable[[], Any]) -> NoReturn:
    """Call ``app`` (a `typer.Typer` or any function) and end the process with the status of the table above."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that has no such letter shows ? and the command goes on
            stream.reconfigure(errors="replace")
    with _statuses():
        app()
    raise SystemExit(0)


@contextlib.contextmanager
def _statuses() -> Iterator[None]:
    """Turn exceptions into the statuses above, with what is to be printed."""
    import typer

    try:
        yield
        if sys.stdout is not None:  # None where the caller closed it
            sys.stdout.flush()
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except HetpipeError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        _drop_stdout()
        raise SystemExit(141) from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            _drop_stdout()
            place = str(error.filename) if error.filename else "output"
            full = ArtifactError("HP444", f"cannot write: {error.strerror}", where=place, hint="make room there")
            print(full, file=sys.stderr)
            raise SystemExit(2) from None
        print(_bug_report(error), file=sys.stderr)
        raise SystemExit(1) from None


def _drop_stdout() -> None:
    """Let what is still to be printed vanish: Python flushes it once more at its end."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _bug_report(error: Exception) -> str:
    from hetpipe_compiler import __version__

    trace = "".join(traceback.format_exception(error))
    return (
        f"{trace}\nthis is a bug in hetpipe-compiler {__version__}: {told(error)}\n"
        f"  next: please report it with the lines above, your command and your files"
        f" (Python {platform.python_version()}, {platform.platform()})"
    )
