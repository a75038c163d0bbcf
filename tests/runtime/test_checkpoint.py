"""Weights on disk: complete, or not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hetpipe_compiler.errors import RunError
from hetpipe_compiler.runtime import checkpoint


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    tied = torch.arange(6.0).view(2, 3)
    checkpoint.save(tmp_path / "w.safetensors", {"a": tied, "b": tied, "n": torch.tensor(3)}, clock=7)
    loaded = load_file(tmp_path / "w.safetensors")
    assert torch.equal(loaded["a"], tied)
    assert torch.equal(loaded["b"], tied)
    assert int(loaded["n"]) == 3
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        assert file.metadata()["clock"] == "7"
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


def test_only_what_shares_memory_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, flat = torch.arange(4.0), torch.arange(6.0)
    tensors = {"whole": whole, "first": flat[:3], "second": flat[2:], "turned": flat.view(2, 3).T}
    given: dict[str, Any] = {}

    def save_file(values: dict[str, Any], path: Path, metadata: Any) -> None:
        given.update(values)
        write(values, path, metadata)

    write = safetensors.torch.save_file
    monkeypatch.setattr("safetensors.torch.save_file", save_file)
    checkpoint.save(tmp_path / "w.safetensors", tensors)
    assert all(torch.equal(value, tensors[name]) for name, value in load_file(tmp_path / "w.safetensors").items())
    assert [given[name].data_ptr() == tensors[name].data_ptr() for name in tensors] == [True, True, False, False]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_save_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def broken(_tensors: Any, path: Path, _metadata: Any) -> None:
        path.write_bytes(b"half of it")
        raise error

    monkeypatch.setattr("safetensors.torch.save_file", broken)
    with pytest.raises((KeyboardInterrupt, RunError)):
        checkpoint.save(tmp_path / "w.safetensors", {"a": torch.zeros(1)})
    assert not list(tmp_path.iterdir())
