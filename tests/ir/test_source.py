"""Which files are torch's own, and which only have its name before theirs."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch

import hetpipe_compiler
from hetpipe_compiler.ir.source import is_internal, is_pythons_own

_PACKAGES = Path(inspect.getfile(torch)).parents[1]


@pytest.mark.parametrize("name", ["torch/nn/functional.py", "torch/fx/passes/shape_prop.py"])
def test_torch_is_internal(name: str) -> None:
    assert is_internal(str(_PACKAGES / name))


def test_we_are_and_what_no_file_holds_is() -> None:
    assert is_internal(str(Path(hetpipe_compiler.__file__).parent / "frontend" / "export.py"))
    assert is_internal("<string>")


@pytest.mark.parametrize("name", ["torchvision/models/vgg.py", "torch_scatter/scatter.py", "timm/models/vgg.py"])
def test_libraries_are_not(name: str) -> None:
    assert not is_internal(str(_PACKAGES / name))
    assert not is_pythons_own(str(_PACKAGES / name))


def test_neither_is_a_users_folder_of_whatever_name() -> None:
    assert not is_internal("/home/user/fx/passes/model.py")


def test_pythons_own() -> None:
    assert is_pythons_own(str(json.__file__))
    assert is_pythons_own("<frozen os>")
