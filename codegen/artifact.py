"""Write the plan folder: all that hetpipe-inspect and hetpipe-run need, and nothing that ties it to this place.

::

    plan.json               the plan
    schedule.csv            the programs of all stages
    decisions.yaml          what was decided, to edit and to compile again
    stages/*.py             stage modules
    weights.safetensors     initial parameters and buffers, under the model's names (not with --no-weights)
    constants.safetensors   tensors that the model makes in forward
    graph.json              the graph's nodes with their costs, for pictures
    model.py                a copy of the user's file

The folder is written beside its place and then renamed: there is no half-written one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import fx

from hetpipe_compiler.codegen.build_plan import Built, module_file
from hetpipe_compiler.codegen.graph_file import graph_text
from hetpipe_compiler.codegen.plan_folder import replace_folder
from hetpipe_compiler.codegen.stage_module import emit_stage
from hetpipe_compiler.frontend.load import LoadedWorkload
from hetpipe_compiler.ir.captured import Captured
from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.ir.costs import NodeCost
from hetpipe_compiler.ir.schedule import Schedule
from hetpipe_compiler.ir.source import module_path, source_place
from hetpipe_compiler.ir.storage import storage_of


def write_artifact(
    folder: Path,
    built: Built,
    schedule: Schedule,
    loaded: LoadedWorkload,
    captured: Captured,
    costs: Mapping[str, NodeCost],
    weights: Mapping[str, torch.Tensor] | None,
    check: Callable[[Path], None] | None = None,
    decisions: str = "",
) -> None:
    """Write everything; an earlier plan at ``folder`` is replaced at the end.

    Args:
        decisions: See `hetpipe_compiler.ir.decisions`; empty: none is written.
        check: Called with the finished folder before it takes its place; if it raises, nothing is written.

    Raises:
        ArtifactError: HP410-HP411.
    """

    def write(new: Path) -> None:
        _write(new, built, schedule, loaded, captured, costs, weights)
        if decisions:
            (new / "decisions.yaml").write_text(decisions, encoding="utf-8")
        if check is not None:
            check(new)

    replace_folder(folder, write)


def _write(
    folder: Path,
    built: Built,
    schedule: Schedule,
    loaded: LoadedWorkload,
    captured: Captured,
    costs: Mapping[str, NodeCost],
    weights: Mapping[str, torch.Tensor] | None,
) -> None:
    (folder / "stages").mkdir(parents=True)
    plan = built.plan
    root = loaded.path.resolve().parent
    for at, cuts in enumerate(built.cuts):
        for cut in cuts:
            text = emit_stage(cut, model=plan.name, stages=len(cuts), root=root)
            (folder / module_file(at, cut.index)).write_text(text, encoding="utf-8")
    (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    (folder / "schedule.csv").write_text(schedule.to_csv(), encoding="utf-8")
    cluster = Cluster.from_dict(plan.cluster)
    (folder / "graph.json").write_text(graph_text(graph_nodes(captured, costs, cluster, root)), encoding="utf-8")
    _save(_apart(captured.constant_values), folder / "constants.safetensors")
    if weights is not None:
        _save(dict(weights), folder / "weights.safetensors")
    assert plan.workload is not None
    shutil.copyfile(loaded.path, folder / plan.workload.path)


def _save(values: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(values, path)
    except SafetensorError as error:  # so it calls a full disk
        raise OSError(str(error)) from error


def graph_nodes(
    captured: Captured, costs: Mapping[str, NodeCost], cluster: Cluster, root: Path
) -> list[dict[str, Any]]:
    """The batch's inputs and every call, in order, with costs per device kind."""
    rows, kinds = [], cluster.kinds()
    for node in captured.graph_module.graph.nodes:
        cost = costs.get(node.name)
        if node.op not in ("placeholder", "call_function") or cost is None:
            continue
        rows.append(
            {
                "name": node.name,
                "op": _op_name(node),
                "module": module_path(node),
                "source": source_place(node, root),
                "inputs": [i.name for i in node.all_input_nodes if i.name in costs],
                "forward_ms": {k.name: cost.forward_ms(k) for k in kinds},
                "backward_ms": {k.name: cost.backward_ms(k) for k in kinds},
                "key": cost.key,
                "sums": [{"key": s.key, "count": s.count, "ms": {k.name: s.ms(k) for k in kinds}} for s in cost.sums],
                "flops": cost.flops,
                "output_bytes": cost.output_bytes,
                "shape": cost.shape,
                "dtype": cost.dtype,
            }
        )
    return rows


def _op_name(node: fx.Node) -> str:
    if node.op == "placeholder":
        return "input"
    if node.target is getitem:
        return "getitem"
    return str(node.target) if not hasattr(node.target, "__name__") else str(getattr(node.target, "__name__", ""))


def model_weights(model: torch.nn.Module, captured: Captured) -> dict[str, torch.Tensor]:
    """Initial values of all parameters and buffers by the model's first name for each."""
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    return _apart({t.name: own[t.name] for t in (*captured.parameters, *captured.buffers)})


def _apart(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values, each in memory of its own, as safetensors wants it (a buffer may be a view of another)."""
    seen: set[int] = set()
    found = {}
    for name, value in values.items():
        value = value.detach().contiguous()
        shares = storage_of(value) in seen or value.untyped_storage().nbytes() > value.nbytes
        found[name] = value.clone() if shares else value
        seen.add(storage_of(found[name]))
    return found
