"""hetpipe-compiler: train one PyTorch model on GPUs that are not alike.

The public API: `Workload` (what model.py returns), `compile`, `load_plan`, `Cluster`, `PartitionProblem` (what
a partitioner of one's own is asked). Names load on first use, so that
``import hetpipe_compiler`` does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetpipe_compiler.compiler import compile
    from hetpipe_compiler.ir.cluster import Cluster
    from hetpipe_compiler.ir.plan import Plan
    from hetpipe_compiler.ir.workload import Workload
    from hetpipe_compiler.passes.partition_problem import PartitionProblem

__version__ = "0.1.0"
__all__ = ["Cluster", "PartitionProblem", "Plan", "Workload", "compile", "load_plan"]

_HOMES = {
    "Cluster": "hetpipe_compiler.ir.cluster",
    "PartitionProblem": "hetpipe_compiler.passes.partition_problem",
    "Plan": "hetpipe_compiler.ir.plan",
    "Workload": "hetpipe_compiler.ir.workload",
    "compile": "hetpipe_compiler.compiler",
}


def load_plan(folder: str) -> Plan:
    """Read the plan in a folder that hetpipe-compile wrote; raises `ArtifactError`."""
    from pathlib import Path

    from hetpipe_compiler.ir.plan import Plan

    return Plan.load(Path(folder))


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hetpipe_compiler' has no attribute '{name}'")
