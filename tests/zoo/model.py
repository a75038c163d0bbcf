"""Any model of the zoo as a workload: ``hetpipe-compile tests/zoo/model.py --set name=torchvision:resnet18 ...``."""

from __future__ import annotations

import zoo_models

from hetpipe_compiler import Workload


def workload(name: str) -> Workload:
    """``name``: library and model, as in the tables of docs/zoo.md."""
    return zoo_models.workload(name)
