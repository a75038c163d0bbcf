"""Reading YAML that people write: one error a mistake, with the file, the place inside it and the nearest known name.

Used for cluster files and groups files. Places read as people would write them: ``c.yaml: nodes[1].devices.titan-x``.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from hetpipe_compiler.errors import ClusterError

Loc = tuple[int | str, ...]


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML's safe subset; a key given twice is an error, where PyYAML would keep the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key '{key}' is there twice", key_node.start_mark
                    )
                seen.add(key)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        return mapping


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text. Raises `ClusterError` HP202 with line and column (from 1) if it is not YAML."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        problem = error.problem or "not YAML"
        raise ClusterError("HP202", problem, where=place, hint="correct the YAML there") from None
    except yaml.YAMLError as error:
        first = str(error).splitlines()[0]
        raise ClusterError("HP202", first, where=where, hint="save the file as UTF-8 text") from None


def read_yaml(path: Path, example: str) -> Any:
    """The value in a YAML file.

    Args:
        example: Where an example of such a file stands; the hint when ``path`` cannot be read.

    Raises:
        ClusterError: HP201 no such file, or it cannot be read; HP202 not YAML.
    """
    where = str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ClusterError("HP201", "no such file", where=where, hint=f"see {example}") from None
    except OSError as error:
        reason = (error.strerror or "cannot be read").lower()
        raise ClusterError("HP201", reason, where=where, hint=f"see {example}") from None
    except UnicodeDecodeError:
        raise ClusterError("HP202", "not UTF-8 text", where=where, hint="save the file as UTF-8 text") from None
    return parse_yaml(text, where)


def shown(value: object) -> str:
    """A value as the user wrote it, near enough, for an error message: ``'text'``, ``true``, ``-4``, ``a list``."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return f"'{value}'"
    if isinstance(value, bool):
        return json.dumps(value)
    return str(value)


def place(where: str, loc: Sequence[int | str]) -> str:
    """``c.yaml: nodes[1].devices.titan-x`` from its parts; the file alone for an empty ``loc``."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return f"{where}: {text}" if text else where


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` most looks like, if any does."""
    close = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.5)
    return close[0] if close else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the nearest known one, or all of them."""
    names = list(known)
    close = nearest(name, names)
    return f"did you mean '{close}'?" if close else f"known: {', '.join(names)}"
