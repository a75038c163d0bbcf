"""The border between our commands and the shell: every command's ``main`` goes through `run_app`.

==============================================  ===========  ====================================================
what ends the command                           exit status  what is printed on stderr
==============================================  ===========  ====================================================
nothing                                         0
a wrong option (typer's usage errors)           2            usage
`HetpipeError`                                  2            one error: code, place, amount, next step
``sys.exit`` and the like in a user's function  2            the same: HP127
Ctrl-C, SIGTERM, a terminal that is closed      130          interrupted
nobody reads what is printed (``| head``)       141
no room for what is printed (a full disk)       2            one error: HP444
a file that the system refuses (`_REFUSALS`)    2            one error: HP412
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
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import typer

from hetpipe_compiler.cli.interrupts import interrupts
from hetpipe_compiler.errors import ArtifactError, HetpipeError, WorkloadError
from hetpipe_compiler.user_code import told, user_place

#: Why the system does not let us use a file, whatever we do: no bug of ours.
_REFUSALS = (
    *(errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ELOOP),
    *(errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE),
)


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
                _check_names(options)
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
    with interrupts(), _statuses():
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
        if isinstance(error, OSError) and error.errno in _REFUSALS:
            if not error.filename:
                _drop_stdout()
            print(_refusal(error), file=sys.stderr)
            raise SystemExit(2) from None
        print(_bug_report(error), file=sys.stderr)
        raise SystemExit(1) from None


def _refusal(error: OSError) -> ArtifactError:
    if error.filename:
        hint = "use another file or folder, or make that one usable"
        return ArtifactError("HP412", f"the system refuses it: {error.strerror}", where=str(error.filename), hint=hint)
    return ArtifactError("HP444", f"cannot write: {error.strerror}", where="output", hint="make room there")


def _check_names(options: dict[str, Any]) -> None:
    """Refuse a name that is not UTF-8, as what we write it into is (plan.json, run.json). Raises HP412."""
    for value in options.values():
        if isinstance(value, (str, Path)) and any("\ud800" <= letter <= "\udfff" for letter in str(value)):
            hint = "rename it: UTF-8 is what plans are written in"
            raise ArtifactError("HP412", "its name is not UTF-8", where=ascii(str(value)), hint=hint)


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
