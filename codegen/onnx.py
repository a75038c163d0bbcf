"""One ONNX file of the whole model whose nodes carry the standard pipeline-stage annotation.

The stage modules of one virtual worker are chained, exported with ``torch.export`` on fake tensors and translated by
``torch.onnx`` without optimisation, so that each node still comes from one line of a stage module. Each distinct
partition of the plan becomes a `DeviceConfigurationProto`; costs and places go to ``metadata_props`` (`onnx_stages`).

The file describes the forward pass of training (dropout and batch normalisation in training mode), at the example
batch's shapes. ONNX has no in-place updates: what the forward pass writes into buffers is left out, and named in
``hetpipe.not_exported``; ``hetpipe.without_node`` names calls with a cost that need no ONNX node
(dropout of probability 0).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hetpipe_compiler import __version__
from hetpipe_compiler.codegen.graph_file import GraphNode
from hetpipe_compiler.codegen.onnx_stages import (
    PREFIX,
    Origin,
    Origins,
    add_configurations,
    annotate_nodes,
    origins_of,
    pipeline_stages,
)
from hetpipe_compiler.codegen.onnx_weights import EMBED_LIMIT_BYTES, attach_weights
from hetpipe_compiler.codegen.quantities import digits
from hetpipe_compiler.codegen.worker_groups import same_cuts
from hetpipe_compiler.errors import ArtifactError
from hetpipe_compiler.files import new_file
from hetpipe_compiler.ir.plan import Plan, VirtualWorker
from hetpipe_compiler.user_code import first_line


def write_onnx(
    plan: Plan,
    folder: Path,
    graph: Sequence[GraphNode],
    path: Path,
    *,
    vw: int | None = None,
    embed_limit_bytes: int = EMBED_LIMIT_BYTES,
) -> None:
    """Write ``path``.

    Args:
        vw: The virtual worker whose partition is annotated; None annotates each distinct one.
        embed_limit_bytes: Weights above it stay outside the .onnx (`attach_weights`).

    Raises:
        ArtifactError: HP411 it cannot be written; HP441 no such virtual worker; HP445 stage modules or weights
            are missing; HP446 the stages cannot be captured; HP447 an operator has no ONNX form; HP448 the result does
            not pass ONNX's own checker.
    """
    import onnx
    import onnx_ir

    from hetpipe_compiler.codegen.stage_chain import node_lines, stage_path

    worker = plan.worker(vw or 0)
    paths = [stage_path(stage, folder) for stage in worker.stages]
    origins = Origins(paths, [node_lines(file) for file in paths])
    exported, model = _export(plan, worker, folder, graph)
    found = origins_of(model, origins)
    _use_batch_statistics(model, found, _training_norms(exported, origins))
    configurations = [
        (group, pipeline_stages(model, found, group, own=worker in group.members)) for group in same_cuts(plan, vw)
    ]
    annotate_nodes(model, found, graph)
    mapped = {origin.node for origin in found if origin}
    lost = [node.name for node in graph if any(node.forward_ms.values()) and node.name not in mapped]
    _describe(model, plan, exported, lost)
    attach_weights(model, plan, folder, path, embed_limit_bytes=embed_limit_bytes)
    proto = onnx_ir.serde.serialize_model(model)
    add_configurations(proto, configurations)
    with new_file(path) as new:
        new.write_bytes(proto.SerializeToString())
        try:
            onnx.checker.check_model(proto if new == path else str(new))  # what went into a pipe is gone
        except onnx.checker.ValidationError as error:
            raise ArtifactError("HP448", f"ONNX's checker refuses it: {first_line(error)}", where=str(path)) from error


def _export(plan: Plan, worker: VirtualWorker, folder: Path, graph: Sequence[GraphNode]) -> tuple[Any, Any]:
    """The chained stages as an ``ExportedProgram`` and as an ``onnx_ir.Model``."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from hetpipe_compiler.codegen.stage_chain import StageChain, example_values

    with _quiet(), FakeTensorMode(allow_non_fake_inputs=True):
        chain = StageChain(worker, folder)
        values = example_values(plan, worker, graph)
        try:
            # Without gradients: a no_grad region then needs no sub-graph, which would hide where its nodes come from.
            with torch.no_grad():
                exported = torch.export.export(chain, values, strict=False)
        except Exception as error:
            raise ArtifactError(
                "HP446", f"torch.export cannot capture the chained stages: {first_line(error)}", where=str(folder)
            ) from error
        try:
            program = torch.onnx.export(
                exported,
                dynamo=True,
                optimize=False,
                verbose=False,
                input_names=[port.name for port in worker.stages[0].inputs],
                output_names=[port.name for port in worker.stages[-1].outputs],
            )
        except Exception as error:
            raise ArtifactError(
                "HP447",
                f"no ONNX form: {_root_cause(error)}",
                where=str(folder),
                hint="--dot and --svg draw the same partition without ONNX",
            ) from error
    assert program is not None
    return exported, program.model


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter's advice is about its own options, which are not the user's here."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _training_norms(exported: Any, origins: Origins) -> set[tuple[int, int | None]]:
    """(stage, line) of every call that normalises with the batch's own statistics."""
    places: set[tuple[int, int | None]] = set()
    for node in exported.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or "batch_norm" not in schema.name:
            continue
        values = {argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)}
        if {**values, **node.kwargs}.get("training") is True and (origin := origins.find(node.meta.get("stack_trace"))):
            places.add((origin.stage, origin.line))
    return places


def _use_batch_statistics(model: Any, found: Sequence[Origin | None], places: set[tuple[int, int | None]]) -> None:
    """Set ``training_mode``: torch.onnx writes BatchNormalization as if for inference, whatever the call said."""
    import onnx_ir

    for node, origin in zip(model.graph, found, strict=True):
        if node.op_type == "BatchNormalization" and origin and (origin.stage, origin.line) in places:
            node.attributes["training_mode"] = onnx_ir.AttrInt64("training_mode", 1)


def _describe(model: Any, plan: Plan, exported: Any, lost: Sequence[str]) -> None:
    model.producer_name, model.producer_version = "hetpipe-compiler", __version__
    model.graph.name = plan.name
    model.graph.metadata_props.clear()
    model.metadata_props.clear()
    facts: dict[str, object] = {
        "policy": plan.policy,
        "nm": plan.nm,
        "staleness": plan.staleness,
        "batch_size": plan.batch_size,
        "samples_per_s": digits(plan.samples_per_s),
        "cluster_digest": plan.cluster_digest,
    }
    updates = sorted({name.partition(".")[2] for name in exported.graph_signature.buffers_to_mutate.values()})
    updates = updates or [tensor.name for tensor in plan.buffers if tensor.mutated]
    if updates:
        facts["not_exported"] = "updates of buffers " + ", ".join(updates)
    if lost:
        facts["without_node"] = ", ".join(lost)
    for key, value in facts.items():
        model.metadata_props[PREFIX + key] = str(value)
    for value in model.graph.inputs:
        value.metadata_props.clear()


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)
