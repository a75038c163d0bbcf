"""hetpipe-profile as a command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hetpipe_compiler.cli import profile as cli
from hetpipe_compiler.cli.boundary import run_app, single_command

MODEL = Path(__file__).parents[1] / "profiling" / "small_model.py"

BRANCHES = """import torch
from torch import nn
from hetpipe_compiler import Workload


class Sign(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def workload():
    return Workload(
        model=lambda: nn.Sequential(nn.Linear(4, 4), Sign(), nn.Linear(4, 1)),
        loss=lambda out, _: out.mean(),
        example=(torch.ones(2, 4), torch.ones(2)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
"""


def run(*arguments: object) -> int:
    app = single_command(cli.command)
    with pytest.raises(SystemExit) as caught:
        run_app(lambda: app(args=[str(a) for a in arguments], prog_name="hetpipe-profile"))
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_it_writes_a_profile(tmp_path, capsys):
    out = tmp_path / "p.json"
    assert run(MODEL, "--kind", "cpu", "-o", out, "--seconds", "0", "--set", "batch_size=2") == 0
    content = json.loads(out.read_text())
    assert (content["kind"], content["backend"], content["threads"]) == ("cpu", "cpu", 1)
    assert any("[2, 6, 16]" in key for key in content["operators"])
    assert "written" in capsys.readouterr().err


def test_a_profile_that_cannot_be_written_is_told_before_the_model_is_loaded(tmp_path, capsys):
    assert run(tmp_path / "none.py", "--kind", "cpu", "-o", tmp_path / "none" / "p.json") == 2
    assert capsys.readouterr().err.startswith(f"error[HP411]: {tmp_path}/none/p.json: ")


def test_what_is_kept_whole_is_not_measured(tmp_path, capsys):
    model, out = tmp_path / "model.py", tmp_path / "p.json"
    model.write_text(BRANCHES)
    assert run(model, "--kind", "cpu", "-o", out, "--seconds", "0") == 2
    assert "--opaque 1" in capsys.readouterr().err
    assert run(model, "--kind", "cpu", "-o", out, "--seconds", "0", "--opaque", "1") == 0
    operators = json.loads(out.read_text())["operators"]
    assert operators
    assert not [key for key in operators if "opaque" in key]


def test_calibration_of_a_model(tmp_path, capsys):
    assert run(MODEL, "--kind", "mine", "-o", tmp_path / "p.json", "--seconds", "0", "--calibrate") in (0, 2)
    printed = capsys.readouterr()
    # So small a model may leave nothing but launches to fit; then it says so.
    assert printed.out.startswith("kinds:\n  mine:\n") or "HP236" in printed.err


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        (MODEL,),
        ("--kind", "cpu"),
        ("--links", MODEL),
        ("--links", "--calibrate"),
        ("--links", "--coordinator", "nowhere"),
        ("--links", "--coordinator", "127.0.0.1:99999"),
        (MODEL, "--kind", ""),
        (MODEL, "--kind", " "),
        (MODEL, "--kind", "cpu", "--coordinator", "a:1"),
    ],
)
def test_contradictions_are_refused(arguments, capsys):
    assert run(*arguments) == 2
    assert capsys.readouterr().err


def test_no_such_device(capsys):
    assert run(MODEL, "--kind", "x", "--device", "cuda:77") == 2
    assert "error[HP233]" in capsys.readouterr().err


def test_help_needs_no_torch():
    code = "import sys, hetpipe_compiler.cli.profile as p; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
