"""A plan folder that was damaged or edited badly is refused before any process starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file
from toy_run import write_runnable

from hetpipe_compiler.errors import ArtifactError
from hetpipe_compiler.ir.plan import Plan
from hetpipe_compiler.runtime.launch import launch
from hetpipe_compiler.runtime.preflight import check_plan_folder
from hetpipe_compiler.runtime.run_options import RunOptions


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_runnable(tmp_path / "plan", cuts=((2,),), in_flight=((2, 1),))
    return tmp_path / "plan"


def edit(old: str, new: str) -> Callable[[Path], None]:
    """An edit of schedule.csv."""

    def change(folder: Path) -> None:
        path = folder / "schedule.csv"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return change


def rewrite(name: str, text: str | bytes) -> Callable[[Path], None]:
    """Another content of a file; of every stage module for ``stages``."""

    def change(folder: Path) -> None:
        files = list((folder / "stages").glob("*.py")) if name == "stages" else [folder / name]
        assert files
        for file in files:
            file.write_bytes(text.encode() if isinstance(text, str) else text)

    return change


def remove(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        files = sorted(folder.glob(name))
        assert files
        files[0].unlink()

    return change


def lose_a_weight(folder: Path) -> None:
    weights = load_file(folder / "weights.safetensors")
    weights.pop("fc3.bias")
    save_file(weights, folder / "weights.safetensors")


def test_what_was_written_is_accepted(folder: Path) -> None:
    check_plan_folder(Plan.load(folder), folder)


def edit_plan(old: str, new: str) -> Callable[[Path], None]:
    """An edit of plan.json, in every place."""

    def change(folder: Path) -> None:
        path = folder / "plan.json"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return change


def edit_plan_unseen(old: str, new: str) -> Callable[[Path], None]:
    """The same, by someone who takes the digest out."""

    def change(folder: Path) -> None:
        edit_plan(old, new)(folder)
        plan = json.loads((folder / "plan.json").read_text())
        del plan["digest"]
        (folder / "plan.json").write_text(json.dumps(plan))

    return change


@pytest.mark.parametrize(
    ("damage", "code", "place"),
    [
        (edit("^0", ""), "HP434", "schedule.csv, vw0/stage0"),
        (edit("U1", ""), "HP432", "schedule.csv, vw0/stage0"),
        (edit("B1", "bogus"), "HP420", "schedule.csv"),
        (remove("schedule.csv"), "HP417", "schedule.csv"),
        (remove("stages/*.py"), "HP415", "stages"),
        (rewrite("stages", "import nothing_of_that_name\n"), "HP415", ".py:1"),
        (rewrite("stages", "x = 1\nclass Stage(:\n"), "HP415", ".py:2"),
        (rewrite("stages", "x = 1\n"), "HP415", ".py"),
        (remove("weights.safetensors"), "HP416", "weights.safetensors"),
        (rewrite("weights.safetensors", b"no safetensors"), "HP416", "weights.safetensors"),
        (rewrite("plan.json", b"\xff\xfe\x00"), "HP402", "plan.json"),
        (rewrite("plan.json", "{"), "HP402", "plan.json"),
        (edit_plan('"nm": 2', '"nm": 0'), "HP402", "plan.json"),
        (edit_plan('"version": 1', '"version": 0, "chunks": 3'), "HP403", "plan.json"),
        (rewrite("plan.json", '{"format": "hetpipe-plan", "version": 2, "stages": []}'), "HP403", "plan.json"),
        (edit_plan('"device": "n0:0"', '"device": "n7:0"'), "HP405", "plan.json"),
        (edit_plan('"recompute": false', '"recompute": true'), "HP405", "plan.json"),
        (edit_plan_unseen('"device": "n0:0"', '"device": "n7:0"'), "HP402", "plan.json"),
        (lose_a_weight, "HP416", "weights.safetensors"),
    ],
)
def test_a_damaged_folder_starts_nothing(
    folder: Path, tmp_path: Path, damage: Callable[[Path], None], code: str, place: str
) -> None:
    damage(folder)
    with pytest.raises(ArtifactError) as caught:
        launch(RunOptions(folder, tmp_path / "run", steps=2), Console(quiet=True))
    assert (caught.value.code, place in str(caught.value.where)) == (code, True), caught.value
    assert caught.value.hint
    assert not (tmp_path / "run").exists()
