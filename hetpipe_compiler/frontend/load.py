"""Load a workload from the user's model.py."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetpipe_compiler.errors import ClusterError, WorkloadError
from hetpipe_compiler.ir.config_file import parse_yaml
from hetpipe_compiler.ir.workload import Workload
from hetpipe_compiler.user_code import USER_ERRORS, telling, told, user_line


@dataclass(frozen=True)
class LoadedWorkload:
    """A workload with where it came from.

    Attributes:
        path: The file.
        settings: The ``--set`` values that ``workload()`` was called with.
        digest: SHA-256 over the file's bytes and the settings: two equal digests mean the same job.
    """

    workload: Workload
    path: Path
    settings: dict[str, Any]

    @property
    def digest(self) -> str:
        return workload_digest(self.path, self.settings)

    def build(self, seed: int) -> Any:
        """A new model, all random numbers of its constructor drawn from ``seed``: torch's, Python's and NumPy's.

        So one that is built to be looked at is the one that is built to have its weights. Python's and NumPy's go on
        from where they were afterwards.
        """
        import numpy as np
        import torch

        of_python, of_numpy = random.getstate(), np.random.get_state()
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            return self.workload.model()
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def workload_digest(path: Path, settings: dict[str, Any]) -> str:
    """SHA-256 over a model.py and its settings."""
    text = path.read_bytes() + json.dumps(settings, sort_keys=True).encode()
    return hashlib.sha256(text).hexdigest()


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """``["batch_size=64"]`` -> ``{"batch_size": 64}``; values are read as YAML. Raises `WorkloadError` HP102."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise WorkloadError(
                "HP102", f"'{pair}' is not NAME=VALUE", where="--set", hint="for example --set batch_size=64"
            )
        try:
            settings[name] = parse_yaml(value, "--set")
        except ClusterError:  # what is no YAML is a text
            settings[name] = value
        try:
            if repr(json.loads(json.dumps(settings[name]))) != repr(settings[name]):  # as the plan holds it
                raise TypeError
        except (TypeError, ValueError):
            kind = type(settings[name]).__name__
            message = f"{name}: '{value[:80]}' is read as a {kind}, which a plan cannot hold"
            raise WorkloadError("HP102", message, where="--set", hint="put it in quotes to have it as a text") from None
    return settings


def load_workload(path: Path, settings: dict[str, Any] | None = None) -> LoadedWorkload:
    """Run ``path`` and call its ``workload(**settings)``.

    ``sys.exit`` in a user's code is an error like any other, here and wherever his functions are called: it would end
    our command as if all were done.

    Raises:
        WorkloadError: HP101 no such file; HP103 the file raises; HP104 no ``workload`` function in it; HP102 a setting
            that it does not take; HP105 it returns no `Workload`.
    """
    settings = settings or {}
    if not path.is_file():
        raise WorkloadError(
            "HP101", "no such file", where=str(path), hint="give the path of a model.py that defines workload()"
        )
    # The user's siblings (import layers) resolve as they do for `python model.py`.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = f"_hetpipe_workload_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise WorkloadError("HP101", "not a Python file", where=str(path), hint="its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        raise WorkloadError(
            "HP103",
            f"cannot import '{error.name}'",
            where=user_line(error, path),
            hint="install it, or, if it is a file beside your model.py, pass --workload PATH to hetpipe-run",
        ) from error
    except SyntaxError as error:
        raise WorkloadError("HP103", f"syntax error: {error.msg}", where=f"{error.filename}:{error.lineno}") from error
    except USER_ERRORS as error:
        hint = f"see what it says in plain Python: python {path}"
        raise WorkloadError("HP103", told(error), where=user_line(error, path), hint=hint) from error
    make = getattr(module, "workload", None)
    if not callable(make):
        raise WorkloadError(
            "HP104", "defines no function workload()", where=str(path), hint="see examples/digits/model.py"
        )
    try:
        inspect.signature(make).bind(**settings)
    except TypeError as error:
        raise WorkloadError(
            "HP102", f"workload{inspect.signature(make)}: {error}", where="--set", hint="name one of its parameters"
        ) from None
    with telling(WorkloadError, "HP103", "workload() raised", path, hint="call it once in plain Python"):
        workload = make(**settings)
    if not isinstance(workload, Workload):
        raise WorkloadError(
            "HP105",
            f"workload() returned {type(workload).__name__}, not a Workload",
            where=str(path),
            hint="return hetpipe_compiler.Workload(model=..., example=..., optimizer=...)",
        )
    return LoadedWorkload(workload, path, settings)
