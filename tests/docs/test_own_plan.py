"""What docs/own-plan.md shows works as it stands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hetpipe_compiler.compiler import compile
from hetpipe_compiler.options import CompileOptions, with_decisions

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "own-plan.md").read_text()
CLUSTER = """
name: two
nodes:
  - {name: n0, devices: {titan-v: 2}, link: pcie3-x16}
  - {name: n1, devices: {rtx-2060: 1}, link: pcie3-x16}
network: infiniband-fdr
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.M | re.S)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    nodes = [
        {"id": f"n{at}", "name": f"layers.{at}", "forward_ms": {"*": 1.0 + at}, "backward_ms": {"*": 2.0}}
        | {"parameter_bytes": 1000, "output_bytes": 1_000_000}
        for at in range(9)
    ]
    edges = [{"from": f"n{at}", "to": f"n{at + 1}"} for at in range(8)]
    graph = {"format": "hetpipe-graph", "version": 1, "name": "toy", "batch_size": 8, "nodes": nodes, "edges": edges}
    (tmp_path / "g.json").write_text(json.dumps(graph))
    (tmp_path / "c.yaml").write_text(CLUSTER)
    return tmp_path


def compile_here(here: Path, *arguments: str) -> dict[str, object]:
    command = [sys.executable, "-m", "hetpipe_compiler.cli.compile", "g.json", "--cluster", "c.yaml", *arguments]
    paths = [str(here), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [*command, "--json", "-o", "out"], cwd=here, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    plan: dict[str, object] = json.loads(done.stdout)
    return plan


def test_the_partitioner_runs(here: Path) -> None:
    (source,) = blocks("python")
    (here / "even_split.py").write_text(source)
    (here / "groups.yaml").write_text("virtual_workers: [[n0:0, n0:1, n1:0]]")
    plan = compile_here(here, "--policy", "groups.yaml", "--partitioner", "even_split:even")
    assert plan["partitioner"] == "even_split:even"
    (worker,) = plan["virtual_workers"]
    assert [len(stage["nodes"]) for stage in worker["stages"]] == [3, 3, 3]
    assert [stage["device"] for stage in worker["stages"]] == ["n0:0", "n0:1", "n1:0"]
    assert worker["lower_bound_ms"] < worker["bottleneck_ms"]
    assert worker["optimal"] is False


def test_the_entry_point_is_of_the_group_that_is_looked_at() -> None:
    from hetpipe_compiler.passes.own_partitioner import ENTRY_POINTS

    (text,) = blocks("toml")
    assert f'[project.entry-points."{ENTRY_POINTS}"]' in text


def test_the_decisions_shown_are_of_the_form(here: Path) -> None:
    shown, *others = blocks("yaml")
    assert not others
    plan = compile_here(here, "--policy", "ED", "--nm", "2")
    written = (here / "out" / "decisions.yaml").read_text()
    assert set(re.findall(r"^ *(\w+):", shown, flags=re.M)) <= {
        *re.findall(r"^ *(\w+):", written, flags=re.M),
        "unused",
    }
    (here / "d.yaml").write_text(shown)
    edited = compile_here(here, "--decisions", "d.yaml")
    stages = edited["virtual_workers"][0]["stages"]
    assert [stage["device"] for stage in stages] == ["n0:0", "n1:0"]
    assert [len(stage["nodes"]) for stage in stages] == [6, 3]
    assert edited["unused_devices"] == ["n0:1"]
    assert edited["policy"] == "ED, edited"
    assert plan["policy"] == "ED"


@pytest.mark.parametrize("policy", ["NP", "ED", "HD", "auto"])
def test_decisions_given_back_make_the_same_plan(here: Path, policy: str) -> None:
    graph, cluster, out = here / "g.json", here / "c.yaml", here / "out"
    compile(graph, cluster, out, options=CompileOptions(policy=policy))
    before = {name: (out / name).read_bytes() for name in ("plan.json", "decisions.yaml", "schedule.csv")}
    compile(graph, cluster, out, options=with_decisions(CompileOptions(), out / "decisions.yaml"))
    assert {name: (out / name).read_bytes() for name in before} == before


def test_links_lead_somewhere() -> None:
    links = [target for target in re.findall(r"\]\(([^)#]+)[^)]*\)", PAGE) if "://" not in target]
    assert [target for target in links if not (ROOT / "docs" / target).exists()] == []
