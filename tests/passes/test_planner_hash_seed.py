"""Plans do not depend on Python's hash seed."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
sys.path.insert(0, "bench")
from planner_workloads import inception_graph, paper_cluster
from hetpipe_compiler.passes.allocate import Allocation, Group
from hetpipe_compiler.passes.concurrency import choose_concurrency
cluster = paper_cluster()
devices = tuple(cluster.devices[i] for i in (0, 1, 4, 8, 12))
print(choose_concurrency(inception_graph(2, (1, 2, 3)), cluster, Allocation("one", (Group(devices),), ())))
"""


def plan(seed: int) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment, capture_output=True, check=True)
    return done.stdout.decode()


@pytest.mark.parametrize("seeds", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_hash_seeds_give_one_plan(seeds):
    with ThreadPoolExecutor(2) as pool:
        plans = set(pool.map(plan, range(seeds)))
    assert len(plans) == 1
    assert "PlannedWorker" in plans.pop()
