"""Compile an example as a user would, as a process of its own, and say what the whole command took.

``python -m bench.compile_example llama7b`` prints wall and CPU seconds and the largest resident memory (Linux).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

#: The command, and after it the process's peak: the one that its parent would be told counts the parent's own memory.
_COMMAND = """
import re, sys
from pathlib import Path
from hetpipe_compiler.cli.compile import main
try:
    main()
finally:
    peak = re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())
    print("peak_kib", peak.group(1), file=sys.stderr)
"""


@dataclass(frozen=True)
class Finished:
    """What one command took: seconds of the clock and of the CPUs (user + system), and its largest resident bytes."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s wall, {self.cpu_seconds:.1f} s CPU, {self.peak_bytes / 1e9:.2f} GB"


def compile_example(name: str, out: Path) -> Finished:
    """``hetpipe-compile`` of ``examples/name`` on its own cluster, without weights; the plan lies in ``out``.

    Raises:
        RuntimeError: The command failed; the message is what it printed.
    """
    folder = ROOT / "examples" / name
    command = [sys.executable, "-c", _COMMAND, str(folder / "model.py"), "--cluster", str(folder / "cluster.yaml")]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    before, start = os.times(), time.perf_counter()
    run = subprocess.run(
        [*command, "--no-weights", "-o", str(out)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds, after = time.perf_counter() - start, os.times()
    if run.returncode:
        raise RuntimeError(run.stderr)
    cpu_seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return Finished(seconds, cpu_seconds, int(run.stderr.split()[-1]) * 1024)


def main() -> None:
    """Compile the examples named, and print what each took and how many parameters its plan has."""
    for name in sys.argv[1:] or ["llama7b", "bert5b"]:
        with tempfile.TemporaryDirectory() as folder:
            took = compile_example(name, Path(folder) / "plan")
            parameters = parameters_of(Path(folder) / "plan")
        print(f"{name}: {parameters / 1e9:.2f} billion parameters, {took}", flush=True)


def parameters_of(plan: Path) -> int:
    """How many numbers the parameters of a plan hold."""
    tensors = json.loads((plan / "plan.json").read_text())["parameters"]
    return sum(t["bytes"] for t in tensors) // 4


if __name__ == "__main__":
    main()
