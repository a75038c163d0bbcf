"""A run folder: refused when in use, and as it was before where a run left nothing worth keeping."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetpipe_compiler.errors import RunError
from hetpipe_compiler.runtime.run_options import make_run_folder, nothing_half_made

FULL = RunError("HP554", "cannot write: No space left on device")


def ends(run: Path, error: BaseException, *files: str) -> list[str] | None:
    """What is in the run folder after a run that made these files and ended so; None: there is no folder."""

    def goes_wrong() -> None:
        with nothing_half_made(run):
            make_run_folder(run)
            for name in files:
                (run / name).parent.mkdir(exist_ok=True)
                (run / name).write_text("" if name == "metrics.jsonl" else "text")
            raise error

    with pytest.raises(type(error)):
        goes_wrong()
    return sorted(p.name for p in run.iterdir()) if run.exists() else None


def test_ctrl_c_leaves_weights_or_nothing(tmp_path: Path) -> None:
    begun = ("run.json", "events.jsonl", "logs/vw0-stage0.log", "metrics.jsonl")
    assert ends(tmp_path / "run", KeyboardInterrupt(), *begun) is None
    saved = ends(tmp_path / "run", KeyboardInterrupt(), *begun, "weights-wave3.safetensors")
    assert saved is not None
    assert len(saved) == 5


def test_an_error_leaves_the_log_or_nothing(tmp_path: Path) -> None:
    assert ends(tmp_path / "run", FULL, "run.json", "metrics.jsonl", "initial.safetensors") is None
    assert ends(tmp_path / "logged", FULL, "run.json", "logs/vw0-stage0.log") == ["logs", "run.json"]
    assert ends(tmp_path / "told", FULL, "run.json", "events.jsonl") == ["events.jsonl", "run.json"]


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to("real")
    assert ends(link, KeyboardInterrupt(), "run.json", "logs/vw0-stage0.log") == []
    assert link.is_symlink()


def test_what_is_in_use_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes").touch()
    with pytest.raises(KeyboardInterrupt), nothing_half_made(mine):
        raise KeyboardInterrupt
    other = tmp_path / "other"

    def begins_a_moment_later() -> None:
        with nothing_half_made(other):
            other.mkdir()
            (other / "run.json").touch()  # the other run's
            make_run_folder(other)

    with pytest.raises(RunError, match="is not empty"):
        begins_a_moment_later()
    assert (mine / "notes").exists()
    assert (other / "run.json").exists()


def test_a_run_that_ends_before_it_makes_its_folder_leaves_what_another_made_meanwhile(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def is_interrupted() -> None:
        with nothing_half_made(run):
            run.mkdir()
            (run / "run.json").write_text("another's")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        is_interrupted()
    assert (run / "run.json").read_text() == "another's"
