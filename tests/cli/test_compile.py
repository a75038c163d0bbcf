"""hetpipe-compile as people meet it: help, output, and one error of each kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetpipe_compiler.cli.compile import PASSES, main

TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "golden" / "compile_errors.txt"

CLUSTER = """name: small
nodes:
  - {name: n0, devices: {titan-v: 2}, link: pcie3-x16}
network: infiniband-fdr
"""

MODEL = """import torch
from torch import nn

from hetpipe_compiler import Workload

print("model.py says hello")


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, width), nn.Linear(width, 5)

    def forward(self, x):
        h = torch.relu(self.fc1(x))
        # HERE
        return self.fc2(h)


def workload(batch_size=4, width=8):
    print("workload() says hello")
    return Workload(
        model=lambda: Net(width),
        example=lambda: (torch.zeros(batch_size, width), torch.zeros(batch_size, dtype=torch.int64)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
"""

#: Title -> changes to the files, and arguments after ``model.py --cluster cluster.yaml -o out``.
ERRORS: dict[str, tuple[dict[str, str], list[str]]] = {
    "no such model.py": ({"model.py": ""}, []),
    "no such cluster file": ({"cluster.yaml": ""}, []),
    "a wrong key in the cluster file": ({"cluster.yaml": CLUSTER.replace("network:", "netwerk:")}, []),
    "a model that raises": ({"model.py": MODEL.replace("# HERE", "h = h[:, :3]")}, []),
    "a branch on values": ({"model.py": MODEL.replace("# HERE", "h = h if h.sum() > 0 else -h")}, []),
    "a branch on values in a submodule": (
        {"model.py": MODEL.replace("nn.Linear(width, 5)", "Part(width, 5)").replace(
            "class Net", "class Part(nn.Linear):\n    def forward(self, x):\n"
            "        return super().forward(x if x.sum() > 0 else -x)\n\n\nclass Net")},
        [],
    ),
    "an --opaque that names nothing": ({}, ["--opaque", "fc"]),
    "an --opaque that cannot be kept whole": (
        {"model.py": MODEL.replace("nn.Linear(width, 5)", "Part(width, 5)").replace(
            "class Net", "class Part(nn.Linear):\n    def forward(self, x):\n"
            "        return super().forward(x.mul_(2))\n\n\nclass Net")},
        ["--opaque", "fc2"],
    ),
    "a model that counts its calls": (
        {
            "model.py": MODEL.replace("# HERE", "self.calls += 1; h = h / self.calls").replace(
                "super().__init__()", "super().__init__(); self.calls = 0"
            )
        },
        [],
    ),
    "a model that does not fit": ({}, ["--set", "width=60000", "--no-weights"]),
    "an unknown policy": ({}, ["--policy", "XX"]),
    "a bad --set": ({}, ["--set", "batch_size"]),
    "an unknown --set": ({}, ["--set", "depth=3"]),
    "a bad --dump-after": ({}, ["--dump-after", "fuse"]),
    "a cut that is no block": ({}, ["--split", "fc9"]),
    "negative staleness": ({}, ["-D", "-1"]),
    "staleness beyond all proof": ({}, ["-D", "1000000"]),
    "more in flight than a machine word": ({}, ["--nm", "9" * 30]),
    "updates times nothing": ({}, ["--update-scale", "0"]),
    "updates times no number": ({}, ["--update-scale", "nan"]),
    "a seed that torch does not take": ({}, ["--seed", "9" * 30]),
    "tables and JSON": ({}, ["--json", "--memory"]),
    "an explanation with a plan's options": ({}, ["--explain", "--verify", "--no-weights", "--json"]),
    "a graph file that cannot be written": ({}, ["--export-graph", "missing/graph.json", "--no-weights"]),
    "a choice of recomputation that there is not": ({}, ["--recompute", "sometimes"]),
    "a folder that is no plan": ({"out/notes.txt": "mine"}, []),
}  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """What a run of the command left."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """Run the command in this process, in a folder."""

    def in_folder(folder: Path, *arguments: str) -> Ended:
        monkeypatch.chdir(folder)
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setattr(sys, "argv", ["hetpipe-compile", *arguments])
        monkeypatch.setattr(sys, "path", [*sys.path])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Ended(int(ended.value.code or 0), captured.out, captured.err)

    return in_folder


def prepare(folder: Path, changes: dict[str, str] | None = None) -> Path:
    for name, text in {"model.py": MODEL, "cluster.yaml": CLUSTER, **(changes or {})}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text:
            path.write_text(text)
    return folder


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['hetpipe-compile', '--help']\n"
        "from hetpipe_compiler.cli.compile import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'numpy', 'numba', 'networkx', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        seconds.append(time.perf_counter() - start)
        assert result.returncode == 0, result.stderr
    assert "--staleness" in result.stdout
    bare = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import typer"], check=True)
    # Half a second, unless this machine is so busy that typer alone takes longer.
    assert min(seconds) < max(0.5, 1.5 * (time.perf_counter() - bare))


@pytest.mark.parametrize("title", ERRORS)
def test_an_error_is_one_error(title: str, tmp_path: Path, run: Callable[..., Ended]) -> None:
    """Rewrite the golden file with: UPDATE_GOLDEN=1 pytest tests/cli/test_compile.py"""
    changes, arguments = ERRORS[title]
    folder = prepare(tmp_path / "job", changes)
    result = run(folder, "model.py", "--cluster", "cluster.yaml", "-o", "out", *arguments)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert str(tmp_path) not in result.stderr.replace(str(folder), "")
    assert not (folder / "out" / "plan.json").exists()
    assert not [p for p in folder.iterdir() if p.name.startswith(".out")]
    error = result.stderr.replace(str(folder), "FOLDER")
    sections = dict(_sections())
    if os.environ.get("UPDATE_GOLDEN"):
        sections[title] = error
        GOLDEN.write_text("".join(f"== {t}\n{sections[t]}\n" for t in ERRORS if t in sections))
    assert error == sections[title]


def _sections() -> list[tuple[str, str]]:
    parts = GOLDEN.read_text().split("== ")[1:] if GOLDEN.exists() else []
    return [(p.partition("\n")[0], p.partition("\n")[2][:-1]) for p in parts]


def test_json_is_the_plan_and_nothing_else(tmp_path: Path) -> None:
    folder = prepare(tmp_path)
    command = [
        sys.executable,
        "-m",
        "hetpipe_compiler.cli.compile",
        "model.py",
        "--cluster",
        "cluster.yaml",
        "-o",
        "out",
    ]
    dumps = [word for name in PASSES for word in ("--dump-after", name)]
    options = ["--json", "--time-passes", *dumps]
    result = subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == (folder / "out" / "plan.json").read_text()
    assert json.loads(result.stdout)["virtual_workers"]
    assert "workload() says hello" in result.stderr
    assert "\nload              " in result.stderr
    for name in PASSES:
        (at,) = (i for i, line in enumerate(result.stderr.splitlines()) if line == f"--- {name} ---")
        assert result.stderr.splitlines()[at + 1].strip()
        assert f"\n{name:16} " in result.stderr


def test_tables_and_where_the_plan_is(tmp_path: Path, run: Callable[..., Ended]) -> None:
    folder = prepare(tmp_path)
    arguments = ("--policy", "NP", "--split", "fc2", "--set", "batch_size=1", "--dump-after", "coarsen")
    result = run(folder, "model.py", "--cluster", "cluster.yaml", "-o", "out", *arguments)
    assert result.returncode == 0, result.stderr
    assert "--- coarsen ---" in result.stdout
    assert "n0:1" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("written: out (batch size fixed at 1: ")
    assert "hello" not in result.stderr


def test_memory_shows_the_parts_and_the_hosts(tmp_path: Path, run: Callable[..., Ended]) -> None:
    prepare(tmp_path)
    plain = run(tmp_path, "model.py", "--cluster", "cluster.yaml", "-o", "a").stdout
    parts = run(tmp_path, "model.py", "--cluster", "cluster.yaml", "-o", "b", "--memory").stdout
    assert "own sums" not in plain
    assert parts.startswith(plain.rpartition("written:")[0])
    for word in ("own sums", "activations", "workspace", "reserve", "total", "capacity", "host memory"):
        assert word in parts, word
