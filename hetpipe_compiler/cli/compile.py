"""``hetpipe-compile``: a model and a cluster in, a plan folder out."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetpipe_compiler.cli.boundary import run_app, single_command
from hetpipe_compiler.errors import ClusterError

if TYPE_CHECKING:
    from hetpipe_compiler.ir.plan import Plan
    from hetpipe_compiler.options import CompileOptions, CompileResult

#: Names of the passes, in order; here so that --help need not import them.
PASSES = (
    "normalize",
    "eval_mode",
    "annotate_cost",
    "apply_profile",
    "fuse_atomic",
    "coarsen",
    "allocate",
    "partition",
    "bound_coarsening",
    "schedule",
    "verify",
)

#: Options by their headings in --help.
_plan_option = partial(typer.Option, rich_help_panel="The plan")
_model_option = partial(typer.Option, rich_help_panel="The model")
_print_option = partial(typer.Option, rich_help_panel="What is printed")


def command(
    model: Annotated[
        Path, typer.Argument(help="model.py that defines workload(), or a profiled graph (.json)", show_default=False)
    ],
    cluster: Annotated[Path | None, typer.Option(help="cluster file (YAML)", show_default=False)] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="plan folder to write")] = Path("out"),
    policy: Annotated[
        str,
        _plan_option(help="virtual workers: NP, ED, HD, auto (the best found), or a groups file"),
    ] = "ED",
    nm: Annotated[int | None, _plan_option(help="minibatches in flight (default: the planner's choice)")] = None,
    staleness: Annotated[int, _plan_option("--staleness", "-D", help="D: clocks a virtual worker may be ahead")] = 0,
    placement: Annotated[str, _plan_option(help="where parameters live: local or round-robin")] = "local",
    update_scale: Annotated[
        float | None,
        _plan_option(help="servers' factor on pushed updates (default: 1/N; the paper adds plainly: 1)"),
    ] = None,
    split: Annotated[
        list[str] | None,
        _plan_option(
            metavar="A,B,...",
            help="cut by hand: first node, module or block of each later stage; once for all"
            " virtual workers, or once for each",
        ),
    ] = None,
    partitioner: Annotated[
        str | None,
        _plan_option(
            metavar="NAME", help="make the stages by a function of your own: an entry point, or module:function"
        ),
    ] = None,
    decisions: Annotated[
        Path | None,
        _plan_option(metavar="FILE", help="take all decisions from an edited decisions.yaml of a plan folder"),
    ] = None,
    objective: Annotated[
        str,
        _plan_option(help="what a stage's time is: hetpipe (computation + transfers) or overlapped (the longer)"),
    ] = "hetpipe",
    recompute: Annotated[
        str,
        _plan_option(
            help="stages that keep their inputs only and run their forward again:"
            " auto (where memory needs it or it pays), never or always"
        ),
    ] = "auto",
    settings: Annotated[
        list[str] | None,
        _model_option("--set", metavar="NAME=VALUE", help="argument for workload(); may be repeated"),
    ] = None,
    seed: Annotated[int, _model_option(help="seed of the initial weights")] = 0,
    no_weights: Annotated[bool, _model_option("--no-weights", help="leave initial weights to hetpipe-run")] = False,
    verify: Annotated[
        bool,
        _model_option("--verify", help="run the stages beside the model; write no plan that computes something else"),
    ] = False,
    opaque: Annotated[
        list[str] | None,
        _model_option(
            metavar="MODULE",
            help="keep this submodule whole, whatever its forward does: one node, run as it is; may be repeated",
        ),
    ] = None,
    profile: Annotated[
        list[Path] | None,
        _model_option(metavar="FILE", help="times that hetpipe-profile measured; may be repeated"),
    ] = None,
    export_graph: Annotated[
        Path | None,
        _model_option(metavar="FILE", help="also write the model as a profiled graph (JSON)"),
    ] = None,
    explain_plan: Annotated[
        bool,
        _print_option("--explain-plan", help="say why the plan is as it is: bottleneck, bound, limits, alternatives"),
    ] = False,
    explain: Annotated[
        bool,
        _print_option("--explain", help="say what is captured of MODEL and plan nothing; needs no cluster"),
    ] = False,
    memory: Annotated[
        bool,
        _print_option("--memory", help="also print what makes up each stage's memory, and the hosts'"),
    ] = False,
    dump_after: Annotated[
        list[str] | None,
        _print_option(metavar="PASS", help=f"print what a pass made: {', '.join(PASSES)}"),
    ] = None,
    time_passes: Annotated[bool, _print_option("--time-passes", help="print the seconds that each step took")] = False,
    json: Annotated[bool, _print_option("--json", help="print the plan as JSON instead of tables")] = False,
) -> None:
    """Plan the training of MODEL on a mixed cluster and write stage modules, schedule and weights."""
    from hetpipe_compiler.options import CompileOptions, with_decisions

    _check(dump_after or [], json, memory)
    options = CompileOptions(
        policy=policy,
        nm=nm,
        staleness=staleness,
        placement=placement,
        update_scale=update_scale,
        splits=_splits(split),
        partitioner=partitioner,
        objective=objective,
        recompute=recompute,
        explain_plan=explain_plan,
        seed=seed,
        weights=not no_weights,
        verify=verify,
        opaque=tuple(opaque or ()),
        profiles=tuple(profile or ()),
        export_graph=export_graph,
        dump_after=frozenset(dump_after or []),
        on_dump=lambda name, text: print(f"--- {name} ---\n{text}", file=sys.stderr if json else sys.stdout),
    )
    if explain:
        printing = {"--decisions": decisions is not None, "--memory": memory, "--json": json}
        _refuse_beside_explain(options, printing | {"--time-passes": time_passes})
        _explain(model, settings or [], opaque or [])
        return
    if cluster is None:
        raise ClusterError("HP222", "no cluster file", where="--cluster", hint="only --explain needs none")
    if decisions is not None:
        options = with_decisions(options, decisions)
    result = _compiled(model, settings or [], cluster, out, options, json)
    _report(result.plan, out, json, memory)
    _say(result, json, time_passes)


def _compiled(
    model: Path, settings: list[str], cluster: Path, out: Path, options: CompileOptions, json: bool
) -> CompileResult:
    from rich.console import Console

    with Console(stderr=True).status("loading torch") as status:
        from hetpipe_compiler.compile_graph import compile_graph, is_graph_file, refuse_options
        from hetpipe_compiler.ir.cluster import Cluster

        options = replace(options, on_start=status.update)
        # What model.py prints must not land between the lines of the JSON.
        with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
            if is_graph_file(model):
                refuse_options(model, ["--set"] * bool(settings))
                return compile_graph(model, Cluster.load(cluster), out, options)
            from hetpipe_compiler.compiler import compile
            from hetpipe_compiler.frontend.load import parse_settings

            return compile(model, cluster, out, settings=parse_settings(settings), options=options)


def _explain(model: Path, settings: list[str], opaque: list[str]) -> None:
    from rich.console import Console

    with Console(stderr=True).status("loading torch") as status, contextlib.redirect_stdout(sys.stderr):
        from hetpipe_compiler.compile_graph import is_graph_file, refuse_options

        if is_graph_file(model):
            refuse_options(model, ["--explain"])
        from hetpipe_compiler.compiler import explain
        from hetpipe_compiler.frontend.load import parse_settings

        status.update("capture")
        text = explain(model, parse_settings(settings), opaque)
    print(text)


def _refuse_beside_explain(options: CompileOptions, printing: dict[str, bool]) -> None:
    """Raise `ClusterError` HP224 if an option is given that says how to plan: with ``--explain`` it means nothing."""
    unset = type(options)()
    names = {"staleness": "-D", "splits": "--split", "profiles": "--profile", "weights": "--no-weights"}
    fields = [field for field in vars(unset) if field not in ("opaque", "on_dump", "on_start")]
    given = [f for f in fields if getattr(options, f) != getattr(unset, f)]
    extra = [names.get(f, "--" + f.replace("_", "-")) for f in given] + [
        name for name, there in printing.items() if there
    ]
    if extra:
        hint = f"leave out --explain, or {', '.join(extra)}"
        raise ClusterError("HP224", "--explain plans nothing, so this means nothing", where=extra[0], hint=hint)


def _check(dump_after: list[str], json: bool, memory: bool) -> None:
    if json and memory:
        hint = "leave out --memory: the JSON holds the memory parts already"
        raise ClusterError("HP224", "--json prints no tables", where="--memory", hint=hint)
    for name in dump_after:
        if name not in PASSES:
            raise ClusterError("HP220", f"no pass '{name}'", where="--dump-after", hint=f"one of {', '.join(PASSES)}")


def _splits(split: list[str] | None) -> tuple[tuple[str | int, ...], ...] | None:
    return tuple(tuple(part.strip() for part in one.split(",") if part.strip()) for one in split) if split else None


def _report(plan: Plan, out: Path, json: bool, memory: bool) -> None:
    if json:
        print(plan.to_json(), end="")
        return
    from rich.console import Console

    from hetpipe_compiler.codegen.memory_tables import memory_tables
    from hetpipe_compiler.codegen.tables import plan_tables

    console = Console()
    for table in plan_tables(plan, width=console.width):
        console.print(table)
    if memory:
        for table in memory_tables(plan, width=console.width):
            console.print(table)
    note = "" if plan.dynamic_batch else f" (batch size fixed at {plan.batch_size}: {plan.dynamic_batch_note})"
    console.print(f"written: {out}{note}", highlight=False, soft_wrap=True)
    if plan.evaluation_note is not None:
        console.print(f"for training only: {plan.evaluation_note}", highlight=False, soft_wrap=True)


def _say(result: CompileResult, json: bool, time_passes: bool) -> None:
    """What there is to say beside the plan."""
    from rich.console import Console

    errors = Console(stderr=True)
    if result.verification is not None:
        errors.print(str(result.verification), highlight=False, soft_wrap=True)
    if result.explanation is not None:
        print(result.explanation, file=sys.stderr if json else sys.stdout)
    if time_passes:
        for name, seconds in result.seconds.items():
            errors.print(f"{name:16} {seconds:8.3f} s", highlight=False)


def main() -> Any:
    """Entry point."""
    return run_app(single_command(command))


if __name__ == "__main__":
    main()
