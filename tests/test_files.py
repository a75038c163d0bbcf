"""A file is written whole or not at all; what cannot be written is one error with its reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hetpipe_compiler.errors import ArtifactError
from hetpipe_compiler.files import check_file, write_text


def test_written_whole(tmp_path: Path) -> None:
    write_text(tmp_path / "ü 中.json", "ü")
    assert [p.name for p in tmp_path.iterdir()] == ["ü 中.json"]
    assert (tmp_path / "ü 中.json").read_bytes() == "ü".encode()


@pytest.mark.parametrize(
    ("name", "message"),
    [(".", "it is a folder"), ("folder", "it is a folder"), ("no/x", "there is no folder"), ("file/x", "no folder"),
     ("x" * 300, "too long")],
)  # fmt: skip
def test_what_cannot_be_written_is_told_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").touch()
    with pytest.raises(ArtifactError) as caught:
        check_file(Path(name))
    assert (caught.value.code, caught.value.where) == ("HP411", name)
    assert message in caught.value.message
    assert caught.value.hint


def test_a_long_name_can_be_written(tmp_path: Path) -> None:
    write_text(tmp_path / ("中" * 85), "text")
    assert [(len(p.name.encode()), p.read_text()) for p in tmp_path.iterdir()] == [(255, "text")]


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "far" / "file")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert [p.read_text() for p in (tmp_path / "far").iterdir()] == ["text"]


def test_what_is_no_file_is_written_itself(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "text")
    assert os.read(reader, 9) == b"text"
    os.close(reader)
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]


def test_an_interrupted_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "graph.json"
    path.write_text("old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"graph.json": "old"}
