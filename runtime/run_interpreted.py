"""``hetpipe-run --interpret``: the reference semantics in one process, with the same files in the run folder."""

from __future__ import annotations

import time
from typing import Any

import torch

from hetpipe_compiler.runtime import checkpoint
from hetpipe_compiler.runtime.events import JsonLines
from hetpipe_compiler.runtime.initial import load_weights
from hetpipe_compiler.runtime.interpret import interpret
from hetpipe_compiler.runtime.prepared import Prepared
from hetpipe_compiler.runtime.progress import Progress, finite


def run_interpreted(prepared: Prepared) -> bool:
    """Train to the end and save the weights. Ctrl-C passes through: nothing is saved."""
    job, plan, run = prepared.job, prepared.plan, prepared.run
    job.save(run)
    torch.set_num_threads(job.threads)
    stages = [len(worker.stages) for worker in plan.virtual_workers]
    log = JsonLines(run / "events.jsonl")
    device = "cuda" if job.backend == "cuda" else "cpu"
    try:
        with Progress(job.minibatches, stages, run / "metrics.jsonl", prepared.console) as progress:

            def on_event(event: dict[str, Any]) -> None:
                kind = event["event"]
                record = {"kind": kind, "process": "interpreter", "time": time.time()}
                record.update({k: v for k, v in event.items() if k != "event"})
                if kind == "loss":
                    record["kind"] = "minibatch"
                log.write({k: finite(v) if isinstance(v, float) else v for k, v in record.items()})
                if kind == "note":
                    progress.note(event["text"])
                progress.on_event(record)

            result = interpret(
                plan,
                job.plan,
                prepared.loaded,
                minibatches=job.minibatches,
                seed=job.seed,
                reproducible=job.reproducible,
                on_event=on_event,
                weights=load_weights(plan, job.weights),
                device=device,
                lengths=job.shard_lengths,
            )
            path = run / "weights.safetensors"
            checkpoint.save(path, checkpoint.state_dict(plan, result.weights), virtual_ms=result.elapsed_ms)
            progress.note(f"saved {path}; predicted time of the run {result.elapsed_ms / 1e3:.3f} s")
    finally:
        log.close()
    return True
