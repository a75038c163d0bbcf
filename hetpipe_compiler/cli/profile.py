"""``hetpipe-profile``: measure operators, links and efficiencies on the machine that it runs on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetpipe_compiler.cli.boundary import run_app, single_command
from hetpipe_compiler.files import check_file

if TYPE_CHECKING:
    from hetpipe_compiler.ir.profile_file import Profile


def command(
    model: Annotated[Path | None, typer.Argument(help="model.py that defines workload()", show_default=False)] = None,
    kind: Annotated[
        str | None,
        typer.Option(help="device kind, as in the cluster file, that this machine's device is", metavar="KIND"),
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="profile to write, or to add to")] = Path("profile.json"),
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="argument for workload(); may be repeated")
    ] = None,
    opaque: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE", help="as for hetpipe-compile: not looked into, so not measured"),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads to compute with", min=1)] = 1,
    seconds: Annotated[float, typer.Option(help="to measure each operator for, at least", min=0.0)] = 0.1,
    again: Annotated[bool, typer.Option("--again", help="measure anew what the profile has already")] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="fit the device's efficiencies; print them for a cluster file")
    ] = False,
    links: Annotated[bool, typer.Option("--links", help="measure a link; print it for a cluster file")] = False,
    coordinator: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="--links between two nodes: where rank 0 listens")
    ] = None,
    rank: Annotated[int, typer.Option(help="--links between two nodes: 0 or 1", min=0, max=1)] = 0,
) -> None:
    """Measure MODEL's operators here; hetpipe-compile --profile then plans with these times.

    Interrupted, it keeps what it has measured; the same command goes on there.
    """
    if links:
        if model is not None or calibrate:
            raise typer.BadParameter("--links measures no model: run it by itself")
        _links(coordinator, rank)
        return
    if coordinator is not None or rank:
        raise typer.BadParameter("--coordinator and --rank are for --links")
    if kind is None or not kind.strip():
        raise typer.BadParameter("name the device kind that is measured: --kind")
    if model is None and not calibrate:
        raise typer.BadParameter("give a model.py, or --calibrate, or --links")
    _profile(model, kind, out, settings or [], opaque or [], (device, threads, seconds, again), calibrate)


def _profile(
    model: Path | None,
    kind: str,
    out: Path,
    settings: list[str],
    opaque: list[str],
    how: tuple[str, int, float, bool],
    calibrate: bool,
) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    errors = Console(stderr=True)
    with errors.status("loading torch") as status:
        from hetpipe_compiler.frontend.load import load_workload, parse_settings
        from hetpipe_compiler.profiling import calibration_model
        from hetpipe_compiler.profiling.measure import Effort
        from hetpipe_compiler.profiling.run_profile import ProfileOptions, calls_of, profile_calls, usable_device

        usable_device(how[0])
        check_file(out)
        status.update("capture")
        path = model or Path(calibration_model.__file__)
        costs, calls = calls_of(load_workload(path, parse_settings(settings)), opaque)
    columns = (TextColumn("{task.description:40.40}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True) as progress:
        task = progress.add_task("", total=None)
        options = ProfileOptions(
            kind=kind,
            device=how[0],
            threads=how[1],
            effort=Effort(seconds=how[2]),
            again=how[3],
            on_progress=lambda done, total, key: progress.update(task, completed=done, total=total, description=key),
        )
        profile = profile_calls(calls, out, options)
    _summary(profile, list(calls), out, errors)
    if calibrate:
        _calibrate(profile, costs, kind, how[0])


def _summary(profile: Profile, keys: list[str], out: Path, errors: Any) -> None:
    from hetpipe_compiler.codegen.quantities import counted

    here = [profile.operators[key] for key in keys]
    skipped = [(key, profile.operators[key].skipped) for key in keys if profile.operators[key].skipped]
    spreads = sorted(times.forward_spread for times in here if times.skipped is None)
    spread = f", median spread {spreads[len(spreads) // 2]:.0%}" if spreads else ""
    errors.print(
        f"written: {out} ({counted(len(here) - len(skipped), 'operator')}{spread})", highlight=False, soft_wrap=True
    )
    for key, reason in skipped:
        errors.print(f"estimated, not measured: {key}: {reason}", highlight=False, soft_wrap=True, markup=False)


def _calibrate(profile: Profile, costs: Any, kind: str, device: str) -> None:
    from hetpipe_compiler.devices.catalogue import load_catalogue
    from hetpipe_compiler.profiling.calibrate import Peaks, calibrate
    from hetpipe_compiler.profiling.run_profile import total_bytes, usable_device

    known = load_catalogue().kinds.get(kind)
    peaks = Peaks(known.fp32_tflops, known.memory_bandwidth_gb_s) if known else Peaks(0.0, 0.0)
    memory = known.memory_bytes if known else total_bytes(usable_device(device))
    fit = calibrate(costs.values(), profile, peaks)
    threads = f", {profile.threads} threads" if profile.threads > 1 else ""
    source = f"hetpipe-profile --calibrate on {profile.device}{threads}, torch {profile.torch}"
    print(fit.to_yaml(kind, memory, source), end="")


def _links(coordinator: str | None, rank: int) -> None:
    from rich.console import Console

    errors = Console(stderr=True)
    with errors.status("loading torch") as status:
        from hetpipe_compiler.profiling.links import measure_between, measure_local

        status.update("sending to and fro")
        if coordinator is None:
            fit = measure_local()
        else:
            found = measure_between(rank, coordinator, on_wait=lambda text: errors.print(text, highlight=False))
            if found is None:
                return
            fit = found
    for size, ms in zip(fit.bytes, fit.quartile_ms, strict=True):
        errors.print(f"{size:>10} B {ms:10.4f} ms", highlight=False)
    errors.print(f"the line is off by at most {fit.error:.0%}", highlight=False)
    print(fit.to_yaml())


def main() -> Any:
    """Entry point of the ``hetpipe-profile`` command."""
    return run_app(single_command(command))


if __name__ == "__main__":
    main()
