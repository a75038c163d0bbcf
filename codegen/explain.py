"""What was captured of a model, as text that fits 80 columns: the reading of ``hetpipe-compile --explain``."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import getitem
from typing import Any

import networkx as nx
import torch
from torch import fx

from hetpipe_compiler.codegen.quantities import counted
from hetpipe_compiler.frontend.regions import Context, contexts_of
from hetpipe_compiler.ir.captured import Captured
from hetpipe_compiler.ir.plan import Tensor
from hetpipe_compiler.ir.source import module_path, source_place
from hetpipe_compiler.passes.eval_mode import in_eval
from hetpipe_compiler.passes.fuse_atomic import LAYOUT, Components
from hetpipe_compiler.passes.normalize import Storages, is_random, mutated_arguments

_WIDTH = 80
#: Rows of a list that are printed; the rest is counted.
_ROWS = 12
#: A space at which no line breaks.
_GLUE = "\0"


def explain(captured: Captured, components: Components, name: str) -> str:
    """The text for a capture that `normalize`, `eval_mode` and `fuse_atomic` have seen; ends without a newline."""
    return "\n".join(_Explanation(captured, components).lines(name))


class _Explanation:
    def __init__(self, captured: Captured, components: Components) -> None:
        self._captured, self._components = captured, components
        self._graph = captured.graph_module.graph
        self._calls: list[fx.Node] = [n for n in self._graph.nodes if n.op == "call_function"]
        self._order = {n: at for at, n in enumerate(self._graph.nodes)}
        self._storages = Storages(self._graph)

    def lines(self, name: str) -> Iterator[str]:
        yield f"{name}: {counted(len(self._calls), 'operator')}, captured in train mode"
        yield ""
        yield from self._parameters()
        yield from self._buffers()
        yield from self._sizes()
        yield from self._evaluation()
        yield from _section("regions", [(len(rows), text, place) for text, place, rows in self._regions()], "none")
        written = ((f"{_op(n)}: {self._why_in_place(n)}", self._place(n)) for n in self._calls if mutated_arguments(n))
        yield from _section("in place", _counted(written), "nothing is written in place")
        random = ((_op(n), self._place(n)) for n in self._calls if is_random(n))
        yield from _section("random", _counted(random), "no operator draws random numbers")
        yield from self._constants()
        together = [(len(names), why, place) for names, why, place in self._held_together()]
        yield from _section("together", together, "every operator stands alone: a cut may fall anywhere")
        kinds = Counter(_op(n) for n in self._calls)
        counts = (f"{op}{_GLUE}{count}" for op, count in sorted(kinds.items(), key=lambda item: (-item[1], item[0])))
        yield from _entry("operators", ", ".join(counts))

    def _parameters(self) -> Iterator[str]:
        found = self._captured.parameters
        frozen = [t for t in found if not t.trainable]
        text = f"{_sum(found)}; {_sum(frozen)} of them frozen" if frozen else _sum(found)
        yield from _entry("parameters", text)
        yield from _names("shared", [" = ".join((t.name, *t.aliases)) for t in found if t.aliases])

    def _buffers(self) -> Iterator[str]:
        found = self._captured.buffers
        yield from _entry("buffers", _sum(found) if found else "none")
        yield from _names("changed", [t.name for t in found if t.mutated])
        yield from _names("not saved", [t.name for t in found if not t.persistent])
        yield from _names("shared", [" = ".join((t.name, *t.aliases)) for t in found if t.aliases])

    def _sizes(self) -> Iterator[str]:
        captured = self._captured
        fixed = f"fixed at {captured.batch_size}: {captured.dynamic_batch_note}"
        text = "free; all other sizes are the example's" if captured.dynamic_batch else fixed
        yield from _entry("batch size", text)

    def _evaluation(self) -> Iterator[str]:
        if not self._captured.evaluation:
            yield from _entry("evaluation", f"no: {self._captured.evaluation_note}")
            return
        others = [o for n in self._calls if (o := in_eval(n)) is not None]
        idle = sum(not o.runs for o in others)
        text = f"yes; operators that follow the mode: {len(others) - idle}, that run in training only: {idle}"
        yield from _entry("evaluation", text)

    def _regions(self) -> Iterator[tuple[str, str, list[fx.Node]]]:
        """Runs of operators in the same contexts: contexts, place of the first, operators."""
        for contexts, nodes in groupby(self._calls, key=contexts_of):
            if contexts:
                rows = list(nodes)
                yield ", ".join(_context(c) for c in contexts), self._place(rows[0]), rows

    def _why_in_place(self, node: fx.Node) -> str:
        reasons = dict.fromkeys(self._why_written(node, target) for target in mutated_arguments(node))
        return "; ".join(reasons)

    def _why_written(self, node: fx.Node, target: fx.Node) -> str:
        sharers = self._storages.sharers(target)
        if any(s.op == "get_attr" for s in sharers):
            return "changes a buffer"
        if any(s.op == "placeholder" for s in sharers):
            return "changes the batch"
        later = (s for s in sharers if s not in (node, target) and self._order[s] < self._order[node])
        if any(self._order[u] > self._order[node] for s in later for u in s.users):
            return "another view of the tensor is read later"
        if any(kind == "autocast" for kind, *_ in contexts_of(node)):
            return "under autocast another form could have another dtype"
        return "no other form gives the same"

    def _constants(self) -> Iterator[str]:
        found = self._captured.constants
        yield from _entry("constants", f"{_sum(found)}; each stage holds its own" if found else "none")
        yield from _names("made", [f"{t.name} {t.dtype}{list(t.shape)}" for t in found])

    def _held_together(self) -> Iterator[tuple[tuple[str, ...], str, str]]:
        """Components of several operators: names, why, place of the first."""
        by_name = {n.name: n for n in self._graph.nodes}
        home = {name: at for at, names in enumerate(self._components.nodes) for name in names}
        touching = self._written_by_component(home)
        for at, names in enumerate(self._components.nodes):
            if len(names) > 1:
                nodes = [by_name[name] for name in names]
                yield names, self._why_together(nodes, touching.get(at, [])), self._place(nodes[0])

    def _written_by_component(self, home: dict[str, int]) -> dict[int, list[tuple[str, list[fx.Node]]]]:
        """Component -> each tensor written in it, by name, with the nodes that touch it."""
        found: dict[int, list[tuple[str, list[fx.Node]]]] = {}
        for storage in self._storages.written(self._graph):
            holders = self._storages.sharers(storage)
            nodes = [n for n in dict.fromkeys(n for h in holders for n in (h, *h.users)) if n.name in home]
            if len(nodes) > 1:
                found.setdefault(home[nodes[0].name], []).append((_storage_name(holders), nodes))
        return found

    def _why_together(self, nodes: Sequence[fx.Node], written: Sequence[tuple[str, list[fx.Node]]]) -> str:
        groups = nx.utils.UnionFind(nodes)
        reasons = []
        for node in nodes:
            if node.target is getitem or node.target in LAYOUT:
                source: Any = node.args[0]
                if source in groups.parents:
                    groups.union(source, node)
                    reasons.append(f"results of {_op(source)}" if node.target is getitem else "as_strided")
        if written:
            names = list(dict.fromkeys(name for name, _ in written))
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            reasons.append(f"write into {', '.join(names[:2])}{more}")
            for _, touching in written:
                groups.union(*touching)
        pieces = {groups[n] for n in nodes}
        ends = [(groups[source], groups[n]) for n in nodes for source in n.all_input_nodes if source in groups.parents]
        in_cycle = {piece for pair in ends if pair[0] is not pair[1] for piece in pair}
        if in_cycle:
            reasons.append("a cycle")
        read_outside = {groups[n] for n in nodes if any(u not in groups.parents for u in n.users)}
        if len(pieces) > 1 and (loose := pieces - in_cycle - read_outside):
            reasons.append(f"nothing else ties {', '.join(n.name for n in nodes if groups[n] in loose)}")
        return ", ".join(dict.fromkeys(reasons))

    def _place(self, node: fx.Node) -> str:
        place = source_place(node, self._captured.root)
        return " ".join(part for part in (module_path(node), place) if part) or "the model"


def _storage_name(holders: Sequence[fx.Node]) -> str:
    """What people call a piece of memory: the buffer's or the input's name, else the first value's on it."""
    for holder in holders:
        if holder.op == "get_attr":
            return str(holder.target)
    return next((h.name for h in holders if h.op == "placeholder"), holders[0].name)


def _context(context: Context) -> str:
    if context[0] == "grad":
        return "enable_grad" if context[1] else "no_grad"
    _, _, dtype, enabled = context
    return f"autocast {str(dtype).removeprefix('torch.')}" if enabled else "autocast off"


def _op(node: fx.Node) -> str:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name).removeprefix("aten::")
    return str(getattr(target, "__name__", target))


def _sum(tensors: Sequence[Tensor]) -> str:
    """``12 (4.8 MB)``."""
    size = float(sum(t.bytes for t in tensors))
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{len(tensors)} ({size:.4g} {unit})"


def _counted(rows: Iterable[tuple[str, str]]) -> list[tuple[int, str, str]]:
    """Rows with the same text as one: how many, the text, the first one's place."""
    counts: dict[str, list[str]] = {}
    for text, place in rows:
        counts.setdefault(text, []).append(place)
    return [
        (len(places), text, places[0] + (" ..." if len(set(places)) > 1 else "")) for text, places in counts.items()
    ]


def _section(title: str, rows: Sequence[tuple[int, str, str]], none: str) -> Iterator[str]:
    """Rows of a count, a text and a place."""
    if not rows:
        yield from _entry(title, none)
        return
    total = sum(count for count, _, _ in rows)
    yield from _entry(title, f"{counted(total, 'operator')}")
    for count, text, place in rows[:_ROWS]:
        yield from _wrapped(f"{count:6}  {text}  ({place.replace(' ', _GLUE)})", " " * 8)
    if len(rows) > _ROWS:
        yield f"{'':8}and {len(rows) - _ROWS} more"


def _names(title: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        more = f", and {len(names) - _ROWS} more" if len(names) > _ROWS else ""
        yield from _wrapped(f"  {title}: {', '.join(names[:_ROWS])}{more}", " " * 4)


def _entry(title: str, text: str) -> Iterator[str]:
    yield from _wrapped(f"{title:12}{text}", " " * 12)


def _wrapped(text: str, indent: str) -> list[str]:
    lines = textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)
    return [line.replace(_GLUE, " ") for line in lines]
