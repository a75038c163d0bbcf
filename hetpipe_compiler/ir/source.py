"""Where a node of the captured graph comes from, for people."""

from __future__ import annotations

import inspect
import os
import re
import sysconfig
from pathlib import Path

import torch
from torch import fx

_TORCH = str(Path(inspect.getfile(torch)).parent) + os.sep
#: Of nodes that it adds itself, export tells the place so.
_TOLD_BY_EXPORT = "torch/fx/passes/"
_OURS = str(Path(__file__).parents[1]) + os.sep
_LIBRARY, _INSTALLED = sysconfig.get_path("stdlib"), {"site-packages", "dist-packages"}


def module_path(node: fx.Node) -> str:
    """The user's module that the node comes from, such as ``features.0``; '' for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed([p for p, _ in stack.values()]), "") if stack else ""
    return str(path).removeprefix("model").removeprefix(".") if not str(path).startswith("_empty") else ""


def source_place(node: fx.Node, root: Path) -> str:
    """``model.py:31``: the innermost line of the user's (or a library's) code outside torch that made the node; '' if
    unknown."""
    frames = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
    for name, line in reversed(frames):
        path = Path(name)
        if is_internal(name):
            continue
        return f"{short_path(path, root)}:{line}"
    return ""


def is_internal(name: str) -> bool:
    """Whether a frame's file is torch's, ours, or none at all: not where the model is written."""
    return name.startswith((_TORCH, _OURS, _TOLD_BY_EXPORT, "<"))


def is_pythons_own(name: str) -> bool:
    """Whether a frame's file is one of Python's standard library."""
    return name.startswith("<frozen ") or (name.startswith(_LIBRARY) and _INSTALLED.isdisjoint(Path(name).parts))


def is_installed(name: str) -> bool:
    """Whether a frame's file is a library's, not one of the user's own."""
    return not _INSTALLED.isdisjoint(Path(name).parts)


def short_path(path: Path, root: Path) -> str:
    """A path without the machine's part: below the user's folder, below site-packages, or just the name."""
    if path.is_relative_to(root):
        return str(path.relative_to(root))
    if "site-packages" in path.parts:
        return "/".join(path.parts[path.parts.index("site-packages") + 1 :])
    return path.name


def told_place(file: Path, line: int, path: Path) -> str:
    """``FILE:LINE``: the user's file ``path`` as the user calls it, another one without the machine's part."""
    own = path.resolve()
    return f"{path if file.resolve() == own else short_path(file, own.parent)}:{line}"
