"""What each policy makes of the paper's cluster, as the Markdown table of docs/paper-check.md.

``python -m bench.policies > table.md``: compiles the three large examples with NP, ED, HD and auto.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from bench.paper_check import EXAMPLES
from hetpipe_compiler.compiler import compile
from hetpipe_compiler.ir.plan import Plan
from hetpipe_compiler.options import CompileOptions, CompileResult

MODELS = ("vgg19", "resnet152", "gpt2")
POLICIES = ("NP", "ED", "HD", "auto")
#: 4 nodes of 4 equal cards each.
CLUSTER = EXAMPLES / "vgg19" / "cluster.yaml"
_SHORT = {"titan-v": "V", "titan-rtx": "R", "rtx-2060": "G", "quadro-p4000": "Q"}


def planned(model: str, policy: str, folder: Path) -> CompileResult:
    """``hetpipe-compile examples/MODEL/model.py --cluster CLUSTER --policy POLICY --no-weights``."""
    options = CompileOptions(policy=policy, weights=False)
    return compile(EXAMPLES / model / "model.py", CLUSTER, folder / f"{model}-{policy}", options=options)


def make_up(plan: Plan) -> str:
    """Stages of the virtual workers by the paper's letters, alike ones together: ``2 x QVVQ, 2 x GGRR``."""
    letters = Counter("".join(_SHORT[stage.kind] for stage in worker.stages) for worker in plan.virtual_workers)
    return ", ".join(f"{count} x {stages}" for stages, count in letters.items())


def main() -> None:
    """Print the table."""
    against = "slowest stage against the least there is"
    print(f"| model | policy | samples/s | Nm | virtual workers | unused | {against} | seconds to plan |")
    print("|--|--|--|--|--|--|--|--|")
    with tempfile.TemporaryDirectory() as name:
        for model in MODELS:
            best = 0.0
            for policy in POLICIES:
                result = planned(model, policy, Path(name))
                print(f"| {model} | {policy} | {row(result)} |", flush=True)
                rate = result.plan.samples_per_s
                assert policy != "auto" or rate >= best
                best = max(best, rate)


def row(result: CompileResult) -> str:
    """The cells after model and policy."""
    plan, seconds = result.plan, result.seconds
    gaps = [w.bottleneck_ms / w.lower_bound_ms - 1 for w in plan.virtual_workers if not w.optimal]
    proven = f"at most {100 * max(gaps):.1f} % above" if gaps else "proven least"
    cells = [f"{plan.samples_per_s:.0f}", str(plan.nm), make_up(plan), str(len(plan.unused_devices)), proven]
    return " | ".join([*cells, f"{seconds['allocate'] + seconds['partition']:.1f}"])


if __name__ == "__main__":
    main()
