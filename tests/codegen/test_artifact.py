"""The plan folder: whole or not at all, and free to move."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import MODELS, chained, cluster_of, compile_kind, eager
from safetensors import SafetensorError
from safetensors.torch import load_file

from hetpipe_compiler.codegen import artifact
from hetpipe_compiler.compiler import CompileOptions, compile
from hetpipe_compiler.errors import ArtifactError
from hetpipe_compiler.frontend.construct import build_real
from hetpipe_compiler.ir.cluster import Cluster
from hetpipe_compiler.ir.plan import Plan
from hetpipe_compiler.ir.schedule import Schedule

CLUSTER = cluster_of(1)
FILES = {
    "plan.json",
    "schedule.csv",
    "decisions.yaml",
    "stages",
    "weights.safetensors",
    "constants.safetensors",
    "graph.json",
    "model.py",
}


def make(folder: Path, name: str = "SkipOver", **options: Any) -> Plan:
    return compile(MODELS, CLUSTER, folder, settings={"name": name}, options=CompileOptions("NP", **options)).plan


def test_what_is_in_it(tmp_path: Path) -> None:
    plan = make(tmp_path / "deep" / "out", splits=((4,),))
    folder = tmp_path / "deep" / "out"
    assert {p.name for p in folder.iterdir()} == FILES
    assert Plan.load(folder) == plan
    text = (folder / "schedule.csv").read_text()
    assert Schedule.from_csv(text, nm=plan.nm, staleness=plan.staleness).to_csv() == text
    assert (folder / "model.py").read_bytes() == MODELS.read_bytes()
    assert {p.name for p in (folder / "stages").iterdir()} == {"partition0_stage0.py", "partition0_stage1.py"}
    assert Cluster.from_dict(plan.cluster) == CLUSTER
    nodes = {n["name"]: n for n in json.loads((folder / "graph.json").read_text())["nodes"]}
    assert {n for s in plan.virtual_workers[0].stages for n in s.nodes} <= set(nodes)
    assert nodes["embedding"]["source"].startswith("models.py:")
    assert nodes["embedding"]["module"] == "embed"
    assert set(nodes["linear"]["forward_ms"]) == {"titan-v"}


def test_nothing_in_it_names_this_machine(tmp_path: Path) -> None:
    make(tmp_path / "out")
    for path in (tmp_path / "out").rglob("*"):
        if path.is_file() and path.suffix != ".safetensors":
            assert str(MODELS.parent) not in path.read_text()


def test_the_same_twice(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make(tmp_path / name)
    for path in (p for p in (tmp_path / "a").rglob("*") if p.is_file()):
        assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes(), path.name


def test_weights_are_the_models_from_the_seed(tmp_path: Path) -> None:
    folder, loaded, plan = compile_kind("TiedLM", tmp_path / "out", most=1)
    values = load_file(folder / "weights.safetensors")
    model = build_real(loaded, 0).state_dict()
    assert set(values) == {p.name for p in plan.parameters}
    assert "head.weight" not in values, "a tied tensor is stored once"
    for name, value in values.items():
        assert torch.equal(value, model[name])


def test_buffers_that_share_memory_are_stored_apart() -> None:
    base = torch.arange(6.0)
    found = artifact._apart({"base": base, "part": base[:3], "wide": torch.ones(1, 2).expand(3, 2), "same": base})
    assert torch.equal(found["part"], base[:3])
    assert torch.equal(found["wide"], torch.ones(3, 2))
    storages = [v.untyped_storage() for v in found.values()]
    assert len({s._cdata for s in storages}) == 4
    assert found["base"] is not None
    assert storages[0]._cdata == base.untyped_storage()._cdata, "no copy where none is needed"


def test_a_plan_is_replaced_whole(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    make(folder, splits=((4,),))
    (folder / "stages" / "left_over.py").write_text("")
    make(folder, "Identity", weights=False)
    assert {p.name for p in folder.iterdir()} == FILES - {"weights.safetensors"}
    assert not (folder / "stages" / "left_over.py").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ArtifactError) as caught:
        make(tmp_path)
    assert (caught.value.code, caught.value.where) == ("HP410", str(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ArtifactError) as caught:
        make(tmp_path / "out")
    assert caught.value.code == "HP410"


def test_an_empty_folder_will_do(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    make(tmp_path / "out")
    assert (tmp_path / "out" / "plan.json").exists()


@pytest.mark.parametrize("step", ["emit_stage", "save_file", "graph_nodes"])
def test_a_step_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    folder = tmp_path / "out"
    make(folder)
    before = {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    def fails(*_: object, **__: object) -> None:
        if step == "save_file":
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifact, step, fails)
    with pytest.raises(ArtifactError) as caught:
        make(folder, "Identity")
    assert caught.value.code == "HP411"
    assert "No space left on device" in caught.value.message
    assert {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_it_can_move(tmp_path: Path) -> None:
    folder, loaded, _ = compile_kind("BNConvNet", tmp_path / "out", most=1)
    (tmp_path / "elsewhere").mkdir()
    moved = Path(shutil.move(folder, tmp_path / "elsewhere" / "plan"))
    expected = eager(loaded)
    for key, value in chained(moved, loaded, 0).items():
        assert torch.allclose(value, expected[key], atol=1e-5), key
