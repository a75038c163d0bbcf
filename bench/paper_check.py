"""Predictions for the paper's testbed beside the paper's own numbers, as the Markdown tables of docs/paper-check.md.

``python -m bench.paper_check > tables.md``
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hetpipe_compiler.compiler import compile
from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.ir.plan import Plan
from hetpipe_compiler.options import CompileOptions

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
MODELS = ("vgg19", "resnet152")
BATCH = 32
#: The paper adds nodes in this order: ResNet-152 "cannot" run under Horovod only when the RTX 2060 are there.
KINDS = ("titan-v", "titan-rtx", "quadro-p4000", "rtx-2060")
#: Images a second with 4, 8, 12 and 16 GPUs, from memory of the paper (its section 8); None: does not fit.
PAPER: dict[tuple[str, str], tuple[float | None, ...]] = {
    ("vgg19", "Horovod"): (164, 205, 265, 339),
    ("vgg19", "HetPipe"): (300, 530, 572, 606),
    ("resnet152", "Horovod"): (233, 353, 415, None),
    ("resnet152", "HetPipe"): (256, 516, 538, 580),
}


@dataclass(frozen=True)
class Row:
    """Predicted images a second next to the paper's; None: impossible, or not in the paper."""

    model: str
    system: str
    gpus: int
    predicted: float | None
    paper: float | None


def cluster(kinds: tuple[str, ...]) -> Cluster:
    """Nodes of four equal GPUs, as in the paper."""
    nodes = [{"name": f"n{at}", "devices": {kind: 4}, "link": "pcie3-x16"} for at, kind in enumerate(kinds)]
    return Cluster.from_dict({"name": "paper", "nodes": nodes, "network": "infiniband-fdr"})


def planned(model: str, kinds: tuple[str, ...], policy: str, folder: Path) -> Plan:
    """The plan of the default options."""
    options = CompileOptions(policy=policy, weights=False, recompute="never")  # as the paper's system
    where = folder / f"{model}-{policy}-{len(kinds)}"
    settings = {"batch_size": BATCH}
    return compile(EXAMPLES / model / "model.py", cluster(kinds), where, settings=settings, options=options).plan


def rows(folder: Path) -> list[Row]:
    """All that section 7 of the paper's summary has. One node is one virtual worker; more are cut across nodes (ED)."""
    found = []
    for model in MODELS:
        for at in range(len(KINDS)):
            plan = planned(model, KINDS[: at + 1], "NP" if at == 0 else "ED", folder)
            base = plan.data_parallel
            fits = len(base.devices_that_fit) == base.devices
            horovod = base.samples_per_s if fits else None
            found.append(Row(model, "Horovod", 4 * at + 4, horovod, PAPER[model, "Horovod"][at]))
            found.append(Row(model, "HetPipe", 4 * at + 4, plan.samples_per_s, PAPER[model, "HetPipe"][at]))
    return found


def single_workers(folder: Path) -> list[tuple[str, str, str, float, float, int]]:
    """(model, policy, kinds of a virtual worker, images/s of it, of one such GPU (fastest kind), Nm)."""
    found = []
    for model in MODELS:
        for policy in ("NP", "HD", "ED"):
            plan = planned(model, KINDS, policy, folder)
            seen = set()
            for worker in plan.virtual_workers:
                kinds = " ".join(stage.kind for stage in worker.stages)
                if kinds not in seen:
                    seen.add(kinds)
                    # share: forward + backward of the stage as part of the whole model on its kind.
                    whole_ms = min((s.forward_ms + s.backward_ms) / s.share for s in worker.stages if s.share)
                    alone = 1e3 * plan.batch_size / whole_ms
                    found.append((model, policy, kinds, worker.samples_per_s, alone, worker.nm))
    return found


def single_gpus(folder: Path) -> list[tuple[str, str, float]]:
    """(model, kind, images/s of one GPU if the model fits)."""
    found = []
    for model in MODELS:
        for kind in KINDS:
            plan = planned(model, (kind,), "NP", folder)
            stages = plan.virtual_workers[0].stages
            whole_ms = max((s.forward_ms + s.backward_ms) / s.share for s in stages if s.share)
            found.append((model, kind, 1e3 * plan.batch_size / whole_ms))
    return found


def _cell(value: float | None) -> str:
    return "cannot" if value is None else f"{value:.0f}"


def main() -> None:
    """Print the tables."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"| model | GPU | images/s of one GPU, batch {BATCH} |\n|--|--|--|")
        for model, kind, rate in single_gpus(folder):
            print(f"| {model} | {kind} | {rate:.0f} |")
        print(
            "\n| model | policy | stages of a virtual worker | images/s | its fastest GPU alone | Nm |\n"
            "|--|--|--|--|--|--|"
        )
        for model, policy, kinds, rate, alone, nm in single_workers(folder):
            print(f"| {model} | {policy} | {kinds} | {rate:.0f} | {alone:.0f} | {nm} |")
        found = rows(folder)
    both = [(r.predicted, r.paper) for r in found if r.predicted is not None and r.paper is not None]
    factor = math.exp(sum(math.log(paper / predicted) for predicted, paper in both) / len(both))
    print(
        "\n| model | system | GPUs | predicted | paper | predicted / paper | after one factor |\n|--|--|--|--|--|--|--|"
    )
    for r in found:
        ratio = scaled = ""
        if r.predicted is not None and r.paper is not None:
            ratio, scaled = f"{r.predicted / r.paper:.2f}", f"{factor * r.predicted / r.paper:.2f}"
        print(f"| {r.model} | {r.system} | {r.gpus} | {_cell(r.predicted)} | {_cell(r.paper)} | {ratio} | {scaled} |")
    print(f"\nThe one factor is {factor:.2f}.")


if __name__ == "__main__":
    main()
