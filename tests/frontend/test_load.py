"""model.py files of all kinds, and what is said about the wrong ones."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from small_net import captured, factors

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.construct import build_real
from hetpipe_compiler.frontend.load import load_workload, parse_settings, workload_digest

GOOD = """
import torch
from hetpipe_compiler import Workload

def workload(batch_size=4, lr: float = 0.1, **others):
    return Workload(
        model=lambda: torch.nn.Linear(2, 2), example=lambda: (torch.zeros(batch_size, 2), torch.zeros(batch_size, 2)),
        optimizer=lambda p: torch.optim.SGD(p, lr=lr), loss=torch.nn.MSELoss(),
    )
"""


def written(folder: Path, text: str, name: str = "model.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refused(path: Path, **settings: Any) -> WorkloadError:
    with pytest.raises(WorkloadError) as caught:
        load_workload(path, settings)
    return caught.value


def test_settings_reach_the_workload(tmp_path: Path) -> None:
    loaded = load_workload(written(tmp_path, GOOD), {"batch_size": 7})
    assert loaded.workload.example_batch()[0].shape == (7, 2)
    assert loaded.settings == {"batch_size": 7}


def test_settings_are_yaml() -> None:
    pairs = ["a=64", "b=0.5", "c=true", "d=[1, 2]", "e=text", "f=", "g=x: [", "h=a=b"]
    expected = {"a": 64, "b": 0.5, "c": True, "d": [1, 2], "e": "text", "f": None, "g": "x: [", "h": "a=b"}
    assert parse_settings(pairs) == expected


@pytest.mark.parametrize("pair", ["batch_size", "=3", "a b=3", "1a=2"])
def test_a_setting_must_be_name_and_value(pair: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        parse_settings([pair])
    assert (caught.value.code, caught.value.where) == ("HP102", "--set")


def test_the_digest_follows_file_and_settings(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    one = load_workload(path, {"lr": 0.1, "batch_size": 2})
    assert one.digest == workload_digest(path, {"batch_size": 2, "lr": 0.1})
    assert one.digest != workload_digest(path, {"batch_size": 3, "lr": 0.1})
    before = one.digest
    written(tmp_path, GOOD + "\n")
    assert load_workload(path, one.settings).digest != before


def test_two_files_of_one_name_do_not_mix(tmp_path: Path) -> None:
    for name, size in (("a", 3), ("b", 5)):
        (tmp_path / name).mkdir()
        written(tmp_path / name, GOOD.replace("batch_size=4", f"batch_size={size}"))
    shapes = [load_workload(tmp_path / n / "model.py").workload.example_batch()[0].shape[0] for n in ("a", "b", "a")]
    assert shapes == [3, 5, 3]


def test_siblings_can_be_imported(tmp_path: Path) -> None:
    written(tmp_path, "SIZE = 9\n", "sibling_of_model.py")
    path = written(tmp_path, "from sibling_of_model import SIZE\n" + GOOD.replace("batch_size=4", "batch_size=SIZE"))
    assert load_workload(path).workload.example_batch()[0].shape[0] == 9


def test_no_file(tmp_path: Path) -> None:
    error = refused(tmp_path / "none.py")
    assert (error.code, error.where) == ("HP101", str(tmp_path / "none.py"))


def test_no_python(tmp_path: Path) -> None:
    assert refused(written(tmp_path, "x", "model.txt")).code == "HP101"


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ("x = 1\ny = 1 / 0\n", 2, "ZeroDivisionError: division by zero"),
        ("import torch\nimport no_such_module\n", 2, "cannot import 'no_such_module'"),
        ("x = 1\ndef f(:\n", 2, "syntax error"),
        ("def workload():\n    x = {}\n    return x['a']\n", 3, "workload() raised KeyError"),
        ("import sys\nsys.exit(0)\n", 2, "SystemExit: 0"),
        ("def workload():\n    raise SystemExit(0)\n", 2, "workload() raised SystemExit: 0"),
    ],
)
def test_a_file_that_raises_is_told_with_its_line(tmp_path: Path, text: str, line: int, part: str) -> None:
    path = written(tmp_path, text)
    error = refused(path)
    assert (error.code, error.where) == ("HP103", f"{path}:{line}")
    assert part in error.message


def test_no_workload_function(tmp_path: Path) -> None:
    assert refused(written(tmp_path, "workload = 3\n")).code == "HP104"


def test_not_a_workload(tmp_path: Path) -> None:
    error = refused(written(tmp_path, "def workload():\n    return 3\n"))
    assert error.code == "HP105"
    assert "int" in error.message


def test_a_setting_that_it_does_not_take(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD.replace(", **others", ""))
    error = refused(path, depth=3)
    assert (error.code, error.where) == ("HP102", "--set")
    assert "workload(batch_size=4" in error.message
    assert "'depth'" in error.message


@pytest.mark.parametrize("draw", ["random.random()", "float(np.random.rand())"])
def test_what_a_constructor_draws_is_what_the_weights_are_drawn_with(draw: str, tmp_path: Path) -> None:
    top = "import random\nimport numpy as np"
    (factor,) = factors(captured(tmp_path, "h = h * self.factor", top, f"self.factor = {draw}"))
    assert build_real(load_workload(tmp_path / "model.py", {}), 0).factor == factor
    assert build_real(load_workload(tmp_path / "model.py", {}), 1).factor != factor


@pytest.mark.parametrize("text", ["2020-13-45", "{a: 1, a: 2}", "[" * 5000, "9" * 5000, "a: &a [x]\nb: &b [*a"])
def test_a_setting_that_is_no_yaml_is_a_text(text: str) -> None:
    assert parse_settings([f"name={text}"]) == {"name": text}


@pytest.mark.parametrize("text", ["2020-01-01", "!!set {a}", "&a [*a]", "{1: 2, b: 3}", f"0x{'f' * 5000}"])
def test_a_setting_that_no_plan_can_hold_is_one_error(text: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        parse_settings([f"day={text}"])
    assert (caught.value.code, caught.value.where) == ("HP102", "--set")
    assert "day:" in caught.value.message
    assert parse_settings(["day='2020-01-01'"]) == {"day": "2020-01-01"}


def test_random_numbers_of_the_caller_go_on(tmp_path: Path) -> None:
    loaded = load_workload(written(tmp_path, GOOD))
    random.seed(7)
    expected = random.Random(7).random()
    loaded.build(0)
    assert random.random() == expected


def test_a_setting_that_a_plan_would_change_is_refused() -> None:
    with pytest.raises(WorkloadError, match="cannot hold"):
        parse_settings(["names={1: a}"])
    assert parse_settings(["x=.nan", "y={a: [1, 2.5, null]}"])["y"] == {"a": [1, 2.5, None]}
