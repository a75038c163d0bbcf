"""Predicted against measured stage times on this machine's CPU, one thread.

For each model: profile its operators here, plan it for some equal CPU devices, then run every stage module forward and
backward on a real batch and compare. One thread's own time is what counts, so other programs may run meanwhile.

``python -m bench.check_prediction --models resnet50,vit_b_16,gpt2 --stages 2,3,4``
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.utils._pytree import tree_leaves

from hetpipe_compiler.compiler import compile
from hetpipe_compiler.frontend.load import load_workload
from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.ir.plan import Plan, Port, Stage
from hetpipe_compiler.ir.stage_file import load_stage_class
from hetpipe_compiler.options import CompileOptions
from hetpipe_compiler.profiling.measure import Effort
from hetpipe_compiler.profiling.run_profile import ProfileOptions, calls_of, profile_calls

WORKLOADS = Path(__file__).parent / "profile_workloads.py"
BATCHES = {"resnet50": 4, "vit_b_16": 1, "gpt2": 2}


@dataclass(frozen=True)
class Compared:
    """One stage: milliseconds of forward + backward, and how much of the prediction is measured."""

    model: str
    stages: int
    stage: int
    predicted_ms: float
    measured_ms: float
    measured_share: float

    @property
    def error(self) -> float:
        """Relative to the measured."""
        return self.predicted_ms / self.measured_ms - 1


def cluster_of(devices: int) -> Cluster:
    """CPU devices alike, with memory for anything."""
    kind = {"cpu": {"memory_gb": 1000}}
    node = {"name": "n0", "devices": {"cpu": devices}, "link": "loopback"}
    return Cluster.from_dict({"name": "here", "nodes": [node], "kinds": kind})


def check(
    model: str, stage_counts: list[int], *, batch_size: int, seconds: float, runs: int, folder: Path
) -> list[Compared]:
    """Profile ``model`` here and compare its stages in partitions of these sizes."""
    settings: dict[str, Any] = {"name": model, "batch_size": batch_size}
    profile = folder / f"{model}.json"
    _, calls = calls_of(load_workload(WORKLOADS, settings))
    profile_calls(calls, profile, ProfileOptions(kind="cpu", effort=Effort(seconds=seconds)))
    compared = []
    for count in stage_counts:
        out = folder / f"{model}{count}"
        options = CompileOptions(policy="NP", nm=1, weights=False, profiles=(profile,))
        plan = compile(WORKLOADS, cluster_of(count), out, settings=settings, options=options).plan
        batch = load_workload(WORKLOADS, settings).workload.example_batch()
        stages = plan.virtual_workers[0].stages
        for stage, measured_ms in zip(stages, measure_stages(out, plan, batch, runs), strict=True):
            predicted_ms = stage.forward_ms + stage.backward_ms
            compared.append(
                Compared(
                    model,
                    len(stages),
                    stage.index,
                    predicted_ms,
                    measured_ms,
                    stage.measured_share,
                )
            )
    return compared


def measure_stages(folder: Path, plan: Plan, batch: Any, runs: int) -> list[float]:
    """Median milliseconds of each stage module's forward and backward, on one thread, after a warm-up.

    The stages run one after another on the real batch, with weights as good as any.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    stages = plan.virtual_workers[0].stages
    modules = [load_stage_class(folder, stage.module)() for stage in stages]
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                torch.nn.init.uniform_(tensor, 0.0, 0.05)
    constants = load_file(folder / "constants.safetensors")
    for module in modules:
        module.load_state_dict(constants, strict=False)
        for name, buffer in module.named_buffers():
            if name in constants:
                buffer.copy_(constants[name])
    leaves = tree_leaves(batch)
    samples = [_run_once(stages, modules, leaves, plan.loss) for _ in range(runs + 1)][1:]
    return [statistics.median(times) for times in zip(*samples, strict=True)]


def _run_once(
    stages: tuple[Stage, ...], modules: list[torch.nn.Module], leaves: list[Any], loss: str | None
) -> list[float]:
    """Milliseconds of each stage for one minibatch."""
    times = [0.0] * len(stages)
    inputs: list[dict[str, Any]] = []
    outputs: list[dict[str, Any]] = []
    for stage, module in zip(stages, modules, strict=True):
        given = {port.name: _input(port, outputs, leaves) for port in stage.inputs}
        begin = time.thread_time()
        made = module(*given.values())
        times[stage.index] = time.thread_time() - begin
        inputs.append(given)
        outputs.append({port.name: value for port, value in zip(stage.outputs, made, strict=True)})
    for stage in reversed(stages):
        roots = [(n, v) for n, v in outputs[stage.index].items() if isinstance(v, torch.Tensor) and v.requires_grad]
        gradients = [None if name == loss else _gradient(name, inputs[stage.index + 1 :]) for name, _ in roots]
        kept = [at for at, (name, _) in enumerate(roots) if name == loss or gradients[at] is not None]
        begin = time.thread_time()
        torch.autograd.backward([roots[at][1] for at in kept], [gradients[at] for at in kept])
        times[stage.index] += time.thread_time() - begin
    for module in modules:
        module.zero_grad(set_to_none=True)
    return [seconds * 1e3 for seconds in times]


def _input(port: Port, outputs: list[dict[str, Any]], leaves: list[Any]) -> Any:
    value = leaves[port.batch_leaf] if port.batch_leaf is not None and not outputs else outputs[port.source][port.name]
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(port.requires_grad)


def _gradient(name: str, later: list[dict[str, Any]]) -> torch.Tensor | None:
    found = [given[name].grad for given in later if name in given and given[name].grad is not None]
    return torch.stack(found).sum(0) if len(found) > 1 else found[0] if found else None


def table(compared: list[Compared]) -> str:
    """As text."""
    lines = ["model      stages stage  predicted ms  measured ms  error  measured share"]
    lines += [
        f"{c.model:10} {c.stages:6} {c.stage:5} {c.predicted_ms:13.2f} {c.measured_ms:12.2f} {c.error:6.1%}"
        f" {c.measured_share:14.0%}"
        for c in compared
    ]
    median = statistics.median(abs(c.error) for c in compared)
    return "\n".join([*lines, f"median error over {len(compared)} stages: {median:.1%}"])


def main() -> None:
    """Check, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="resnet50,vit_b_16,gpt2")
    parser.add_argument("--stages", default="2,3,4")
    parser.add_argument("--seconds", type=float, default=0.1, help="to measure each operator for")
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    compared = []
    with tempfile.TemporaryDirectory() as folder:
        for model in given.models.split(","):
            counts = [int(count) for count in given.stages.split(",")]
            compared += check(
                model,
                counts,
                batch_size=BATCHES[model],
                seconds=given.seconds,
                runs=given.runs,
                folder=Path(folder),
            )
    print(table(compared))


if __name__ == "__main__":
    main()
