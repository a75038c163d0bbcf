"""Each rule that keeps a model's meaning is needed: without it, a test of the suite fails.

A row of the tables in ``tests/rules`` names the trouble (most as users of such systems met it), the test that stands
against it, and the rule that the test protects; here the rule is taken out and the test must fail, by what it compares.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import models
import pytest
from removal import is_there, without, without_in_children
from rules import of_capture, of_runs, of_stages
from rules.elsewhere import ELSEWHERE
from rules.row import Row

TESTS = Path(__file__).parents[1]
CASES = TESTS.parents[1] / "shared" / "cases.md"
ROWS: tuple[Row, ...] = (*of_capture.ROWS, *of_stages.ROWS, *of_runs.ROWS)


class _Says:
    """Collects what a test run within this one says."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.ran = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran += report.when == "call"
        if report.failed:
            self.failures.append(str(report.longrepr))


def run(test: str) -> _Says:
    """Run one test of the suite in this process."""
    says = _Says()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        status = pytest.main(
            ["-x", "-s", "-p", "no:cacheprovider", "-p", "no:logging", str(TESTS / test)], plugins=[says]
        )
    assert status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), f"{test}: {status!r}"
    return says


@pytest.fixture(scope="module")
def passed() -> set[str]:
    """Tests that are known to pass with all rules."""
    return set()


each_row = pytest.mark.parametrize("row", ROWS, ids=[row.trouble for row in ROWS])


@each_row
def test_the_rule_is_where_the_table_says(row: Row) -> None:
    assert is_there(row.removal)
    assert (TESTS / row.test.partition("::")[0]).is_file()


@pytest.mark.skipif(not CASES.is_file(), reason="the reported troubles are not here")
def test_every_reported_trouble_has_a_row_or_a_reason() -> None:
    text = CASES.read_text()
    reported = set(re.findall(r"^\| ([TSVPRDMC]\d+) \|", text, flags=re.M))
    held = {case for row in ROWS for case in row.cases.split()}
    assert reported == held | ELSEWHERE.keys()
    assert not held & ELSEWHERE.keys()
    named = set(re.findall(r"`(\w+)` \(", text.partition("## Test models")[2]))
    kinds = models.KINDS.keys() & {word for row in ROWS for word in re.findall(r"\w+", row.test)}
    assert named <= kinds | {models.KINDS[kind].model.__name__ for kind in kinds}


@pytest.mark.slow
@each_row
def test_without_the_rule_its_test_fails(row: Row, passed: set[str], tmp_path: Path) -> None:
    if row.test not in passed:
        found = run(row.test)
        assert found.ran, "no such test"
        assert not found.failures, "it fails with the rule, too"
        passed.add(row.test)
    with without_in_children(tmp_path, row.removal) if row.in_children else without(row.removal):
        found = run(row.test)
    assert found.failures, "the test does not miss the rule"
    text = found.failures[0]
    print("\n".join(line for line in text.splitlines() if line.startswith("E "))[:300])
    assert re.search(row.pattern, text), text
    if "Error" not in row.pattern:
        assert not re.search(r"NameError|SyntaxError|UnboundLocalError", text), f"not by what it compares: {text}"
