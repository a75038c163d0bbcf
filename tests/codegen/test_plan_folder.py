"""A plan folder takes its place at once or not at all; what could not be written is refused before planning."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetpipe_compiler.codegen.plan_folder import check_target, replace_folder
from hetpipe_compiler.errors import ArtifactError


def write(new: Path, text: str = "new") -> None:
    new.mkdir()
    (new / "plan.json").write_text(text)


def old_plan(folder: Path) -> Path:
    write(folder, "old")
    return folder


def refused(folder: Path, code: str) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        check_target(folder)
    assert (caught.value.code, caught.value.where) == (code, str(folder))
    assert caught.value.hint
    return caught.value


def test_what_is_no_plan_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").touch()
    (tmp_path / "link").symlink_to("notes")
    for name in ("file", "notes", "link", "notes/../notes"):
        refused(tmp_path / name, "HP410")


def test_where_nothing_can_be_written_is_told_early(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "round").symlink_to("round")
    assert "is no folder" in refused(tmp_path / "file" / "plan", "HP411").message
    refused(tmp_path / ("x" * 300), "HP411")
    refused(tmp_path / "round", "HP411")


def test_a_closed_folder_is_told_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, _mode: Path(path) != tmp_path)
    assert str(tmp_path) in refused(tmp_path / "plan", "HP411").message
    refused(tmp_path / "deeper" / "plan", "HP411")


def test_the_folder_that_one_is_in_is_not_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = old_plan(tmp_path / "out") / "stages"
    inside.mkdir()
    for here, named in ((tmp_path / "out", "."), (inside, ".."), (inside, str(tmp_path / "out"))):
        monkeypatch.chdir(here)
        assert "is where you are" in refused(Path(named), "HP410").message


def test_a_link_is_followed(tmp_path: Path) -> None:
    real = old_plan(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("made")
    replace_folder(tmp_path / "link", write)
    replace_folder(tmp_path / "dangling", write)
    assert (real / "plan.json").read_text() == "new"
    assert (tmp_path / "made" / "plan.json").read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_symlink()) == ["dangling", "link"]
    assert len(list(tmp_path.iterdir())) == 4


def test_a_long_name_can_be_written(tmp_path: Path) -> None:
    replace_folder(tmp_path / ("中" * 85), write)
    assert [len(p.name.encode()) for p in tmp_path.iterdir()] == [255]


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_end_between_the_renames_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException
) -> None:
    out = old_plan(tmp_path / "out")
    rename = Path.rename

    def ends(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise raised
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", ends)
    with pytest.raises((KeyboardInterrupt, ArtifactError)):
        replace_folder(out, write)
    assert (out / "plan.json").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
