"""hetpipe-run: from a plan folder to trained weights in a run folder, on this machine.

The run folder gets ``run.json`` (options), ``events.jsonl``, ``metrics.jsonl``, ``logs/``, ``initial.safetensors`` (if
the plan has no weights), ``weights-wave<k>.safetensors`` (``--save-every``: weights that contain k waves of everybody),
``weights.safetensors`` and ``evaluation.json``.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from rich.console import Console

from hetpipe_compiler.errors import RunError
from hetpipe_compiler.files import write_text
from hetpipe_compiler.frontend.load import LoadedWorkload
from hetpipe_compiler.ir.plan import Plan
from hetpipe_compiler.runtime.job import Job
from hetpipe_compiler.runtime.preflight import check_plan_folder
from hetpipe_compiler.runtime.prepared import Prepared, open_plan
from hetpipe_compiler.runtime.run_options import RunOptions, choose_backend, make_run_folder, nothing_half_made, say

DEFAULT_STEPS = 100


def launch(options: RunOptions, console: Console | None = None) -> int:
    """Train, or evaluate. Returns the exit status: 0, or 130 after Ctrl-C while training, with the weights saved.

    Raises:
        HetpipeError: whatever keeps the run from starting or ends it.
        KeyboardInterrupt: Ctrl-C where there is nothing to save: the run folder is then as it was.
    """
    console = console or Console(stderr=True)
    with nothing_half_made(options.run):
        if options.evaluate is not None:
            from hetpipe_compiler.runtime.run_evaluation import prepare_evaluation, run_evaluation

            run_evaluation(prepare_evaluation(options, console), port=options.port)
            return 0
        return _train(options, console)


def _train(options: RunOptions, console: Console) -> int:
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
    """Check everything for training and make the run folder, in which nothing is yet but weights that the plan has not.

    Raises:
        ArtifactError: HP401-HP403 the plan; HP404 it was made from a profiled graph; else see `check_plan_folder`.
        RunError: HP515, HP517 no data; HP550 the run folder is in use; HP551 contradicting options; HP552 not enough
            GPUs; HP554 the run folder cannot be made; HP555-HP557, HP559 initial weights cannot be made.
        WorkloadError: HP1xx the workload cannot be loaded.
    """
    plan, loaded = open_plan(options, console)
    check_plan_folder(plan, options.plan)
    backend = choose_backend(options, sum(len(worker.stages) for worker in plan.virtual_workers), console)
    seed = plan.seed if options.seed is None else options.seed
    minibatches, lengths = _length(options, plan, loaded, seed, console)
    make_run_folder(options.run)
    weights = options.plan / "weights.safetensors"
    if not plan.weights:
        weights = _make_weights(plan, loaded, options.run)
    job = Job(
        plan=options.plan.resolve(),
        computes=plan.computes(),
        fingerprint=plan.fingerprint(),
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
    write_text(prepared.run / "evaluation.json", text + "\n")
    for name, value in numbers.items():
        say(prepared.console, f"{name} {value:.6g}")
