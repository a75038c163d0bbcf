"""hetpipe-compile on a profiled graph in place of a model, and the export that makes one from a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetpipe_compiler.cli import compile as cli
from hetpipe_compiler.cli.boundary import run_app, single_command
from hetpipe_compiler.cli.inspect import inspect
from hetpipe_compiler.ir.plan import Plan

CLUSTER = """
name: two
nodes:
  - {name: n0, devices: {titan-v: 1, rtx-2060: 1}, link: pcie3-x16}
  - {name: n1, devices: {titan-v: 1}, link: pcie3-x16}
network: infiniband-fdr
"""


def graph(nodes: int = 6, **more: object) -> dict[str, object]:
    """A chain whose last node is as slow as the rest together on a titan-v."""
    return {
        "format": "hetpipe-graph",
        "version": 1,
        "name": "toy",
        "batch_size": 8,
        "nodes": [
            {
                "id": f"n{at}",
                "name": f"layers.{at}",
                "forward_ms": {"titan-v": 1.0 if at < nodes - 1 else 5.0, "*": 3.0},
                "backward_ms": {"*": 1.0},
                "parameter_bytes": 1000,
                "output_bytes": 1_000_000,
            }
            for at in range(nodes)
        ],
        "edges": [{"from": f"n{at}", "to": f"n{at + 1}"} for at in range(nodes - 1)],
        **more,
    }


def run(command, *arguments: object) -> int:
    app = single_command(command)
    with pytest.raises(SystemExit) as caught:
        run_app(lambda: app(args=[str(a) for a in arguments], prog_name="hetpipe"))
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Path]:
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "g.json").write_text(json.dumps(graph()))
    (tmp_path / "c.yaml").write_text(CLUSTER)
    return tmp_path / "g.json", tmp_path / "c.yaml", tmp_path / "out"


def test_a_plan_without_a_model(files, capsys):
    graph_path, cluster, out = files
    assert run(cli.command, graph_path, "--cluster", cluster, "-o", out, "--json", "--policy", "NP") == 0
    plan = json.loads(capsys.readouterr().out)
    assert sorted(p.name for p in out.iterdir()) == ["decisions.yaml", "graph.json", "plan.json", "schedule.csv"]
    assert plan["workload"] is None
    stages = plan["virtual_workers"][0]["stages"]
    assert [node for stage in stages for node in stage["nodes"]] == [f"n{at}" for at in range(6)]
    assert all(stage["module"] is None and stage["measured"] for stage in stages)
    assert plan["predicted"] == "profile"
    for stage in stages:
        ms = 3.0 if stage["kind"] != "titan-v" else 1.0
        expected = sum(5.0 if stage["kind"] == "titan-v" and n == "n5" else ms for n in stage["nodes"])
        assert stage["forward_ms"] == pytest.approx(expected)
        assert stage["backward_ms"] == pytest.approx(len(stage["nodes"]))
    assert plan["virtual_workers"][0]["bottleneck_ms"] == max(stage["stage_ms"] for stage in stages)
    assert sum(server["memory_bytes"] for server in plan["servers"]) == 6000


@pytest.mark.parametrize("ordered", ["true", "false"])
def test_a_device_that_only_slows_the_plan_down_is_named(files, capsys, ordered):
    """Of a virtual worker's devices one is useless: in the order that the group fixes, too, the plan does without."""
    graph_path, cluster, out = files
    times = {"titan-v": 1.0, "*": 1000.0}
    nodes = [{"id": f"n{at}", "forward_ms": times, "backward_ms": times, "output_bytes": 1000} for at in range(4)]
    graph_path.write_text(json.dumps({**graph(), "nodes": nodes, "edges": [{"from": "n0", "to": "n3"}]}))
    groups = out.with_name("groups.yaml")
    groups.write_text(f"virtual_workers: [[n0:0, n0:1, n1:0]]\nordered: {ordered}\n")
    asked = (graph_path, "--cluster", cluster, "-o", out, "--policy", groups, "--explain-plan")
    assert run(cli.command, *asked) == 0
    shown = capsys.readouterr().out
    assert "unused devices: n0:1" in shown
    assert "unused: n0:1: no partition with them has a smaller bottleneck" in shown
    plan = json.loads((out / "plan.json").read_text())
    assert plan["unused_devices"] == ["n0:1"]
    assert sorted(stage["device"] for stage in plan["virtual_workers"][0]["stages"]) == ["n0:0", "n1:0"]


def test_inspect_shows_it(files, capsys):
    graph_path, cluster, out = files
    assert run(cli.command, graph_path, "--cluster", cluster, "-o", out) == 0
    capsys.readouterr()
    assert run(inspect, out, "--memory", "--dot", out / "p.dot", "--timeline", out / "t.json") == 0
    assert run(inspect, out) == 0
    assert "toy" in capsys.readouterr().out
    assert "layers.0" in (out / "p.dot").read_text()
    assert any(event.get("name") == "F1" for event in json.loads((out / "t.json").read_text())["traceEvents"])


@pytest.mark.parametrize(
    "given",
    [
        ("--set", "a=1"),
        ("--no-weights",),
        ("--seed", "3"),
        ("--verify",),
        ("--profile", "p.json"),
        ("--export-graph", "x.json"),
        ("--dump-after", "normalize"),
    ],
)
def test_options_that_need_a_model_are_refused(files, capsys, given):
    graph_path, cluster, out = files
    assert run(cli.command, graph_path, "--cluster", cluster, "-o", out, *given) == 2
    assert "error[HP137]" in capsys.readouterr().err
    assert not out.exists()


def test_options_that_do_not(files, capsys):
    graph_path, cluster, out = files
    groups = graph_path.parent / "groups.yaml"
    groups.write_text("virtual_workers: [[n0:0, n0:1, n1:0]]")
    options = ["--nm", "2", "-D", "1", "--placement", "round-robin", "--policy", groups, "--split", "n2,n4"]
    options += ["--update-scale", "1", "--dump-after", "coarsen"]
    assert run(cli.command, graph_path, "--cluster", cluster, "-o", out, *options) == 0
    assert "layers.3" in capsys.readouterr().out
    plan = Plan.load(out)
    assert (plan.nm, plan.staleness, plan.placement, plan.update_scale) == (2, 1, "round-robin", 1.0)
    assert [stage.nodes for stage in plan.virtual_workers[0].stages] == [("n0", "n1"), ("n2", "n3"), ("n4", "n5")]


def test_a_wrong_graph_leaves_nothing(files, capsys):
    graph_path, cluster, out = files
    content = graph()
    content["edges"].append({"from": "n3", "to": "n1"})
    graph_path.write_text(json.dumps(content))
    assert run(cli.command, graph_path, "--cluster", cluster, "-o", out) == 2
    assert "error[HP134]" in capsys.readouterr().err
    assert not out.exists()


def test_colocated_nodes_share_a_stage(files):
    graph_path, cluster, out = files
    content = graph()
    for at in (0, 4):
        content["nodes"][at]["colocate"] = "tied"
    graph_path.write_text(json.dumps(content))
    assert run(cli.command, graph_path, "--cluster", cluster, "-o", out, "--policy", "NP") == 0
    for worker in Plan.load(out).virtual_workers:
        assert any({"n0", "n4"} <= set(stage.nodes) for stage in worker.stages)


MODEL = """
import torch
from hetpipe_compiler import Workload


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 16)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))
        self.norm = torch.nn.BatchNorm1d(16)

    def forward(self, ids):
        x = first = self.embed(ids).mean(1)
        for layer in self.layers:
            x = torch.relu(layer(x)) + first
        return self.norm(x) @ self.embed.weight.T


def workload():
    example = (torch.zeros(4, 6, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
    return Workload(
        model=Net,
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        example=lambda: example,
        data=lambda rank, world: iter(()),
    )
"""


@pytest.mark.filterwarnings("ignore")
def test_a_model_and_its_export_have_the_same_plan(tmp_path, files):
    _, cluster, out = files
    (tmp_path / "model.py").write_text(MODEL)
    exported = tmp_path / "net.json"
    common = ["--cluster", cluster, "--policy", "NP", "--nm", "2"]
    assert run(cli.command, tmp_path / "model.py", *common, "-o", out, "--no-weights", "--export-graph", exported) == 0
    assert run(cli.command, exported, *common, "-o", tmp_path / "out2") == 0
    model, graph_plan = Plan.load(out), Plan.load(tmp_path / "out2")
    assert graph_plan.predicted == "roofline"
    assert (model.counted_with, graph_plan.counted_with) == ("cpu", None)
    assert graph_plan.samples_per_s == pytest.approx(model.samples_per_s, rel=1e-9)
    for a, b in zip(model.virtual_workers[0].stages, graph_plan.virtual_workers[0].stages, strict=True):
        assert (a.nodes, a.device) == (b.nodes, b.device)
        assert a.memory_bytes == b.memory_bytes
        assert a.receives_bytes == b.receives_bytes
        assert a.stage_ms == pytest.approx(b.stage_ms, rel=1e-9)
