"""Toy plan folders that hetpipe-run can train: `toy.write_toy` plus a model.py."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from toy import Network, write_toy

from hetpipe_compiler.frontend.load import workload_digest
from hetpipe_compiler.ir.plan import Plan, WorkloadRef

_MODEL = """
import os, signal, time
import torch
{source}

class Batches:
    def __init__(self, shard, seed):
        self.shard, self.seed = shard, seed
    def __len__(self):
        return {batches}
    def __iter__(self):
        generator = torch.Generator().manual_seed(1000 * self.shard + self.seed % 1000)
        for i in range(len(self)):
            {trouble}
            size = 6 if i + 1 < len(self) else 4
            x = torch.randn(size, 8, generator=generator)
            yield x, torch.randint(0, 5, (size,), generator=generator)

def model():
    module = Stage()
    for i, p in enumerate(module.parameters()):
        torch.nn.init.normal_(p, std=0.3)
    return module

def workload(lr=0.1):
    from hetpipe_compiler import Workload
    return Workload(
        model=model,
        example=(torch.zeros(6, 8), torch.zeros(6, dtype=torch.int64)),
        targets=0,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        data=lambda shard, shards, seed: Batches(shard, seed),
        evaluate=lambda m: {{"norm": sum(float(p.norm()) for p in m.parameters())}},
    )
"""


def write_runnable(
    folder: Path,
    network: Network | None = None,
    *,
    cuts: Sequence[Sequence[int]] = ((2,), (3,)),
    in_flight: Sequence[Sequence[int]] = ((2, 1), (2, 1)),
    nm: int = 2,
    staleness: int = 1,
    batches: int = 7,
    trouble: str = "pass",
    emulate: float | None = None,
    weights: bool = True,
) -> Plan:
    """Write a plan folder with a workload. ``trouble``: a statement before batch ``i`` of ``self.shard`` is made."""
    network = network or Network()
    toy = write_toy(folder, network, cuts=cuts, in_flight=in_flight, nm=nm, staleness=staleness)
    source = network.source(range(5), ["x", "y"], ["loss"], tuple(network.initial())).replace(
        "return (loss,)", "return loss"
    )
    (folder / "model.py").write_text(textwrap.dedent(_MODEL).format(source=source, batches=batches, trouble=trouble))
    digest = workload_digest(folder / "model.py", {})
    cluster = toy.plan.cluster | {"emulate": {"time_scale": emulate} if emulate else None}
    plan = toy.plan.model_copy(
        update={
            "workload": WorkloadRef(path="model.py", settings={}, digest=digest),
            "cluster": cluster,
            "weights": weights,
        }
    )
    (folder / "plan.json").write_text(plan.to_json())
    return plan


def command(plan: Path, run: Path, *options: str) -> list[str]:
    """The command line of hetpipe-run."""
    return [sys.executable, "-m", "hetpipe_compiler.cli.run", str(plan), "-o", str(run), *options]


def environment() -> dict[str, str]:
    """One thread a process; the network of the machine is left alone."""
    return dict(os.environ, OMP_NUM_THREADS="1", COLUMNS="200")


def hetpipe_run(plan: Path, run: Path, *options: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    return subprocess.run(
        command(plan, run, *options), capture_output=True, text=True, timeout=timeout, env=environment(), check=False
    )
