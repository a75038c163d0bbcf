"""A plan made from a profiled graph: ``plan.json``, ``schedule.csv``, ``decisions.yaml``, ``graph.json``, to
look at. Needs no torch.

There is no model, so there are no stage modules and no weights; ``workload`` is None, and hetpipe-run refuses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetpipe_compiler.codegen.assemble_plan import StageParts, assemble_plan
from hetpipe_compiler.codegen.graph_file import graph_text
from hetpipe_compiler.codegen.plan_folder import replace_folder
from hetpipe_compiler.ir.blocks import BlockChain, CrossingValue
from hetpipe_compiler.ir.plan import Plan, Port, Tensor
from hetpipe_compiler.ir.schedule import Schedule
from hetpipe_compiler.options import CompileOptions
from hetpipe_compiler.passes.base import Compilation
from hetpipe_compiler.passes.concurrency import PlannedWorker

#: What a profiled graph does not say of a tensor.
_UNKNOWN = "unknown"


def build_graph_plan(compilation: Compilation, options: CompileOptions) -> Plan:
    """Assemble the plan of a finished compilation of a profiled graph."""
    chain, workers = compilation.chain, compilation.workers
    assert chain is not None
    assert workers is not None
    parameters = tuple(
        Tensor(name=p.name, shape=(), dtype=_UNKNOWN, trainable=True, bytes=p.bytes) for p in chain.parameters
    )
    return assemble_plan(
        compilation,
        replace(options, weights=False),
        [_parts(chain.permuted(worker.order), worker) for worker in workers],
        dynamic_batch=False,
        dynamic_batch_note="a profiled graph has times for this size alone",
        parameters=parameters,
    )


def _parts(chain: BlockChain, worker: PlannedWorker) -> list[StageParts]:
    home = {b: at for at, stage in enumerate(worker.stages) for b in range(*stage.blocks)}
    inputs: list[list[Port]] = [[] for _ in worker.stages]
    outputs: list[list[Port]] = [[] for _ in worker.stages]
    sends: list[dict[int, tuple[str, ...]]] = [{} for _ in worker.stages]
    for value in chain.values:
        source = home[value.producer]
        readers = sorted({home[b] for b in value.consumers} - {source})
        if not readers:
            continue
        port = _port(value, source)
        outputs[source].append(port)
        for reader in readers:
            inputs[reader].append(port)
            sends[source][reader] = (*sends[source].get(reader, ()), value.name)
    return [
        StageParts(
            nodes=tuple(node for b in range(*stage.blocks) for node in chain.blocks[b].nodes),
            inputs=tuple(inputs[at]),
            outputs=tuple(outputs[at]),
            sends=dict(sorted(sends[at].items())),
            parameters=tuple(p.name for p in chain.parameters if home[p.blocks[0]] == at),
        )
        for at, stage in enumerate(worker.stages)
    ]


def _port(value: CrossingValue, source: int) -> Port:
    return Port(
        name=value.name,
        kind="tensor",
        source=source,
        shape=(),
        dtype=_UNKNOWN,
        requires_grad=value.backward_bytes > 0,
        bytes=value.forward_bytes,
    )


def write_graph_plan(folder: Path, plan: Plan, schedule: Schedule, chain: BlockChain, decisions: str) -> None:
    """Write the folder, with ``chain`` (a block a node) as its graph; an earlier plan there is replaced.

    ``decisions``: see `hetpipe_compiler.ir.decisions`.

    Raises:
        ArtifactError: HP410-HP411.
    """

    def write(new: Path) -> None:
        new.mkdir()
        (new / "plan.json").write_text(plan.to_json(), encoding="utf-8")
        (new / "schedule.csv").write_text(schedule.to_csv(), encoding="utf-8")
        (new / "decisions.yaml").write_text(decisions, encoding="utf-8")
        (new / "graph.json").write_text(graph_text(_graph_nodes(chain)), encoding="utf-8")

    replace_folder(folder, write)


def _graph_nodes(chain: BlockChain) -> list[dict[str, Any]]:
    made: list[list[CrossingValue]] = [[] for _ in chain.blocks]
    read: list[list[int]] = [[] for _ in chain.blocks]
    for value in chain.values:
        made[value.producer].append(value)
        for reader in value.consumers:
            read[reader].append(value.producer)
    return [
        {
            "name": block.nodes[0],
            "op": block.name,
            "module": block.name,
            "inputs": _names(chain, read[at]),
            "forward_ms": {kind: float(times[at]) for kind, times in chain.forward_ms.items()},
            "backward_ms": {kind: float(times[at]) for kind, times in chain.backward_ms.items()},
            "output_bytes": sum(value.forward_bytes for value in made[at]),
        }
        for at, block in enumerate(chain.blocks)
    ]


def _names(chain: BlockChain, blocks: Sequence[int]) -> list[str]:
    return [chain.blocks[at].nodes[0] for at in sorted(set(blocks))]
