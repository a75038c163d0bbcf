"""Read a profiled graph file (``docs/graph-format.md``): a model whose costs were measured or computed elsewhere.

======  =====================================================================================
HP130   no such file, it cannot be read, or it is not JSON
HP131   an unknown key, a missing key, or a value of the wrong type
HP132   a number that is negative or not finite
HP133   two nodes with one id, or an edge to an id that no node has
HP134   a cycle
HP135   a node has no time for a device kind of the cluster
HP136   ``resident_bytes`` on some nodes only
======  =====================================================================================
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.ir.blocks import Block, BlockChain, CrossingValue, SharedBytes
from hetpipe_compiler.ir.config_file import Loc, place, shown, user_message
from hetpipe_compiler.ir.topological_order import topological_order

#: Stands for all device kinds that a node does not name.
ANY_KIND = "*"
_HINT = "see docs/graph-format.md"


def _figure(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise user_message("HP131", f"expected a number, got {shown(value)}")
    if not math.isfinite(value) or value < 0:
        raise user_message("HP132", f"must be a finite number, at least 0, got {shown(value)}")
    return float(value)


def _bytes(value: object) -> int:
    return round(_figure(value)) if not isinstance(value, int) or isinstance(value, bool) or value < 0 else value


def _id(value: object) -> str:
    # Many tools number their nodes; 4 and "4" are the same node.
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise user_message("HP131", f"expected a node's id, got {shown(value)}")
    return str(value)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise user_message("HP131", f"expected a whole number, got {shown(value)}")
    if value < 1:
        raise user_message("HP132", f"must be at least 1, got {value}")
    return value


Figure = Annotated[float, BeforeValidator(_figure)]
Bytes = Annotated[int, BeforeValidator(_bytes)]
NodeId = Annotated[str, BeforeValidator(_id)]
Count = Annotated[int, BeforeValidator(_count)]


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GraphNodeSpec(_Spec):
    """One node.

    Attributes:
        id: Unique in the file.
        name: For people, such as a module path; the id if left out.
        forward_ms, backward_ms: Milliseconds of one minibatch by device kind; ``"*"``: kinds that are not named.
        parameter_bytes: Trainable parameters.
        output_bytes: Its value, which is what an edge carries unless the edge says otherwise.
        saved_bytes: Kept from forward to backward, for each minibatch in flight; None: ``output_bytes``.
        workspace_bytes: Needed only while it runs, forward or backward, beside what is saved.
        replay_bytes: Needed to run its forward again, per minibatch in flight, beside what it reads of other nodes.
        resident_bytes: All that it occupies. If every node says so, a stage's memory is their sum and nothing else.
        frozen_bytes: Frozen parameters, buffers and constants by name; a stage holds what several nodes name once.
        colocate: Nodes with the same text share a stage.
        estimated: Device kinds (or ``"*"``) whose times are estimates; the others were measured.
    """

    id: NodeId
    name: str | None = None
    forward_ms: dict[str, Figure]
    backward_ms: dict[str, Figure]
    parameter_bytes: Bytes = 0
    output_bytes: Bytes = 0
    saved_bytes: Bytes | None = None
    workspace_bytes: Bytes = 0
    replay_bytes: Bytes = 0
    resident_bytes: Bytes | None = None
    frozen_bytes: dict[str, Bytes] = Field(default_factory=dict)
    colocate: str | None = None
    estimated: tuple[str, ...] = ()


class GraphEdgeSpec(_Spec):
    """One node reads what another makes.

    Attributes:
        bytes: Size of what it reads; None: the source's ``output_bytes``.
        gradient_bytes: Size of the gradient that comes back; None: ``bytes``.
        value: Name of what it reads. Edges from one node with the same value count once for a stage that reads it.
            None: edges from one node with the same bytes carry the same value.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    source: NodeId = Field(alias="from")
    target: NodeId = Field(alias="to")
    bytes: Bytes | None = None
    gradient_bytes: Bytes | None = None
    value: str | None = None


class ProfiledGraph(_Spec):
    """A whole file.

    Attributes:
        batch_size: Samples in one minibatch.
        optimizer_bytes_per_parameter_byte: 1.0 for SGD with momentum, 2.0 for Adam.
        step_bytes_per_parameter_byte, loop_bytes_per_largest_parameter_byte: What the optimizer's step needs for a
            moment, on GPUs and on CPUs (`BlockChain.step_factor`, ``loop_factor``).
        ends_fixed: Whether the first node (in topological order) must be in the first stage, and the last in the last.
    """

    format: Literal["hetpipe-graph"]
    version: Literal[1]
    name: str = "graph"
    batch_size: Count = 1
    optimizer_bytes_per_parameter_byte: Figure = 1.0
    step_bytes_per_parameter_byte: Figure = 0.0
    loop_bytes_per_largest_parameter_byte: Figure = 0.0
    ends_fixed: bool = False
    nodes: tuple[GraphNodeSpec, ...] = Field(min_length=1)
    edges: tuple[GraphEdgeSpec, ...] = ()

    def to_json(self) -> str:
        """Stable text; what has its default is left out."""
        return json.dumps(self.model_dump(by_alias=True, exclude_defaults=True) | _HEAD, indent=1) + "\n"


_HEAD = {"format": "hetpipe-graph", "version": 1}


def read_profiled_graph(path: Path, kinds: Sequence[str]) -> BlockChain:
    """The chain of a profiled graph file, a block a node, with the times of the device kinds ``kinds``.

    The blocks stand in topological order; nodes that could come next stand in the file's order.

    Raises:
        WorkloadError: HP130-HP136.
    """
    return graph_chain(load_profiled_graph(path), kinds, str(path))


def load_profiled_graph(path: Path) -> ProfiledGraph:
    """A file's content, checked but for what depends on the cluster. Raises `WorkloadError` HP130-HP134, HP136."""
    where = str(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_key_twice)
    except OSError as error:
        reason = (error.strerror or "cannot be read").lower()
        raise WorkloadError("HP130", reason, where=where, hint=_HINT) from None
    except (UnicodeDecodeError, RecursionError):
        raise WorkloadError("HP130", "not a JSON text in UTF-8", where=where, hint=_HINT) from None
    except json.JSONDecodeError as error:
        place_in_file = f"{where}:{error.lineno}:{error.colno}"
        raise WorkloadError("HP130", error.msg, where=place_in_file, hint="correct the JSON there") from None
    except _KeyTwiceError as error:
        raise WorkloadError("HP131", f"the key '{error}' is there twice", where=where, hint="keep one") from None
    return parse_profiled_graph(content, where)


def parse_profiled_graph(content: object, where: str = "graph") -> ProfiledGraph:
    """The same from parsed JSON; ``where`` names the file. Raises `WorkloadError` HP131-HP134, HP136."""
    if not isinstance(content, dict):
        raise WorkloadError("HP131", f"expected an object, got {shown(content)}", where=where, hint=_HINT)
    try:
        graph = ProfiledGraph.model_validate(content)
    except ValidationError as error:
        raise _shape_error(error, where) from None
    _check_ids(graph, where)
    _topological_order(graph, where)
    resident = [node.resident_bytes is not None for node in graph.nodes]
    if any(resident) and not all(resident):
        at = resident.index(False)
        raise WorkloadError(
            "HP136",
            f"node '{graph.nodes[at].id}' has no resident_bytes, but {sum(resident)} of {len(resident)} nodes have",
            where=place(where, ("nodes", at)),
            hint="give it for all nodes or for none",
        )
    return graph


class _KeyTwiceError(ValueError):
    pass


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        raise _KeyTwiceError(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return content


def _shape_error(error: ValidationError, where: str) -> WorkloadError:
    first = error.errors()[0]
    loc: Loc = first["loc"]
    kind, message = first["type"], first["msg"]
    code = kind if kind.startswith("HP") else "HP131"
    if kind == "extra_forbidden":
        message = "no such key"
    elif kind == "missing":
        message = "missing"
    elif kind == "literal_error":
        message = f"expected {first['ctx']['expected']}, got {shown(first['input'])}"
    return WorkloadError(code, message, where=place(where, loc), hint=_HINT)


def _check_ids(graph: ProfiledGraph, where: str) -> None:
    first: dict[str, int] = {}
    for at, node in enumerate(graph.nodes):
        if node.id in first:
            raise WorkloadError(
                "HP133",
                f"'{node.id}' is also the id of nodes[{first[node.id]}]",
                where=place(where, ("nodes", at, "id")),
                hint="give each node its own id",
            )
        first[node.id] = at
    for at, edge in enumerate(graph.edges):
        for key, name in (("from", edge.source), ("to", edge.target)):
            if name not in first:
                raise WorkloadError(
                    "HP133",
                    f"no node has the id '{name}'",
                    where=place(where, ("edges", at, key)),
                    hint="name a node of the file",
                )


def _topological_order(graph: ProfiledGraph, where: str) -> list[int]:
    """Indices of nodes, each after what it reads; of those that could come next, the first in the file."""
    index = {node.id: at for at, node in enumerate(graph.nodes)}
    readers: list[set[int]] = [set() for _ in graph.nodes]
    for edge in graph.edges:
        readers[index[edge.source]].add(index[edge.target])
    order = topological_order(readers)
    if len(order) < len(graph.nodes):
        cycle = _cycle(readers, set(range(len(graph.nodes))) - set(order))
        names = " -> ".join(graph.nodes[at].id for at in cycle)
        at_edge = next(
            at for at, e in enumerate(graph.edges) if (index[e.source], index[e.target]) == (cycle[0], cycle[1])
        )
        raise WorkloadError(
            "HP134", f"a cycle: {names}", where=place(where, ("edges", at_edge)), hint="leave out one of its edges"
        )
    return order


def _cycle(readers: Sequence[set[int]], left: set[int]) -> list[int]:
    """A cycle among nodes ``left``, first node repeated at the end."""
    # Going forward can end in a node that only hangs below a cycle; going back from any of them cannot.
    feeds = {at: min(other for other in left if at in readers[other]) for at in left}
    at = min(left)
    seen: dict[int, int] = {}
    while at not in seen:
        seen[at] = len(seen)
        at = feeds[at]
    backwards = [*seen][seen[at] :]
    return [at, *reversed(backwards[1:]), at]


def graph_chain(graph: ProfiledGraph, kinds: Sequence[str], where: str = "graph") -> BlockChain:
    """The chain of a graph, a block a node, in topological order. Raises `WorkloadError` HP135."""
    order = _topological_order(graph, where)
    nodes = [graph.nodes[at] for at in order]
    forward_ms = {kind: _times(graph, order, kind, "forward_ms", where) for kind in kinds}
    backward_ms = {kind: _times(graph, order, kind, "backward_ms", where) for kind in kinds}
    saved = [n.output_bytes if n.saved_bytes is None else n.saved_bytes for n in nodes]
    resident = [node.resident_bytes for node in nodes if node.resident_bytes is not None]
    return BlockChain(
        name=graph.name,
        batch_size=graph.batch_size,
        blocks=tuple(Block(node.name or node.id, (node.id,)) for node in nodes),
        forward_ms={kind: np.array(times) for kind, times in forward_ms.items()},
        backward_ms={kind: np.array(times) for kind, times in backward_ms.items()},
        measured={kind: np.array([not {kind, ANY_KIND} & {*n.estimated} for n in nodes]) for kind in kinds},
        values=tuple(_values(graph, {node.id: at for at, node in enumerate(nodes)})),
        parameters=_held((node.id, node.parameter_bytes, at) for at, node in enumerate(nodes)),
        frozen=_held((name, size, at) for at, node in enumerate(nodes) for name, size in node.frozen_bytes.items()),
        saved=_held((node.id, size, at) for at, (node, size) in enumerate(zip(nodes, saved, strict=True))),
        optimizer_factor=graph.optimizer_bytes_per_parameter_byte,
        workspace=tuple(node.workspace_bytes for node in nodes),
        replay=tuple(node.replay_bytes for node in nodes),
        step_factor=graph.step_bytes_per_parameter_byte,
        loop_factor=graph.loop_bytes_per_largest_parameter_byte,
        resident=tuple(resident) if resident else None,
        colocate=_colocated(node.colocate for node in nodes),
        ends_fixed=graph.ends_fixed,
    )


def chain_graph(chain: BlockChain, output_bytes: Mapping[str, int]) -> ProfiledGraph:
    """The graph file that `graph_chain` reads back to an equal chain.

    Args:
        chain: Its blocks have one node each.
        output_bytes: Of nodes, by id; where it is not known, what crosses.
    """
    kinds = list(chain.forward_ms)
    ids = [block.nodes[0] for block in chain.blocks]
    own = {value.name: value.forward_bytes for value in chain.values}
    labels = {at: f"group{n}" for n, group in enumerate(chain.colocate) for at in group}
    parameters, saved = _sums(chain.parameters), _sums(chain.saved)
    frozen: dict[int, dict[str, int]] = {}
    for item in chain.frozen:
        for at in item.blocks:
            frozen.setdefault(at, {})[item.name] = item.bytes
    nodes = tuple(
        GraphNodeSpec(
            id=name,
            name=chain.blocks[at].name or None,
            forward_ms={kind: float(chain.forward_ms[kind][at]) for kind in kinds},
            backward_ms={kind: float(chain.backward_ms[kind][at]) for kind in kinds},
            parameter_bytes=parameters.get(at, 0),
            output_bytes=output_bytes.get(name, own.get(name, 0)),
            saved_bytes=saved.get(at, 0),
            workspace_bytes=chain.workspace[at] if chain.workspace else 0,
            replay_bytes=chain.replay[at] if chain.replay else 0,
            resident_bytes=chain.resident[at] if chain.resident is not None else None,
            frozen_bytes=frozen.get(at, {}),
            colocate=labels.get(at),
            estimated=tuple(kind for kind in kinds if chain.measured_share(kind, (at, at + 1)) < 1.0),
        )
        for at, name in enumerate(ids)
    )
    return ProfiledGraph(
        format="hetpipe-graph",
        version=1,
        name=chain.name,
        batch_size=chain.batch_size,
        optimizer_bytes_per_parameter_byte=chain.optimizer_factor,
        step_bytes_per_parameter_byte=chain.step_factor,
        loop_bytes_per_largest_parameter_byte=chain.loop_factor,
        ends_fixed=chain.ends_fixed,
        nodes=nodes,
        edges=tuple(
            _edge(value, nodes[value.producer], ids[reader]) for value in chain.values for reader in value.consumers
        ),
    )


def _edge(value: CrossingValue, producer: GraphNodeSpec, reader: str) -> GraphEdgeSpec:
    content = {
        "from": producer.id,
        "to": reader,
        "bytes": value.forward_bytes if value.forward_bytes != producer.output_bytes else None,
        "gradient_bytes": value.backward_bytes if value.backward_bytes != value.forward_bytes else None,
        "value": value.name if value.name != producer.id else None,
    }
    return GraphEdgeSpec.model_validate(content)


def _sums(items: Iterable[SharedBytes]) -> dict[int, int]:
    sums: dict[int, int] = {}
    for item in items:
        for at in item.blocks:
            sums[at] = sums.get(at, 0) + item.bytes
    return sums


def _times(graph: ProfiledGraph, order: Sequence[int], kind: str, key: str, where: str) -> list[float]:
    times = []
    for at in order:
        node = graph.nodes[at]
        given: dict[str, float] = getattr(node, key)
        ms = given.get(kind, given.get(ANY_KIND))
        if ms is None:
            raise WorkloadError(
                "HP135",
                f"node '{node.id}' has no time on a {kind}",
                where=place(where, ("nodes", at, key)),
                hint=f'add "{kind}", or "{ANY_KIND}" for all kinds that are not named',
            )
        times.append(ms)
    return times


def _values(graph: ProfiledGraph, position: dict[str, int]) -> list[CrossingValue]:
    """What crosses, in the order of its producers: see `GraphEdgeSpec.value`."""
    output_bytes = {node.id: node.output_bytes for node in graph.nodes}
    found: dict[tuple[int, str | int, int], tuple[GraphEdgeSpec, set[int]]] = {}
    for edge in graph.edges:
        size = output_bytes[edge.source] if edge.bytes is None else edge.bytes
        key = (position[edge.source], edge.value or size, size)
        found.setdefault(key, (edge, set()))[1].add(position[edge.target])
    values = []
    names: dict[str, int] = {}
    for (producer, _, size), (edge, consumers) in sorted(found.items(), key=lambda item: item[0][0]):
        back = size if edge.gradient_bytes is None else edge.gradient_bytes
        name = edge.value or edge.source
        names[name] = names.get(name, 0) + 1
        unique = name if names[name] == 1 else f"{name}#{names[name]}"
        values.append(CrossingValue(unique, producer, tuple(sorted(consumers)), size, back))
    return values


def _held(items: Iterable[tuple[str, int, int]]) -> tuple[SharedBytes, ...]:
    """Bytes by name with the blocks that hold them; those of one name and size are the same."""
    blocks: dict[tuple[str, int], list[int]] = {}
    for name, size, at in items:
        if size:
            blocks.setdefault((name, size), []).append(at)
    return tuple(SharedBytes(name, size, tuple(at)) for (name, size), at in blocks.items())


def _colocated(labels: Iterable[str | None]) -> tuple[tuple[int, ...], ...]:
    groups: dict[str, list[int]] = {}
    for at, label in enumerate(labels):
        if label is not None:
            groups.setdefault(label, []).append(at)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)
