"""``hetpipe-inspect``: look at a plan folder, as tables, pictures, an ONNX model or a timeline."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from hetpipe_compiler.cli.boundary import run_app, single_command
from hetpipe_compiler.errors import ArtifactError
from hetpipe_compiler.files import check_file, write_text

if TYPE_CHECKING:
    from hetpipe_compiler.codegen.compare import StageComparison
    from hetpipe_compiler.ir.plan import Plan


def inspect(
    folder: Annotated[Path, typer.Argument(help="Plan folder that hetpipe-compile wrote.", metavar="PLAN")],
    dot: Annotated[Path | None, typer.Option(help="Write the partition as Graphviz text.", metavar="FILE")] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw it (needs Graphviz); the .dot stays.", metavar="FILE")] = None,
    png: Annotated[Path | None, typer.Option(help="The same as a bitmap.", metavar="FILE")] = None,
    ops: Annotated[
        bool, typer.Option("--ops", help="Pictures: a box per operation, not per group of modules.")
    ] = False,
    onnx: Annotated[
        Path | None,
        typer.Option(
            help="Write the whole model as ONNX, each node with its pipeline stage and costs.", metavar="FILE"
        ),
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Write the predicted run as a Chrome trace (ui.perfetto.dev).", metavar="FILE")
    ] = None,
    waves: Annotated[int, typer.Option(help="Timeline: waves before the drain.", min=1, max=1000)] = 3,
    compare: Annotated[
        Path | None,
        typer.Option(help="Show its stage times beside those that a run measured.", metavar="RUN"),
    ] = None,
    write_profiles: Annotated[
        Path | None,
        typer.Option(help="With --compare: write its times there as profiles, for the next compile.", metavar="DIR"),
    ] = None,
    vw: Annotated[int | None, typer.Option(help="Only this virtual worker.", min=0, metavar="N")] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Also what makes up each stage's memory, and the hosts'.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON instead.")] = False,
) -> None:
    """Show what hetpipe-compile decided: without options, the tables."""
    from hetpipe_compiler.ir.plan import Plan

    pictures = {kind: path for kind, path in (("svg", svg), ("png", png)) if path is not None}
    if ops and not (dot or pictures):
        raise typer.BadParameter("--ops is for --dot, --svg and --png")
    if waves != 3 and timeline is None:
        raise typer.BadParameter("--waves is for --timeline")
    if as_json and compare:
        raise typer.BadParameter("--compare prints a table: leave out --json")
    if as_json and memory:
        raise typer.BadParameter("--json holds the memory parts already: leave out --memory")
    if write_profiles and not compare:
        raise typer.BadParameter("--write-profiles needs the times of a run: --compare RUN")
    plan = Plan.load(folder)
    for path in (dot, *pictures.values(), timeline, onnx):
        if path is not None:
            check_file(path)  # all of them before the first is written
    if vw is not None:
        plan.worker(vw)  # refuse a wrong number before anything is written
    if as_json:
        sys.stdout.write(plan.to_json())
    elif memory or not (dot or pictures or onnx or timeline or compare):
        _print_tables(plan, vw, memory)
    if compare is not None:
        _print_comparison(plan, folder, compare, vw, write_profiles)
    if dot or pictures:
        _write_pictures(plan, folder, dot, pictures, vw, ops)
    if timeline is not None:
        _write_timeline(plan, folder, timeline, vw, waves)
    if onnx is not None:
        _write_onnx(plan, folder, onnx, vw)


def _print_comparison(plan: Plan, folder: Path, run: Path, vw: int | None, profiles: Path | None) -> None:
    from rich.console import Console

    from hetpipe_compiler.codegen.compare import compare, compare_table, run_options
    from hetpipe_compiler.codegen.run_profiles import why_no_measurement

    console = Console(highlight=False)
    compared = tuple(c for c in compare(plan, run) if vw is None or c.vw == vw)
    for renderable in compare_table(compared):
        console.print(renderable)
    if profiles is not None:
        _write_profiles(plan, folder, run, compared, profiles)
    elif why := why_no_measurement(plan, run_options(run)):
        typer.echo(f"no measurement to compile with: {why}")
    else:
        typer.echo("to compile with these times: --write-profiles DIR")


def _write_profiles(plan: Plan, folder: Path, run: Path, compared: Sequence[StageComparison], target: Path) -> None:
    from hetpipe_compiler.codegen.run_profiles import run_profiles

    made = {target / f"{profile.kind}-run.json": profile for profile in run_profiles(plan, folder, run, compared)}
    for path, profile in made.items():
        profile.save(path)
        _say_written(path)
    options = " ".join(f"--profile {path}" for path in made)
    typer.echo(f"to compile with these times: hetpipe-compile ... {options}")


def _print_tables(plan: Plan, vw: int | None, memory: bool) -> None:
    from rich.console import Console

    from hetpipe_compiler.codegen.memory_tables import memory_tables
    from hetpipe_compiler.codegen.tables import plan_tables

    console = Console(highlight=False)
    for renderable in plan_tables(plan, width=console.width, vw=vw):
        console.print(renderable)
    if memory:
        for renderable in memory_tables(plan, width=console.width, vw=vw):
            console.print(renderable)


def _write_pictures(
    plan: Plan, folder: Path, dot: Path | None, pictures: dict[str, Path], vw: int | None, ops: bool
) -> None:
    from hetpipe_compiler.codegen.graph_file import load_graph
    from hetpipe_compiler.codegen.graphviz import draw, plan_dot

    text = plan_dot(plan, load_graph(folder), vw=vw, ops=ops)
    source = dot or next(iter(pictures.values())).with_suffix(".dot")
    for picture in pictures.values():
        if picture == source:
            raise ArtifactError("HP444", "the picture would overwrite its .dot", where=str(picture), hint="rename one")
    write_text(source, text)
    _say_written(source)
    for kind, picture in pictures.items():
        draw(source, picture, kind)
        _say_written(picture)


def _write_timeline(plan: Plan, folder: Path, path: Path, vw: int | None, waves: int) -> None:
    from hetpipe_compiler.codegen.timeline import idle_text, load_schedule, plan_timeline, timeline_json

    run = plan_timeline(plan, load_schedule(plan, folder), waves=waves)
    write_text(path, timeline_json(run, vw=vw))
    _say_written(path)
    typer.echo(idle_text(run, vw), err=True)


def _write_onnx(plan: Plan, folder: Path, path: Path, vw: int | None) -> None:
    from rich.console import Console

    from hetpipe_compiler.codegen.graph_file import load_graph
    from hetpipe_compiler.codegen.onnx import write_onnx

    graph = load_graph(folder)
    with Console(stderr=True).status("exporting (minutes for large models)"):
        write_onnx(plan, folder, graph, path, vw=vw)
    _say_written(path)


def _say_written(path: Path) -> None:
    """On stderr, which leaves stdout to ``--json`` and the tables."""
    typer.echo(f"wrote {path}", err=True)


def main() -> NoReturn:
    """Entry point of the ``hetpipe-inspect`` command."""
    run_app(single_command(inspect))


if __name__ == "__main__":
    main()
