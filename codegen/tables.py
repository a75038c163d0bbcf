"""The plan as tables for a terminal: what ``hetpipe-compile`` and ``hetpipe-inspect`` print. Needs no torch.

Narrow terminals (80 columns) get two lines per stage, wide ones (from `WIDE` columns) one. A ``~`` before a time says
that it is estimated, not measured.
"""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from hetpipe_compiler.codegen.quantities import bar, bytes_of, bytes_text, device_ranges, digits, percent
from hetpipe_compiler.codegen.terminal import plain, simple_table, titled
from hetpipe_compiler.codegen.worker_groups import WorkerGroup, alike
from hetpipe_compiler.ir.plan import Plan, Stage, VirtualWorker

#: Columns from which a stage takes one line.
WIDE = 112


def plan_tables(plan: Plan, *, width: int, vw: int | None = None) -> list[RenderableType]:
    """The header, a table per virtual worker (alike ones once) and the parameter servers, for ``width`` columns.

    ``vw``: the table of that virtual worker only; raises `ArtifactError` HP441 if there is none.
    """
    wide = width >= WIDE
    shown: list[RenderableType] = [_header(plan, wide)]
    shown += [_worker_table(group, wide) for group in alike(plan, vw)]
    if not all(stage.measured for worker in plan.virtual_workers for stage in worker.stages):
        how = "by a roofline of the catalogue's figures" if plan.predicted == "roofline" else "not measured"
        shown.append(Text(f"~ estimated {how}; w: minibatches in flight; times are for one minibatch", style="dim"))
    else:
        shown.append(Text("w: minibatches in flight; times are measured, for one minibatch", style="dim"))
    if plan.runs:
        shown.append(Text(f"measured times: those of the stages of {', '.join(plan.runs)}, shared out", style="dim"))
    if any(stage.recompute for worker in plan.virtual_workers for stage in worker.stages):
        shown.append(Text("r: keeps its inputs only; its backward runs its forward again first", style="dim"))
    if plan.servers:
        shown.append(_servers_table(plan))
    if plan.unused_devices:
        shown.append(Text(f"unused devices: {device_ranges(plan.unused_devices, limit=8)}", style="yellow"))
    if plan.dynamic_batch_note:
        shown.append(Text(f"batch size is fixed at {plan.batch_size}: {plan.dynamic_batch_note}", style="yellow"))
    return shown


def plan_text(plan: Plan, *, width: int) -> str:
    """The tables as plain text, for logs and files."""
    return plain(plan_tables(plan, width=width), width)


def _header(plan: Plan, wide: bool) -> Text:
    facts = [
        f"batch {plan.batch_size}",
        f"policy {plan.policy}",
        f"Nm {plan.nm}",
        f"D {plan.staleness}",
        f"parameters {plan.placement}",
    ]
    if plan.partitioner != "search":
        facts.append(f"stages by {plan.partitioner}")
    text = Text.assemble((plan.name, "bold"), " · " + " · ".join(facts) + "\n")
    text.append(f"predicted {digits(plan.samples_per_s)} samples/s", style="bold green")
    base = plan.data_parallel
    fit = len(base.devices_that_fit)
    devices = "devices" if plan.cluster.get("emulate") else "GPUs"
    text.append("; " if wide else ";\n")
    if fit:
        text.append(f"plain data parallelism {digits(base.samples_per_s)}")
        text.append(f" ({fit} of {base.devices} {devices} can hold the model)")
    else:
        text.append(f"plain data parallelism impossible (none of {base.devices} {devices} can hold the model)")
    return text


def _worker_title(group: WorkerGroup, wide: bool) -> Text:
    worker = group.first
    each = " each" if len(group.members) > 1 else ""
    text = Text.assemble(
        (f"\n{group.title}", "bold"),
        f" · {digits(worker.samples_per_s)} samples/s{each}",
        f" · bottleneck stage {worker.bottleneck_stage}, {digits(worker.bottleneck_ms)} ms",
    )
    if wide:
        text.append(f" (lower bound {digits(worker.lower_bound_ms)})")
    if not worker.optimal:
        above = worker.bottleneck_ms / worker.lower_bound_ms - 1 if worker.lower_bound_ms > 0 else 0.0
        text.append(f"\nat most {percent(above)} above the least bottleneck there is for these devices")
    bound_ms = worker.uncoarsened_bound_ms
    if bound_ms is not None and bound_ms < worker.lower_bound_ms:
        above = worker.bottleneck_ms / bound_ms - 1 if bound_ms > 0 else 0.0
        text.append(f"\nat most {percent(above)} above the least without merging operators into blocks")
    return text


def _worker_table(group: WorkerGroup, wide: bool) -> Group:
    worker = group.first
    table = simple_table()
    for name in ("stage", "device", "share", "fwd ms", "bwd ms", "stage ms", "w", "memory", "sends"):
        left = name in ("device", "memory", "sends")
        # Where the line is short, long names of devices and links give way, never a number.
        table.add_column(
            name, justify="left" if left else "right", no_wrap=name not in ("device", "sends"), overflow="fold"
        )
    for stage in worker.stages:
        table.add_row(
            str(stage.index),
            _device_cell(group, stage, wide),
            percent(stage.share),
            _time(stage, stage.forward_ms),
            _time(stage, stage.backward_ms),
            _stage_time(worker, stage, wide),
            f"{stage.in_flight}{' r' if stage.recompute else ''}",
            _memory_cell(stage, wide),
            _sends_cell(stage, wide),
        )
    return titled(_worker_title(group, wide), table)


def _stage_time(worker: VirtualWorker, stage: Stage, wide: bool) -> Text:
    mark = " ◀ bottleneck" if wide else " ◀"
    if stage.index != worker.bottleneck_stage:
        return Text(_time(stage, stage.stage_ms) + " " * len(mark))
    return Text(_time(stage, stage.stage_ms) + mark, style="bold red")


def _device_cell(group: WorkerGroup, stage: Stage, wide: bool) -> str:
    devices = device_ranges(group.devices(stage.index), limit=1)
    return f"{devices} {stage.kind}" if wide else f"{devices}\n{stage.kind}"


def _time(stage: Stage, ms: float) -> str:
    return digits(ms) if stage.measured else f"~{digits(ms)}"


def _memory_cell(stage: Stage, wide: bool) -> Text:
    used, capacity = stage.memory_bytes["total"], stage.memory_bytes["capacity"]
    fraction = used / capacity if capacity else 1.0
    style = "red" if fraction > 0.95 else "yellow" if fraction > 0.8 else "green"
    amount = bytes_of(used, capacity)
    if wide:
        return Text.assemble((bar(fraction, 6), style), f" {amount}")
    return Text.assemble(f"{amount}\n", (bar(fraction, len(amount)), style))


def _sends_cell(stage: Stage, wide: bool) -> str:
    """Bytes to each later stage and the link that they take; a skip goes straight to its stage."""
    lines = []
    for to, count in sorted(stage.sends_bytes.items()):
        link = stage.sends_links.get(to)
        text = f"→{to} {bytes_text(count)}"
        lines.append(text + (f"{' ' if wide else chr(10) + ' '}{link}" if link else ""))
    return "\n".join(lines)


def _servers_table(plan: Plan) -> Group:
    sizes = {tensor.name: tensor.bytes for tensor in plan.parameters}
    table = simple_table()
    table.add_column("node")
    table.add_column("parameters", justify="right")
    table.add_column("their bytes", justify="right")
    table.add_column("host memory", justify="right")
    for server in plan.servers:
        held = sum(sizes.get(name, 0) for name in server.parameters)
        table.add_row(
            server.node, str(len(server.parameters)), bytes_text(held) if sizes else "", bytes_text(server.memory_bytes)
        )
    return titled(Text("\nparameter servers", style="bold"), table)
