"""The options of hetpipe-run, and what can be refused of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from hetpipe_compiler.codegen.quantities import counted
from hetpipe_compiler.errors import RunError
from hetpipe_compiler.runtime.job import FILE_NAME

#: Run folders that this process has found free and made: what lies in any other is another run's.
_own_folders: set[Path] = set()


@dataclass(frozen=True)
class RunOptions:
    """The options of hetpipe-run.

    Attributes:
        evaluate: Train nothing: say the loss of these weights on the workload's evaluation data.
        vw: The virtual worker that evaluates; None: the first.
        run: The run folder; must not exist or be empty.
        epochs, steps: How long: epochs, or minibatches of each virtual worker; neither: one epoch, or 100 minibatches
            without ``data`` in the workload.
        seed: None: the plan's.
        save_every: Waves between saved weights.
        timeout_s: Seconds without progress until the run ends.
        workload: Use this model.py instead of the plan's copy.
        interpret: One process, virtual time.
        port: Of the store on 127.0.0.1; None: a free one.
    """

    plan: Path
    run: Path
    epochs: int | None = None
    steps: int | None = None
    seed: int | None = None
    reproducible: bool = False
    threads: int = 1
    save_every: int | None = None
    timeout_s: float = 300.0
    workload: Path | None = None
    interpret: bool = False
    backend: Literal["cpu", "cuda", "auto"] = "auto"
    port: int | None = None
    evaluate: Path | None = None
    vw: int | None = None


def check_options(options: RunOptions) -> None:
    """Refuse options that exclude each other or make no sense: `RunError` HP551."""
    if options.evaluate is not None:
        for name in ("epochs", "steps", "save_every", "reproducible", "interpret"):
            if getattr(options, name):
                raise RunError(
                    "HP551", f"--evaluate trains nothing: {_flag(name)} is for training", hint="leave it out"
                )
    elif options.vw is not None:
        raise RunError("HP551", "--vw is for --evaluate", hint="all virtual workers train: leave it out")
    if options.epochs is not None and options.steps is not None:
        raise RunError("HP551", "--epochs and --steps exclude each other", hint="give one of them")
    if options.interpret and options.save_every is not None:
        raise RunError("HP551", "--interpret saves weights at the end only", hint="leave out --save-every")
    for name in ("epochs", "steps", "threads", "save_every", "timeout_s"):
        value = getattr(options, name)
        if value is not None and not value > 0:  # NaN is not
            raise RunError("HP551", f"{_flag(name)} {value:g} is not positive", hint="give a number above 0")
    if options.port is not None and not 0 < options.port < 65536:
        raise RunError("HP551", f"--port {options.port} is no port", hint="give one between 1 and 65535")
    if options.seed is not None and not 0 <= options.seed < 2**63:
        raise RunError("HP551", f"--seed {options.seed} is out of range", hint="give one between 0 and 2^63 - 1")


def check_run_folder(run: Path) -> None:
    """Refuse a run folder in use: `RunError` HP550."""
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        what = "is not empty" if run.is_dir() else "is a file"
        raise RunError("HP550", f"the run folder {what}", where=str(run), hint="choose another -o, or remove it")


def make_run_folder(run: Path) -> None:
    """Make it; raises `RunError` HP554, or HP550 when another run has just begun there."""
    check_run_folder(run)
    _own_folders.add(run)
    try:
        run.mkdir(parents=True, exist_ok=True)
        probe = run / f".{FILE_NAME}.probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise RunError(
            "HP554",
            f"cannot make the run folder: {error.strerror or error}",
            where=str(run),
            hint="choose an -o where you may write and there is room",
        ) from None


@contextmanager
def nothing_half_made(run: Path) -> Iterator[None]:
    """Around all that makes and fills a run folder: Ctrl-C, or an error before any process ran, leaves it as it was.

    What is worth keeping is kept: weights, and after an error the log.
    """
    was_there = run.is_dir()
    try:
        yield
    except BaseException as error:
        if run in _own_folders and not _worth_keeping(run, error):
            _clear(run, keep_folder=was_there)
        raise
    finally:
        _own_folders.discard(run)


def _worth_keeping(run: Path, error: BaseException) -> bool:
    if any(run.glob("weights*.safetensors")):
        return True
    log = run / "events.jsonl"
    something_ran = (run / "logs").exists() or (log.exists() and log.stat().st_size > 0)
    return something_ran and not isinstance(error, KeyboardInterrupt)


def _clear(run: Path, *, keep_folder: bool) -> None:
    with suppress(OSError):
        for path in run.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not keep_folder:
            run.rmdir()


def choose_backend(options: RunOptions, stages: int, console: Console) -> Literal["cpu", "cuda"]:
    """Where the run computes, given how many stages want a device each; raises `RunError` HP552 not enough GPUs.

    The interpreter needs one CUDA device and uses it only when told to.
    """
    if options.backend == "cpu" or (options.interpret and options.backend == "auto"):
        return "cpu"
    import torch

    need = 1 if options.interpret else stages
    have = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if have >= need:
        return "cuda"
    if options.backend == "cuda":
        raise RunError(
            "HP552",
            f"the run needs {f'{need} CUDA devices, one a stage' if need > 1 else 'a CUDA device'};"
            f" this machine has {have} usable ones",
            where="--backend cuda",
            hint="use --backend cpu to rehearse on the CPU, or compile for this machine's devices",
        )
    if have:
        say(console, f"{counted(have, 'CUDA device')} for {counted(need, 'stage')}: running on the CPU")
    return "cpu"


def say(console: Console, text: str) -> None:
    """Print a line as it is: no markup, no wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _flag(name: str) -> str:
    return "--timeout" if name == "timeout_s" else "--" + name.replace("_", "-")
