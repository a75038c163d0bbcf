"""One stage of a plan in a process of its own, and the most memory that it holds.

The stage's engine runs its own program of the plan's schedule. Its neighbours and the parameter servers are stand-ins:
values and gradients come as random tensors when an instruction receives them, what it sends is dropped, and each push
is answered with a full set of weights.

``python -m bench.stage_alone PLAN --stage 1`` prints one JSON object:

* ``resident``: growth of the resident set from just before the stage is built to its highest (``VmHWM`` of the kernel,
  reset at the start), after a small model of its own has loaded the libraries' kernels. Kernels' scratch counts.
* ``live``: the most bytes of tensor storage alive at once, seen operator by operator (`LiveBytesMode`). What kernels
  allocate and free inside does not count.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from sympy import sympify
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hetpipe_compiler.frontend.load import LoadedWorkload, load_workload
from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.ir.plan import Plan, Port
from hetpipe_compiler.passes.live_bytes import LiveBytesMode
from hetpipe_compiler.passes.place_communication import buffered_instructions
from hetpipe_compiler.passes.simulate.costs import PipelineCosts
from hetpipe_compiler.runtime.channels import MessageKind, PulledWeights
from hetpipe_compiler.runtime.initial import load_constants
from hetpipe_compiler.runtime.programs import load_schedule
from hetpipe_compiler.runtime.stage import StageEngine

#: Freed memory goes back to the system at once, so that the resident set is what is in use.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
}


class Neighbours:
    """`channels.Mailbox`: random values for what comes, nothing for what goes."""

    def __init__(self, plan: Plan, stage: int) -> None:
        stages = plan.virtual_workers[0].stages
        self._inputs = {port.name: port for port in stages[stage].inputs}
        self._outputs = {port.name: port for port in stages[stage].outputs}
        self._batch = plan.batch_size

    def send(self, kind: MessageKind, minibatch: int, peer: int, values: Mapping[str, Any]) -> None:
        pass

    def receive(self, kind: MessageKind, _minibatch: int, _peer: int, names: tuple[str, ...]) -> dict[str, Any]:
        ports = self._inputs if kind is MessageKind.ACTIVATIONS else self._outputs
        return {name: value_of(ports[name], self._batch) for name in names}


def value_of(port: Port, batch_size: int) -> Any:
    """Some value for a port, whose sizes may be expressions of the batch's."""
    if port.kind == "scalar":
        return {"int": batch_size, "float": 1.0, "bool": True}[port.dtype]
    dtype = getattr(torch, port.dtype)
    symbols = {str(symbol): batch_size for size in port.shape for symbol in sympify(size).free_symbols}
    shape = [int(sympify(size).subs(symbols)) for size in port.shape]
    return (
        torch.empty(shape, dtype=dtype).uniform_(-1, 1) if dtype.is_floating_point else torch.ones(shape, dtype=dtype)
    )


class Servers:
    """`channels.ParameterLink`: every push is answered with weights that contain it.

    The answer is in memory at once, but comes just too late for the next forward to use it: the most that a stage may
    have to hold while it computes.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self._late: list[PulledWeights] = []
        self._ready: list[PulledWeights] = []

    def push(self, wave: int, updates: Mapping[str, Tensor], _need: int) -> None:
        answer = {name: self._weights[name].detach().clone() for name in updates}
        self._late.append(PulledWeights(answer, clock=wave + 1, contains=wave + 1))

    def poll(self) -> list[PulledWeights]:
        replies, self._ready, self._late = self._ready, self._late, []
        return replies

    def wait(self, _clock: int) -> list[PulledWeights]:
        replies, self._ready, self._late = self._ready + self._late, [], []
        return replies

    def buffers(self, values: Mapping[str, Tensor], samples: int) -> None:
        pass

    def finish(self) -> None:
        pass


def peaks(folder: Path, stage: int, minibatches: int) -> dict[str, int]:
    """Run ``minibatches`` of the stage here; see the module for what is measured."""
    plan = Plan.load(folder)
    assert plan.workload is not None
    workload = load_workload(folder / plan.workload.path, plan.workload.settings)
    torch.manual_seed(0)
    batch = tree_leaves(workload.workload.example_batch()) if stage == 0 else []
    worker = plan.virtual_workers[0]
    costs = PipelineCosts.of_plan(worker, Cluster.from_dict(plan.cluster))
    programs = load_schedule(plan, folder).programs[0]
    instructions = list(buffered_instructions(programs, costs, minibatches, stage))
    mode = LiveBytesMode()
    warm_up()
    gc.collect()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    with mode:
        engine = _engine(plan, folder, workload, stage, batch)
        for instruction in instructions:
            engine.execute(instruction)
    return {"resident": _status("VmHWM") - before, "live": mode.live.peak}


def _engine(plan: Plan, folder: Path, workload: LoadedWorkload, stage: int, batch: list[Any]) -> StageEngine:
    here = plan.virtual_workers[0].stages[stage]
    known = {t.name: t for t in (*plan.parameters, *plan.buffers)}
    weights = {name: _initial(known[name]) for name in (*here.parameters, *here.buffers) if name in known}
    servers = Servers({})

    def repeated(_: int) -> list[Any]:
        return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in batch]

    engine = StageEngine(
        plan,
        folder,
        0,
        stage,
        workload=workload,
        mailbox=Neighbours(plan, stage),
        link=servers,
        weights=weights,
        constants=load_constants(plan, folder),
        batches=repeated if stage == 0 else None,
        seed=0,
        device="cpu",
        reproducible=False,
    )
    servers._weights = engine.weights.master.views
    return engine


def _initial(tensor: Any) -> Tensor:
    dtype = getattr(torch, tensor.dtype)
    made = torch.zeros(tensor.shape, dtype=dtype)
    return made.uniform_(0, 0.05) if dtype.is_floating_point else made


def warm_up() -> None:
    """Run one small convolution and matrix product forward and backward, so that what they load is no growth."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    for _ in range(2):
        nn.functional.cross_entropy(model(torch.randn(2, 3, 8, 8)), torch.zeros(2, dtype=torch.long)).backward()


def _status(key: str) -> int:
    """Bytes of a line of ``/proc/self/status``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def measured(folder: Path, stage: int, minibatches: int) -> dict[str, int]:
    """`peaks` in a new process."""
    command = [sys.executable, "-m", "bench.stage_alone", str(folder), "--stage", str(stage)]
    command += ["--minibatches", str(minibatches)]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--minibatches", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(peaks(given.plan, given.stage, given.minibatches)))


if __name__ == "__main__":
    main()
