"""hetpipe-compile --explain: needs no cluster, plans nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hetpipe_compiler.cli.compile import main

GOLDEN = Path(__file__).parents[1] / "golden"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["hetpipe-compile", *arguments])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_prints_what_was_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "explained_model.py"
    model.write_text('print("hello")\n' + (GOLDEN / "explained_model.py").read_text())
    assert run(monkeypatch, str(model), "--explain") == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0] == "explained_model: 29 operators, captured in train mode"
    assert "hello" in printed.err
    assert list(tmp_path.glob("out*")) == []


def test_without_it_a_cluster_is_needed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "model.py") == 2
    assert capsys.readouterr().err.startswith("error[HP222]: --cluster: no cluster file")


def test_a_profiled_graph_has_nothing_to_explain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "graph.json").write_text("{}")
    assert run(monkeypatch, str(tmp_path / "graph.json"), "--explain") == 2
    assert "error[HP137]" in capsys.readouterr().err
