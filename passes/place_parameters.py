"""Placement: the node whose parameter server holds each parameter, and the host memory a server needs.

The paper calls the two placements ED-local and round-robin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hetpipe_compiler.errors import ClusterError
from hetpipe_compiler.ir.config_file import suggestion

PLACEMENTS = ("local", "round-robin")


def place_parameters(
    owners: Sequence[Mapping[str, str]], sizes: Mapping[str, int], nodes: Sequence[str], placement: str
) -> dict[str, str]:
    """The node of each parameter, in the order of ``sizes``.

    ``local``:

    1. A parameter lives on the node where its stage sits, if that is one node in all virtual workers (ED: pushes and
       pulls of it never cross nodes).
    2. Otherwise it lives on the node where most virtual workers' stages have it: the least traffic between nodes.
    3. Of equally good nodes, on the one with the fewest bytes so far, then on the first. (NP: servers share the load.)

    ``round-robin`` (the paper's default):

    1. The parameters of one layer, that is of one module (the name without its last part), go to one node.
    2. Layers go to the nodes in turn, in the order in which ``sizes`` first names them.

    Args:
        owners: For each virtual worker, parameter -> name of the node whose stage holds it.
        sizes: Parameter -> bytes, in the model's order.
        nodes: Nodes with a parameter server, in file order.

    Raises:
        ClusterError: HP216 no such placement.
    """
    if placement == "local":
        return _local(owners, sizes, nodes)
    if placement == "round-robin":
        turns = {layer: turn for turn, layer in enumerate(dict.fromkeys(map(_layer, sizes)))}
        return {name: nodes[turns[_layer(name)] % len(nodes)] for name in sizes}
    hint = suggestion(placement, PLACEMENTS)
    raise ClusterError("HP216", f"no placement '{placement}'", where="--placement", hint=hint)


def _layer(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _local(owners: Sequence[Mapping[str, str]], sizes: Mapping[str, int], nodes: Sequence[str]) -> dict[str, str]:
    held = dict.fromkeys(nodes, 0)
    placed: dict[str, str] = {}
    for name, size in sizes.items():
        votes = Counter(owner[name] for owner in owners)
        best = max(votes.values())
        node = min((node for node in nodes if votes[node] == best), key=held.__getitem__)
        held[node] += size
        placed[name] = node
    return placed


def server_memory_bytes(n_workers: int, held_bytes: int, staleness: int, reproducible: bool = False) -> int:
    """Host memory of a server that holds ``held_bytes`` of parameters, for N virtual workers and staleness D.

    Free-running, the server adds an update to its one copy as it arrives. In reproducible mode it keeps the weights S
    of the last D + 1 clocks (the newest are its weights) and up to (N - 1)(D + 1) updates that wait for slower virtual
    workers. Messages on their way are not counted: each is as large as what one stage has on this server.
    """
    if not reproducible:
        return held_bytes
    clocks = staleness + 1
    return held_bytes * (clocks + (n_workers - 1) * clocks)
