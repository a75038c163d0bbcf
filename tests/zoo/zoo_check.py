"""Hold one model of the zoo to its eager self: at the planner's cut, and at two cuts drawn at random."""

from __future__ import annotations

import hashlib
import json
import random
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import zoo_models

from hetpipe_compiler.codegen.artifact import write_artifact
from hetpipe_compiler.codegen.build_plan import build_plan
from hetpipe_compiler.errors import HetpipeError
from hetpipe_compiler.frontend.capture import capture
from hetpipe_compiler.frontend.construct import build_real
from hetpipe_compiler.frontend.load import LoadedWorkload, load_workload
from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.ir.plan import WorkloadRef
from hetpipe_compiler.options import CompileOptions
from hetpipe_compiler.passes.annotate_cost import AnnotateCost
from hetpipe_compiler.passes.base import Compilation, Pipeline
from hetpipe_compiler.passes.coarsen import Coarsen
from hetpipe_compiler.passes.eval_mode import EvalMode
from hetpipe_compiler.passes.fuse_atomic import FuseAtomic
from hetpipe_compiler.passes.normalize import Normalize
from hetpipe_compiler.passes.planning import Allocate, MakeSchedule, Partition, PlannerOptions
from hetpipe_compiler.passes.planning import Verify as ProveSchedule
from hetpipe_compiler.verification.verify import Verification, Verifier

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

_NO_DISTANCE = {"bandwidth_gb_s": 1000, "latency_us": 0}
#: Three kinds of devices, so slow beside their links that cutting a small model pays.
CLUSTER = {
    "name": "zoo",
    "nodes": [{"name": "n0", "devices": {"fast": 2, "middle": 1, "slow": 1}, "link": dict(_NO_DISTANCE)}],
    "network": dict(_NO_DISTANCE),
    "kinds": {
        kind: {"memory_gb": 64, "fp32_tflops": tflops, "memory_bandwidth_gb_s": 100 * tflops, "launch_overhead_us": 1}
        for kind, tflops in (("fast", 0.03), ("middle", 0.02), ("slow", 0.01))
    },
}  # fmt: skip


@dataclass
class Result:
    """One line of the table.

    Attributes:
        outcome: ``pass``, ``refused`` (an error of the compiler's own, before anything was written) or ``FAIL``.
        stages: Stages of each cut: the planner's, then the random ones.
        difference, allowed, dtype: Of the worst cut.
        evaluation: ``yes`` if the stages were compared in eval mode too, else why they do not run in it.
        reason: Why not passed, or why not compared in float64.
        cpu_s: CPU time of the model's process.
    """

    name: str
    outcome: str
    parameters: int = 0
    stages: tuple[int, ...] = ()
    difference: float | None = None
    allowed: float | None = None
    dtype: str = ""
    evaluation: str = ""
    code: str = ""
    reason: str = ""
    cpu_s: float = 0.0
    note: str = ""


#: What decides whether a cut model means the same. The planner only chooses where to cut.
_DECISIVE = (
    "hetpipe_compiler/frontend/*.py",
    "hetpipe_compiler/verification/*.py",
    "hetpipe_compiler/ir/opaque.py",
    "runtime/opaque.py",
    "codegen/build_plan.py",
    "codegen/stage_*.py",
    "passes/annotate_cost.py",
    "passes/coarsen.py",
    "passes/eval_mode.py",
    "passes/fuse_atomic.py",
    "passes/normalize.py",
)


def code_digest(name: str) -> str:
    """SHA-256 of what decides a result: the compiler's front and back, the model's table, the libraries' versions."""
    library = name.partition(":")[0]
    paths = [p for pattern in _DECISIVE for p in sorted(ROOT.glob(pattern))]
    names = [f"zoo_{library}.py", "zoo_check.py", "zoo_losses.py"]
    paths += [HERE / name for name in names + (["zoo_architectures.py"] if library == "transformers" else [])]
    digest = hashlib.sha256(json.dumps(versions(), sort_keys=True).encode())
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Of torch and the libraries that the models come from."""
    import timm
    import torchvision
    import transformers

    modules = (torch, torchvision, transformers, timm)
    return {m.__name__: str(m.__version__) for m in modules}


def check(name: str, *, random_cuts: int = 2, evaluation: bool = True) -> Result:
    """Capture, cut, write, verify. Never raises: the result says what happened.

    Args:
        name: The model.
        random_cuts: Cuts besides the planner's.
        evaluation: Whether to look at eval mode too.
    """
    start = time.process_time()
    result = Result(name, "FAIL", note=zoo_models.note(name))
    try:
        _check(name, result, random_cuts, evaluation)
    except HetpipeError as error:
        # What verification finds is the compiler's fault, not a limit that it knows of.
        result.outcome = "FAIL" if error.code in ("HP120", "HP121") else "refused"
        result.code, result.reason = error.code, _one_line(f"{error.where}: {error.message}")
    except Exception as error:
        result.reason = _one_line(f"{type(error).__name__}: {error}")
    result.cpu_s = round(time.process_time() - start, 1)
    return result


def _check(name: str, result: Result, random_cuts: int, evaluation: bool) -> None:
    loaded = load_workload(HERE / "model.py", {"name": name})
    compilation = Compilation(Cluster.from_dict(CLUSTER))
    compilation.captured = capture(loaded, evaluation=evaluation, opaque=zoo_models.opaque(name))
    result.parameters = sum(t.numel() for n, t in compilation.captured.meta.items() if n in _parameters(compilation))
    pipeline = Pipeline()
    front = (
        Allocate("NP"),
        Normalize(),
        EvalMode(),
        AnnotateCost(),
        FuseAtomic(),
        Coarsen(model_name=name, optimizer_factor=0.0),
    )
    for step in front:
        pipeline.run(step, compilation)
    result.evaluation = "yes" if compilation.captured.evaluation else _one_line(compilation.captured.evaluation_note)
    verifier = Verifier(loaded, build_real(loaded, seed=0))
    for split in (None, *_random_cuts(compilation, name)[:random_cuts]):
        stages, found = _verify(loaded, compilation, pipeline, verifier, split)
        result.stages = (*result.stages, stages)
        if (
            result.allowed is None
            or found.difference.relative / found.allowed > (result.difference or 0.0) / result.allowed
        ):
            result.difference, result.allowed = found.difference.relative, found.allowed
            result.dtype, result.reason = found.dtype, found.note
    result.outcome = "pass"


def _parameters(compilation: Compilation) -> set[str]:
    assert compilation.captured is not None
    return {t.name for t in compilation.captured.parameters}


def _random_cuts(compilation: Compilation, name: str) -> list[tuple[int, ...]]:
    """Two cuts into 2 to 4 stages; any cut between blocks is legal."""
    assert compilation.chain is not None
    blocks = len(compilation.chain)
    draw = random.Random(name)
    most = min(4, blocks)
    if most < 2:
        return []
    return [tuple(sorted(draw.sample(range(1, blocks), draw.randint(2, most) - 1))) for _ in range(2)]


def _verify(
    loaded: LoadedWorkload,
    compilation: Compilation,
    pipeline: Pipeline,
    verifier: Verifier,
    split: tuple[int, ...] | None,
) -> tuple[int, Verification]:
    for step in (Partition(PlannerOptions(4, splits=(split,) if split else None)), MakeSchedule(), ProveSchedule()):
        pipeline.run(step, compilation)
    assert compilation.captured is not None
    assert compilation.costs is not None
    assert compilation.schedule is not None
    reference = WorkloadRef(path="model.py", settings=loaded.settings, digest=loaded.digest)
    built = build_plan(compilation, CompileOptions(weights=False), reference)
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        out = Path(folder) / "plan"
        write_artifact(out, built, compilation.schedule, loaded, compilation.captured, compilation.costs, None)
        found = verifier.verify(out)
    return len(built.plan.virtual_workers[0].stages), found


def _one_line(text: Any) -> str:
    without_folders = re.sub(r"/\S*/site-packages/", "", str(text).replace(f"{ROOT}/", ""))
    return " ".join(without_folders.split())[:400]
