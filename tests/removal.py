"""Take a rule out of the code, to see whether a test misses it.

A function is compiled again from its changed source, and only its code object is exchanged: everything that holds the
function then runs without the rule.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

#: Names a file of rules to take out in every Python process that starts.
ENVIRONMENT = "HETPIPE_REMOVED_RULE"
#: A context that nobody holds would end.
_FOR_GOOD: list[Any] = []


@dataclass(frozen=True)
class Removal:
    """A rule, and how it goes.

    Attributes:
        function: ``package.module:function``, ``...:Class.method``.
        rule: Text of it as it stands there; a text that is not there exactly ``times`` times is an error.
        instead: What stands there without it.
    """

    function: str
    rule: str
    instead: str
    times: int = 1


@contextlib.contextmanager
def without(*removals: Removal) -> Iterator[None]:
    """Run without some rules."""
    with contextlib.ExitStack() as stack:
        for removal in removals:
            stack.enter_context(_without(removal))
        yield


@contextlib.contextmanager
def without_in_children(folder: Path, *removals: Removal) -> Iterator[None]:
    """The same in Python processes that are started meanwhile. ``folder``: an empty one."""
    (folder / "rules.json").write_text(json.dumps([asdict(removal) for removal in removals]))
    (folder / "sitecustomize.py").write_text("import removal\nremoval.take_out()\n")
    paths = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    changed = {"PYTHONPATH": os.pathsep.join(p for p in paths if p), ENVIRONMENT: str(folder / "rules.json")}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def take_out() -> None:
    """For good, in a child process."""
    for entry in json.loads(Path(os.environ[ENVIRONMENT]).read_text()):
        taken = _without(Removal(**entry))
        taken.__enter__()
        _FOR_GOOD.append(taken)


def is_there(removal: Removal) -> bool:
    """Whether the function still says so."""
    return inspect.getsource(_find(removal.function)[0]).count(removal.rule) == removal.times


@contextlib.contextmanager
def _without(removal: Removal) -> Iterator[None]:
    function, module = _find(removal.function)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(removal.rule) == removal.times, f"{removal.function} no longer says {removal.rule!r}"
    # In a class, for methods that call super(). Decorators and defaults are evaluated again, in the function's module.
    text = "class Owner:\n" + textwrap.indent(source.replace(removal.rule, removal.instead), "    ")
    scope: dict[str, Any] = {}
    exec(compile(text, function.__code__.co_filename, "exec"), {**vars(module)}, scope)
    changed = _plain(vars(scope["Owner"])[function.__name__])
    assert changed.__code__.co_freevars == function.__code__.co_freevars, f"{removal.function} is a closure"
    before, function.__code__ = function.__code__, changed.__code__
    try:
        yield
    finally:
        function.__code__ = before


def _find(path: str) -> tuple[FunctionType, Any]:
    module_name, _, qualified = path.partition(":")
    module = importlib.import_module(module_name)
    *owners, last = qualified.split(".")
    owner = functools.reduce(getattr, owners, module)
    return _plain(vars(owner)[last]), module


def _plain(found: Any) -> FunctionType:
    """The function below decorators such as ``property`` and ``contextmanager``."""
    while not isinstance(found, FunctionType) or hasattr(found, "__wrapped__"):
        found = found.fget if isinstance(found, property) else getattr(found, "__wrapped__", None) or found.__func__
    return found
