"""What README shows must work as it stands: its model.py, its cluster.yaml, its links and its make targets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from hetpipe_compiler import Cluster
from hetpipe_compiler.frontend.load import load_workload

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "docs" / "troubleshooting.md"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.M | re.S)


def test_model_trains(tmp_path: Path) -> None:
    (source,) = blocks("python")
    path = tmp_path / "model.py"
    path.write_text(source)
    workload = load_workload(path, {"lr": 0.1}).workload
    assert workload.data is not None
    torch.manual_seed(0)
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    losses = []
    for inputs, labels in workload.data(0, 1, 0):
        optimizer.zero_grad()
        loss = workload.loss(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    wanted = [t.shape for t in workload.example_batch()]
    assert [t.shape for t in next(iter(workload.data(1, 2, 0)))] == wanted


def test_models_shards_split_the_epoch(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(blocks("python")[0])
    data = load_workload(path).workload.data
    assert data is not None
    whole = sorted(inputs.sum().item() for inputs, _ in data(0, 1, 5))
    assert sorted(inputs.sum().item() for shard in range(3) for inputs, _ in data(shard, 3, 5)) == whole


def test_cluster_loads(tmp_path: Path) -> None:
    (text,) = blocks("yaml")
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    cluster = Cluster.load(path)
    assert [d.id for d in cluster.devices] == ["n0:0", "n0:1", "n1:0", "n1:1"]
    assert cluster.device("n1:0").kind.fp32_tflops == 5.3


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    named = set(re.findall(r"`make ([a-z]+)`", README))
    assert named
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()) if "://" not in target]
    assert links
    assert [target for target in links if not (page.parent / target).exists()] == []
