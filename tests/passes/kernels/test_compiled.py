"""Cached kernels are compiled again when a kernel that they call, in another file, has changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CALLEE = """
from hetpipe_compiler.passes.kernels.compiled import compiled
STEP = {step}
@compiled
def step(x):
    return x + STEP
"""
CALLER = """
import callee
from hetpipe_compiler.passes.kernels.compiled import compiled
@compiled
def twice(x):
    return callee.step(callee.step(x))
if __name__ == "__main__":
    import caller
    print(caller.twice(0), sum(caller.twice.stats.cache_hits.values()))
"""


def answer(folder: Path) -> list[str]:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "caller.py"], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_a_change_in_another_file_is_seen(tmp_path: Path) -> None:
    (tmp_path / "caller.py").write_text(CALLER)
    (tmp_path / "callee.py").write_text(CALLEE.format(step=1))
    assert answer(tmp_path) == ["2", "0"]
    assert answer(tmp_path) == ["2", "1"], "taken from the cache"
    (tmp_path / "callee.py").write_text(CALLEE.format(step=5))
    assert answer(tmp_path) == ["10", "0"]
