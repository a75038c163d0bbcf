"""What a command's end looks like to the shell."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hetpipe_compiler.cli.boundary import run_app, single_command
from hetpipe_compiler.errors import PlanningError


def status(function: object) -> int:
    with pytest.raises(SystemExit) as caught:
        run_app(function)  # type: ignore[arg-type]
    return int(caught.value.code or 0)


def test_nothing_wrong() -> None:
    assert status(lambda: None) == 0


def test_a_users_error_is_printed_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise PlanningError("HP301", "512 MiB too much", where="n0:1", hint="use a smaller batch")

    assert status(fails) == 2
    captured = capsys.readouterr()
    assert captured.err == "error[HP301]: n0:1: 512 MiB too much\n  next: use a smaller batch\n"
    assert captured.out == ""


def test_an_interrupt_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert status(interrupted) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_bug_is_1_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def buggy() -> None:
        raise IndexError("list index out of range")

    assert status(buggy) == 1
    err = capsys.readouterr().err
    assert "this is a bug in hetpipe-compiler" in err
    assert "IndexError: list index out of range" in err
    assert "in buggy" in err


def test_a_file_that_the_system_refuses_is_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    name = "x" * 300
    assert status(lambda: print(Path(name).is_file())) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error[HP412]: {name}: the system refuses it: File name too long\n  next: ")
    assert captured.err.count("\n") == 2


def test_a_name_that_is_no_text_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def command(folder: Path) -> None:
        raise AssertionError(folder)

    monkeypatch.setattr(sys, "argv", ["hetpipe-test", os.fsdecode(b"lat\xe9n")])
    assert status(single_command(command)) == 2
    assert capsys.readouterr().err.startswith("error[HP412]: 'lat\\udce9n': its name is not UTF-8\n  next: ")


def test_errors_and_statuses_pass_through_typer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(name: str, count: int = 1) -> None:
        raise PlanningError("HP302", f"{name} {count}")

    monkeypatch.setattr(sys, "argv", ["hetpipe-test", "x", "--count", "3"])
    assert status(single_command(command)) == 2
    assert capsys.readouterr().err == "error[HP302]: x 3\n"
    monkeypatch.setattr(sys, "argv", ["hetpipe-test", "x", "--count", "many"])
    assert status(single_command(command)) == 2
    err = capsys.readouterr().err
    assert "hetpipe-test [OPTIONS]" in err
    assert "--count" in err


def test_what_a_users_function_ends_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def command() -> None:
        sys.exit(0)

    monkeypatch.setattr(sys, "argv", ["hetpipe-test"])
    assert status(single_command(command)) == 2
    err = capsys.readouterr().err
    assert err.startswith("error[HP127]: ")
    assert "test_boundary.py:" in err
    assert "your code ended the program: SystemExit: 0" in err


@pytest.mark.parametrize(
    ("raised", "expected", "message"), [(KeyboardInterrupt, 130, "interrupted\n"), (EOFError, 1, "this is a bug")]
)
def test_typer_has_no_say_in_how_a_command_ends(
    raised: type[BaseException],
    expected: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def command() -> None:
        raise raised

    monkeypatch.setattr(sys, "argv", ["hetpipe-test"])
    assert status(single_command(command)) == expected
    assert message in capsys.readouterr().err


def test_a_reader_that_is_gone_is_no_bug() -> None:
    code = (
        "from hetpipe_compiler.cli.boundary import run_app, single_command\n"
        "def command() -> None:\n"
        "    for at in range(100000): print(at)\n"
        "run_app(single_command(command))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait() == 141
        assert process.stderr.read() == b""


def test_run_help_does_not_load_torch() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['hetpipe-run', '--help']\n"
        "from hetpipe_compiler.cli.run import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'numpy', 'numba', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "--reproducible" in result.stdout


def test_a_missing_plan_is_one_error(tmp_path: object) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "hetpipe_compiler.cli.run", f"{tmp_path}/none", "-o", f"{tmp_path}/run"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error[HP401]: ")
    assert result.stderr.count("\n") == 2


def test_a_terminal_without_a_letter_shows_a_question_mark() -> None:
    code = "from hetpipe_compiler.cli.boundary import run_app; run_app(lambda: print('\\u2192 1'))"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, env=environment)
    assert (ended.returncode, ended.stdout) == (0, b"? 1\n"), ended.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_for_what_is_printed_is_one_error() -> None:
    code = "from hetpipe_compiler.cli.boundary import run_app; run_app(lambda: print('a line'))"
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == 2
    assert ended.stderr.startswith("error[HP444]: output: cannot write: No space left on device\n")
    assert ended.stderr.count("\n") == 2


def test_a_closed_output_is_no_bug() -> None:
    code = "from hetpipe_compiler.cli.boundary import run_app; run_app(lambda: print('a line'))"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} >&-"
    ended = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
