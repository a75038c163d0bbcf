"""What makes up the memory of a plan's stages and hosts: what ``--memory`` prints. Needs no torch."""

from __future__ import annotations

from collections.abc import Container

from rich.console import Group, RenderableType
from rich.text import Text

from hetpipe_compiler.codegen.quantities import bytes_text, percent
from hetpipe_compiler.codegen.terminal import plain, simple_table, titled
from hetpipe_compiler.codegen.worker_groups import WorkerGroup, alike
from hetpipe_compiler.ir.cluster import is_cpu_kind
from hetpipe_compiler.ir.plan import Plan, Stage
from hetpipe_compiler.passes.place_parameters import server_memory_bytes

#: Keys of `Stage.memory_bytes` that are not parts of the total.
_NOT_PARTS = frozenset({"total", "capacity"})
#: Parts that depend on the kernels that a device has (`hetpipe_compiler.passes.annotate_cost`).
_COUNTED = frozenset({"activations", "workspace"})
#: Columns that the parts' names and each stage take.
_NAMES, _STAGE = 15, 13


def memory_tables(plan: Plan, *, width: int, vw: int | None = None) -> list[RenderableType]:
    """What makes up each stage's memory, and what the hosts need beside it, for ``width`` columns.

    ``vw``: that virtual worker's stages only; raises `ArtifactError` HP441 if there is none.
    """
    groups = alike(plan, vw)
    kinds = {stage.kind for group in groups for stage in group.first.stages}
    marked = {kind for kind in kinds if plan.counted_with == "cpu" and not is_cpu_kind(kind)}
    tables: list[RenderableType] = [table for group in groups for table in _stages(group, width, marked)]
    if marked:
        note = "* counted with a CPU's kernels: a GPU's may keep somewhat more or less"
        tables.append(Text(note, style="dim"))
    if plan.servers:
        tables.append(_hosts(plan))
        note = "pulled weights of a CPU's stages count with the stage; messages under way are not counted"
        tables.append(Text(note, style="dim"))
    return tables


def memory_text(plan: Plan, *, width: int) -> str:
    """The same as plain text."""
    return plain(memory_tables(plan, width=width), width)


def _stages(group: WorkerGroup, width: int, marked: Container[str]) -> list[Group]:
    """Stages across, parts down, as there are more parts than an 80-column line has room for; parts that are nowhere
    left out. ``marked``: kinds whose counted parts get a mark."""
    stages = group.first.stages
    parts = [part for part in stages[0].memory_bytes if part not in _NOT_PARTS]
    parts = [part for part in parts if any(stage.memory_bytes.get(part, 0) for stage in stages)]
    room = max(1, (width - _NAMES) // _STAGE)
    runs = [stages[at : at + room] for at in range(0, len(stages), room)]
    return [_parts_of(run, parts, f"\n{group.title}: memory" if at == 0 else "", marked) for at, run in enumerate(runs)]


def _parts_of(stages: tuple[Stage, ...], parts: list[str], title: str, marked: Container[str]) -> Group:
    table = simple_table()
    table.add_column("part", no_wrap=True)
    for stage in stages:
        table.add_column(f"stage {stage.index}\n{stage.kind}", justify="right", overflow="fold")
    for part in parts:
        mark = " *" if part in _COUNTED and any(stage.kind in marked for stage in stages) else ""
        table.add_row(part.replace("_", " ") + mark, *(bytes_text(stage.memory_bytes.get(part, 0)) for stage in stages))
    table.add_section()
    table.add_row("total", *(bytes_text(stage.memory_bytes["total"]) for stage in stages), style="bold")
    table.add_row("capacity", *(bytes_text(stage.memory_bytes["capacity"]) for stage in stages))
    table.add_row("used", *(percent(s.memory_bytes["total"] / max(1, s.memory_bytes["capacity"])) for s in stages))
    return titled(Text(title, style="bold"), table)


def _hosts(plan: Plan) -> Group:
    """Per node: its server's weights, free-running and in reproducible mode, and the weights that its stages pulled."""
    pulled: dict[str, int] = {}
    for worker in plan.virtual_workers:
        for stage in worker.stages:
            if not stage.memory_bytes.get("pulled", 0):
                node = stage.device.rpartition(":")[0]
                # One copy of what the stage trains, which is as large as its gradients.
                pulled[node] = pulled.get(node, 0) + stage.memory_bytes.get("gradients", 0)
    table = simple_table()
    for name in ("node", "server", "server with\n--reproducible", "pulled\nweights"):
        table.add_column(name, justify="left" if name == "node" else "right")
    for server in plan.servers:
        exact = server_memory_bytes(len(plan.virtual_workers), server.memory_bytes, plan.staleness, reproducible=True)
        cells = (server.memory_bytes, exact, pulled.pop(server.node, 0))
        table.add_row(server.node, *map(bytes_text, cells))
    for node, size in pulled.items():
        table.add_row(node, "", "", bytes_text(size))
    return titled(Text("\nhost memory", style="bold"), table)
