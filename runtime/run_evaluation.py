"""Evaluate with real processes on this machine: one per stage of one virtual worker, forward only, in eval mode.

There are no parameter servers and no optimizers. The run folder gets ``run.json`` (options), ``events.jsonl`` (with the
samples and the loss of every minibatch), ``logs/`` and ``evaluation.json``.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from rich.console import Console

from hetpipe_compiler.codegen.quantities import counted
from hetpipe_compiler.files import write_text
from hetpipe_compiler.runtime.eval_stage import check_evaluates
from hetpipe_compiler.runtime.evaluation_data import evaluation_minibatches, no_samples
from hetpipe_compiler.runtime.evaluation_progress import EvaluationProgress
from hetpipe_compiler.runtime.job import Job
from hetpipe_compiler.runtime.preflight import check_stages
from hetpipe_compiler.runtime.prepared import Prepared, open_plan
from hetpipe_compiler.runtime.progress import rate
from hetpipe_compiler.runtime.run_options import RunOptions, choose_backend, make_run_folder, say
from hetpipe_compiler.runtime.run_processes import RunProcesses, open_store
from hetpipe_compiler.runtime.trained import check_trained, unsaved_buffers

RESULT_FILE = "evaluation.json"


def prepare_evaluation(options: RunOptions, console: Console) -> Prepared:
    """Check everything and make the run folder, in which nothing is yet but buffers that neither the plan folder nor
    the weights have.

    Raises:
        ArtifactError: HP401-HP404 the plan; HP402, HP415-HP416 its stages and constants, or the weights file; HP441 no
            such virtual worker.
        RunError: HP513 weights that do not fit; HP515-HP517, HP522 the evaluation data; HP520 the plan does not run in
            eval mode; HP550-HP552, HP554 as for training; HP555-HP557 buffers cannot be made.
        WorkloadError: HP1xx the workload cannot be loaded.
    """
    assert options.evaluate is not None
    plan, loaded = open_plan(options, console)
    check_evaluates(plan, options.plan)
    vw = options.vw or 0
    worker = plan.worker(vw)
    check_stages(plan, options.plan, [worker])
    note = partial(say, console)
    check_trained(plan, worker, options.evaluate, note)
    # A device for each stage, at the place that it has in training: those of earlier virtual workers come before.
    devices = sum(len(w.stages) for w in plan.virtual_workers[: vw + 1])
    backend = choose_backend(options, devices, console)
    seed = plan.seed if options.seed is None else options.seed
    minibatches = evaluation_minibatches(plan, vw, loaded, seed, note)
    make_run_folder(options.run)
    unsaved = unsaved_buffers(plan, worker, options.plan, loaded, options.run)
    job = Job(
        evaluates=vw,
        plan=options.plan.resolve(),
        computes=plan.computes(),
        fingerprint=plan.fingerprint(),
        minibatches=minibatches,
        shard_lengths=None,
        seed=seed,
        reproducible=False,
        threads=options.threads,
        backend=backend,
        workload=loaded.path.resolve(),
        settings=loaded.settings,
        weights=options.evaluate.resolve(),
        unsaved_buffers=unsaved.resolve() if unsaved is not None else None,
        save_every=None,
        timeout_s=options.timeout_s,
    )
    return Prepared(plan, loaded, job, options.run, console)


def run_evaluation(prepared: Prepared, *, port: int | None = None) -> None:
    """Evaluate, print the result and write it.

    Raises:
        RunError: HP515 all batches are empty; HP553 the port is in use; HP560-HP562 a process failed, or nothing goes
            on.
        KeyboardInterrupt: Ctrl-C ended it.
    """
    job, run = prepared.job, prepared.run
    vw = job.evaluates or 0
    stages = len(prepared.plan.worker(vw).stages)
    store = open_store(port)
    progress = EvaluationProgress(job.minibatches, stages, prepared.console)

    with progress, RunProcesses(run, job, store, progress.on_event) as children:
        children.start_stages(vw, stages, "evaluation_worker")
        states = children.supervisor.states
        children.supervisor.wait_until(lambda: all(s.finished for s in states.values()))
    found = progress.result()
    assert found.minibatches == job.minibatches, "a minibatch has no loss"
    if not found.samples:
        raise no_samples(prepared.loaded)
    result: dict[str, Any] = {**found.to_dict(), "weights": str(job.weights), "virtual_worker": vw}
    write_text(run / RESULT_FILE, json.dumps(result, indent=1) + "\n")
    say(
        prepared.console,
        f"loss {found.loss:.6g} over {counted(found.samples, 'sample')} in {counted(found.minibatches, 'minibatch')},"
        f" {rate(found.samples_per_s)} samples/s",
    )
