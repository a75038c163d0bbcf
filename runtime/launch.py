"""hetpipe-run: from a plan folder to trained weights in a run folder, on this machine.

The run folder gets ``run.json`` (options), ``events.jsonl``, ``metrics.jsonl``, ``logs/``, ``initial.safetensors`` (if
the plan has no weights), ``weights-wave<k>.safetensors`` (``--save-every``: weights that contain k waves of everybody),
``weights.safetensors`` and ``evaluation.json``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from rich.console import Console

from hetpipe_compiler.errors import ArtifactError, RunError
from hetpipe_compiler.frontend.load import LoadedWorkload, load_workload, workload_digest
from hetpipe_compiler.ir.plan import Plan
from hetpipe_compiler.runtime.job import FILE_NAME, Job
from hetpipe_compiler.runtime.preflight import check_plan_folder

DEFAULT_STEPS = 100


@dataclass(frozen=True)
class RunOptions:
    """The options of hetpipe-run.

    Attributes:
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


@dataclass(frozen=True)
class Prepared:
    """A run that may start: everything that can be refused before has been checked."""

    plan: Plan
    loaded: LoadedWorkload
    job: Job
    run: Path
    console: Console


def launch(options: RunOptions, console: Console | None = None) -> int:
    """Train. Returns the exit status: 0, or 130 after Ctrl-C (with the weights saved).

    Raises:
        HetpipeError: whatever keeps the run from starting or ends it.
    """
    console = console or Console(stderr=True)
    prepared = prepare(options, console)
    if options.interpret:
        from hetpipe_compiler.runtime.run_interpreted import run_interpreted as train
    else:
        from hetpipe_compiler.runtime.run_distributed import run_distributed

        def train(prepared: Prepared) -> bool:
            return run_distributed(prepared, port=options.port)

    if not train(prepared):
        return 130
    _evaluate(prepared)
    return 0


def prepare(options: RunOptions, console: Console) -> Prepared:
    """Check everything and make the run folder, in which nothing is yet but weights that the plan has not.

    Raises:
        ArtifactError: HP401-HP403 the plan; HP404 it was made from a profiled graph; else see `check_plan_folder`.
        RunError: HP515, HP517 no data; HP550 the run folder is in use; HP551 contradicting options; HP552 not enough
            GPUs; HP554 the run folder cannot be made; HP555-HP557, HP559 initial weights cannot be made.
        WorkloadError: HP1xx the workload cannot be loaded.
    """
    plan = Plan.load(options.plan)
    if plan.workload is None:
        raise ArtifactError(
            "HP404",
            "the plan was made from a profiled graph: there is no model to train",
            where=str(options.plan),
            hint="compile a model.py",
        )
    _check_options(options)
    _check_run_folder(options.run)
    loaded = _load(options, plan, console)  # first: stage modules may import what lies beside --workload
    check_plan_folder(plan, options.plan)
    backend = _choose_backend(options, plan, console)
    seed = plan.seed if options.seed is None else options.seed
    minibatches, lengths = _length(options, plan, loaded, seed, console)
    _make_run_folder(options.run)
    weights = options.plan / "weights.safetensors"
    if not plan.weights:
        weights = _make_weights(plan, loaded, options.run)
    job = Job(
        plan=options.plan.resolve(),
        computes=plan.computes(),
        minibatches=minibatches,
        shard_lengths=lengths,
        seed=seed,
        reproducible=options.reproducible,
        threads=options.threads,
        backend=backend,
        workload=loaded.path.resolve(),
        settings=loaded.settings,
        weights=weights.resolve(),
        save_every=options.save_every,
        timeout_s=options.timeout_s,
    )
    return Prepared(plan, loaded, job, options.run, console)


def say(console: Console, text: str) -> None:
    """Print a line as it is: no markup, no wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _check_options(options: RunOptions) -> None:
    if options.epochs is not None and options.steps is not None:
        raise RunError("HP551", "--epochs and --steps exclude each other", hint="give one of them")
    if options.interpret and options.save_every is not None:
        raise RunError("HP551", "--interpret saves weights at the end only", hint="leave out --save-every")
    for name in ("epochs", "steps", "threads", "save_every", "timeout_s"):
        value = getattr(options, name)
        if value is not None and not value > 0:  # NaN is not
            flag = "--timeout" if name == "timeout_s" else "--" + name.replace("_", "-")
            raise RunError("HP551", f"{flag} {value:g} is not positive", hint="give a number above 0")
    if options.port is not None and not 0 < options.port < 65536:
        raise RunError("HP551", f"--port {options.port} is no port", hint="give one between 1 and 65535")
    if options.seed is not None and not 0 <= options.seed < 2**63:
        raise RunError("HP551", f"--seed {options.seed} is out of range", hint="give one between 0 and 2^63 - 1")


def _check_run_folder(run: Path) -> None:
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        what = "is not empty" if run.is_dir() else "is a file"
        raise RunError("HP550", f"the run folder {what}", where=str(run), hint="choose another -o, or remove it")


def _make_run_folder(run: Path) -> None:
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


def _choose_backend(options: RunOptions, plan: Plan, console: Console) -> Literal["cpu", "cuda"]:
    """The interpreter needs one CUDA device and uses it only when told to."""
    if options.backend == "cpu" or (options.interpret and options.backend == "auto"):
        return "cpu"
    import torch

    need = 1 if options.interpret else sum(len(worker.stages) for worker in plan.virtual_workers)
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
        say(console, f"{have} CUDA devices for {need} stages: training on the CPU")
    return "cpu"


def _load(options: RunOptions, plan: Plan, console: Console) -> LoadedWorkload:
    assert plan.workload is not None
    path = options.workload or options.plan / plan.workload.path
    if path.is_file() and workload_digest(path, plan.workload.settings) != plan.workload.digest:
        say(
            console,
            f"warning: {path} is not the model.py that the plan was made from; if you edited it, compile again",
        )
    return load_workload(path, plan.workload.settings)


def _length(
    options: RunOptions, plan: Plan, loaded: LoadedWorkload, seed: int, console: Console
) -> tuple[int, tuple[int, ...] | None]:
    """Minibatches of each virtual worker in the run, and the lengths of the shards."""
    from hetpipe_compiler.runtime.batches import shard_lengths

    lengths = shard_lengths(
        loaded, len(plan.virtual_workers), seed, at_most=options.steps, on_note=partial(say, console)
    )
    if lengths is None:
        if options.epochs is not None:
            raise RunError(
                "HP551",
                "--epochs needs a workload with data",
                where=str(loaded.path),
                hint="give --steps, or data= in workload()",
            )
        return options.steps or DEFAULT_STEPS, None
    if options.steps is not None:
        return options.steps, lengths
    return max(lengths) * (options.epochs or 1), lengths


def _make_weights(plan: Plan, loaded: LoadedWorkload, run: Path) -> Path:
    """The very weights that compiling would have saved: the run's own seed is for data and dropout."""
    from hetpipe_compiler.runtime import build_model, checkpoint

    path = run / "initial.safetensors"
    model = build_model.build_model(loaded, plan.seed)
    values = build_model.initial_values(model)
    wanted = [t.name for t in (*plan.parameters, *plan.buffers)]
    missing = [name for name in wanted if name not in values]
    if missing:
        raise RunError(
            "HP559",
            f"the model has no '{missing[0]}', which the plan trains",
            where=str(loaded.path),
            hint="the model differs from the planned one: compile again",
        )
    checkpoint.save(path, {name: values[name] for name in wanted}, seed=plan.seed)
    return path


def _evaluate(prepared: Prepared) -> None:
    from hetpipe_compiler.runtime import checkpoint
    from hetpipe_compiler.runtime.progress import finite

    numbers = checkpoint.evaluate(prepared.loaded, prepared.run / "weights.safetensors", prepared.job.seed)
    if numbers is None:
        return
    text = json.dumps({name: finite(value) for name, value in numbers.items()}, indent=1)
    (prepared.run / "evaluation.json").write_text(text + "\n")
    for name, value in numbers.items():
        say(prepared.console, f"{name} {value:.6g}")
