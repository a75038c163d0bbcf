"""``hetpipe-run``: train with a plan, or evaluate with one."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from hetpipe_compiler.cli.boundary import run_app, single_command


class Backend(str, Enum):
    """Where stages compute: ``auto`` takes CUDA if this machine has a device for every stage."""

    CPU = "cpu"
    CUDA = "cuda"
    AUTO = "auto"


_TRAINING, _EVALUATION = "Training", "Evaluation"


def run(
    plan: Annotated[Path, typer.Argument(help="Folder that hetpipe-compile wrote.", show_default=False)],
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", help="Run folder to make: weights or results, logs, metrics.", show_default=False
        ),
    ],
    seed: Annotated[int | None, typer.Option(help="Of data order, dropout and the like; default: the plan's.")] = None,
    backend: Annotated[Backend, typer.Option(help="Gloo on the CPU, NCCL on GPUs, or what fits.")] = Backend.AUTO,
    threads: Annotated[int, typer.Option(help="Compute threads of each process.")] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds without progress of any process until giving up.")] = 300.0,
    workload: Annotated[
        Path | None, typer.Option(help="Use this model.py, for instance because it imports files beside it.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port of the rendezvous on 127.0.0.1; default: a free one.")] = None,
    epochs: Annotated[
        int | None,
        typer.Option(help="Epochs to train; default 1 if the workload has data.", rich_help_panel=_TRAINING),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Minibatches of each virtual worker, instead of --epochs.", rich_help_panel=_TRAINING),
    ] = None,
    reproducible: Annotated[
        bool,
        typer.Option(
            "--reproducible", help="The same bits in every run, whatever the timing.", rich_help_panel=_TRAINING
        ),
    ] = False,
    interpret: Annotated[
        bool,
        typer.Option(
            "--interpret", help="Train in one process and virtual time: the reference.", rich_help_panel=_TRAINING
        ),
    ] = False,
    save_every: Annotated[
        int | None,
        typer.Option(help="Save weights each time so many waves are complete.", rich_help_panel=_TRAINING),
    ] = None,
    evaluate: Annotated[
        Path | None,
        typer.Option(
            help="Train nothing: print the loss of these weights on the workload's evaluation_data.",
            metavar="WEIGHTS",
            rich_help_panel=_EVALUATION,
        ),
    ] = None,
    vw: Annotated[
        int | None,
        typer.Option(
            help="Evaluate with the stages of this virtual worker; default: the first.",
            min=0,
            metavar="N",
            rich_help_panel=_EVALUATION,
        ),
    ] = None,
) -> None:
    """Train with a plan: one process per stage of each virtual worker and one parameter server per node, here.

    Ctrl-C stops the workers and saves the weights so far. With --evaluate: one process per stage of one virtual worker,
    forward only, in eval mode.
    """
    from hetpipe_compiler.runtime.launch import launch
    from hetpipe_compiler.runtime.run_options import RunOptions

    status = launch(
        RunOptions(
            plan=plan,
            run=output,
            epochs=epochs,
            steps=steps,
            seed=seed,
            reproducible=reproducible,
            threads=threads,
            save_every=save_every,
            timeout_s=timeout,
            workload=workload,
            interpret=interpret,
            backend=backend.value,
            port=port,
            evaluate=evaluate,
            vw=vw,
        )
    )
    raise typer.Exit(status)


def main() -> None:
    """Entry point of ``hetpipe-run``."""
    run_app(single_command(run))


if __name__ == "__main__":
    main()
