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
from pydantic_core import PydanticCustomError

from hetpipe_compiler.errors import ClusterError

Loc = tuple[int | str, ...]

#: The most bytes of a file, and the most values once its aliases are written out: far beyond what anybody writes.
MOST_BYTES = 16_000_000
MOST_VALUES = 1_000_000
#: The most brackets inside brackets: PyYAML's time grows with the cube of them.
MOST_BRACKETS = 100


class _Loader(yaml.SafeLoader):
    """YAML's safe subset; a key given twice is an error, where PyYAML would keep the last without a word.

    Not libyaml's loader: these files are small, and its messages say less.
    """

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

    def fetch_flow_collection_start(self, TokenClass: type[yaml.Token]) -> None:  # noqa: N803 (PyYAML's name)
        if self.flow_level >= MOST_BRACKETS:
            raise RecursionError
        super().fetch_flow_collection_start(TokenClass)


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text. Raises `ClusterError` HP202 with line and column (from 1) if it is not YAML."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        values = _values_written_out(node)
        if values > MOST_VALUES:
            amount = f"{values:,}" if values < 10**15 else "more than 10^15"
            raise ClusterError(
                "HP202",
                f"aliases stand for {amount} values, more than {MOST_VALUES:,}",
                where=where,
                hint="write out what you mean: an alias of aliases multiplies",
            )
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        problem = error.problem or "not YAML"
        if error.context and error.context_mark:
            problem += f" ({error.context} that starts in line {error.context_mark.line + 1})"
        raise ClusterError("HP202", problem, where=place, hint="correct the YAML there") from None
    except yaml.YAMLError as error:
        first = str(error).splitlines()[0]
        raise ClusterError("HP202", first, where=where, hint="save the file as UTF-8 text") from None
    except ValueError as error:
        # PyYAML lets through what Python says about a date such as 2020-13-45.
        raise ClusterError("HP202", str(error), where=where, hint="put dates and long numbers in quotes") from None
    except RecursionError:
        raise ClusterError(
            "HP202", "brackets inside brackets too deep to read", where=where, hint="write it flatter"
        ) from None


def _values_written_out(root: yaml.Node) -> int:
    """How many values a text has with each alias in full; what holds itself counts there as one.

    Aliases of aliases multiply: a few lines can stand for more values than any memory holds.
    """
    counts: dict[yaml.Node, int] = {}

    def count(node: yaml.Node) -> int:
        if node not in counts:
            counts[node] = 1  # what is met again on the way down holds itself
            if isinstance(node, yaml.MappingNode):
                counts[node] = 1 + sum(count(key) + count(value) for key, value in node.value)
            elif isinstance(node, yaml.SequenceNode):
                counts[node] = 1 + sum(map(count, node.value))
        return counts[node]

    return count(root)


def read_yaml(path: Path, example: str) -> Any:
    """The value in a YAML file.

    Args:
        example: Where an example of such a file stands; the hint when ``path`` cannot be read.

    Raises:
        ClusterError: HP201 no such file, or it cannot be read; HP202 not YAML, or too much of it.
    """
    where = str(path)
    try:
        with path.open("rb") as file:  # no more than that: it may be /dev/zero
            content = file.read(MOST_BYTES + 1)
        text = content[:MOST_BYTES].decode(errors="replace" if len(content) > MOST_BYTES else "strict")
    except FileNotFoundError:
        raise ClusterError("HP201", "no such file", where=where, hint=f"see {example}") from None
    except OSError as error:
        reason = (error.strerror or "cannot be read").lower()
        raise ClusterError("HP201", reason, where=where, hint=f"see {example}") from None
    except UnicodeDecodeError:
        raise ClusterError("HP202", "not UTF-8 text", where=where, hint="save the file as UTF-8 text") from None
    if len(content) > MOST_BYTES:
        message = f"has more than {MOST_BYTES / 1e6:g} MB"
        raise ClusterError("HP202", message, where=where, hint=f"is it the file that you mean? See {example}")
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
    if isinstance(value, int) and abs(value) >= 10**1000:  # Python refuses to print what has thousands of digits
        return "a number of more than 1000 digits"
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def place(where: str, loc: Sequence[int | str]) -> str:
    """``c.yaml: nodes[1].devices.titan-x`` from its parts; the file alone for an empty ``loc``."""
    text = ""
    for part in loc:
        text += f"[{part!r}]" if isinstance(part, int) or not part else f".{part}" if text else part
    return f"{where}: {text}" if text else where


def suggestion(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """A hint for an unknown name: the known names that it looks like, else all of them; then another way out."""
    plain = {known_name: _plain(known_name) for known_name in known}
    wanted = _plain(name)
    close = [known_name for known_name, text in plain.items() if wanted and text.startswith(wanted)]
    if not close:
        matches = difflib.get_close_matches(wanted, plain.values(), n=1, cutoff=0.6)
        close = [known_name for known_name, text in plain.items() if text in matches][:1]
    quoted = [f"'{known_name}'" for known_name in close]
    hint = f"did you mean {' or '.join(quoted)}?" if quoted else f"known: {', '.join(plain)}"
    if otherwise is None:
        return hint
    return f"{hint} Or {otherwise}" if quoted else f"{hint}; or {otherwise}"


def _plain(name: str) -> str:
    """Letters and digits alone: ``RTX3090`` looks like ``rtx-3090``."""
    return "".join(c for c in name.lower() if c.isalnum())


def user_message(code: str, text: str) -> PydanticCustomError:
    """What a validator raises to say ``text``."""
    # The text is passed as a value: braces in a user's own text must not be read as a template.
    return PydanticCustomError(code, "{text}", {"text": text})
