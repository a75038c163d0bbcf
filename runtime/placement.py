"""Which parameter server holds what in a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetpipe_compiler.ir.plan import Plan


def parameter_nodes(plan: Plan, names: Iterable[str] | None = None) -> dict[str, str]:
    """Trainable parameter -> node of its server; only ``names`` when given."""
    wanted = {p.name for p in plan.parameters if p.trainable}
    if names is not None:
        wanted &= set(names)
    return {name: server.node for server in plan.servers for name in server.parameters if name in wanted}


def server_nodes(plan: Plan) -> tuple[str, ...]:
    """Nodes that need a server process: those with trainable parameters, or the first when nothing trains."""
    used = set(parameter_nodes(plan).values())
    nodes = tuple(server.node for server in plan.servers if server.node in used)
    return nodes or tuple(server.node for server in plan.servers[:1])


def buffer_node(plan: Plan, node: str) -> str:
    """The server that keeps the buffers of a stage on ``node``: the node's own if there is one, else the first."""
    nodes = server_nodes(plan)
    return node if node in nodes else nodes[0]
