"""Run the zoo: every model in a process of its own, results appended to a JSONL file, tables written to docs/zoo.md.

``python tests/zoo/zoo_run.py`` goes on where an earlier run of the same code and library versions stopped. A run is two
hours of one core at most; ``--only timm:`` takes the models whose names begin so, ``--again`` forgets earlier results.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import zoo_models
from zoo_check import ROOT, Result, check, code_digest, versions
from zoo_tables import render

#: Of a process: resident memory, wall time.
MEMORY_GB, TIME_S = 4.0, 240.0
RESULTS = ROOT / "build" / "zoo.jsonl"
#: Share of models that must pass; none may differ silently.
GOAL = 0.97


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if the goal is met by all models asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", action="append", default=[], metavar="PREFIX", help="models whose names begin so")
    parser.add_argument("--again", action="store_true", help="run also what has a result for this code")
    parser.add_argument("--kept", action="store_true", help="keep results of other code that passed")
    parser.add_argument(
        "--page-only", action="store_true", help="run nothing, write the page from the results there are"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "zoo.md")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    names = [n for n in zoo_models.names() if not options.only or n.startswith(tuple(options.only))]
    options.results.parent.mkdir(parents=True, exist_ok=True)
    if options.page_only:
        found = earlier_results(options.results)
        rows = [found[name] for name in names if name in found]
    else:
        rows = run(names, options.results, again=options.again, kept=options.kept)
    if not options.only:
        current = sum(row["digest"] == code_digest(row["name"]) for row in rows)
        options.page.write_text(render(rows, versions(), MEMORY_GB, models=len(names), current=current))
    passed = sum(r["outcome"] == "pass" for r in rows)
    failed = [r["name"] for r in rows if r["outcome"] == "FAIL"]
    print(f"{passed} of {len(rows)} pass, {len(rows) - passed - len(failed)} refused, {len(failed)} FAIL {failed}")
    return 0 if passed >= GOAL * len(rows) and not failed else 1


def run(names: Sequence[str], results: Path, *, again: bool = False, kept: bool = False) -> list[dict[str, Any]]:
    """Results of ``names`` in their order; what has one for the same code (and is not asked for again) is not run."""
    found = earlier_results(results)
    for at, name in enumerate(names):
        digest = code_digest(name)
        earlier = found.get(name)
        if earlier and not again and (earlier["digest"] == digest or (kept and earlier["outcome"] == "pass")):
            continue
        row = {**asdict(isolated(name)), "digest": digest, "date": time.strftime("%Y-%m-%d")}
        found[name] = row
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        told = f"{row['code']} {row['reason']}".strip()
        print(f"{at + 1}/{len(names)} {name} {row['outcome']} {row['seconds']} s {told}", flush=True)
    return [found[name] for name in names]


def earlier_results(results: Path) -> dict[str, dict[str, Any]]:
    """The last result of each model."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}


def isolated(name: str) -> Result:
    """`check` in a forked process, ended when it takes more than its memory or time."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, sender))
    start = time.monotonic()
    process.start()
    sender.close()
    problem = ""
    while not problem and not receiver.poll(0.2):
        if not process.is_alive():
            problem = f"the process ended with status {process.exitcode}"
        elif time.monotonic() - start > TIME_S:
            problem = f"more than {TIME_S:.0f} s"
        elif _resident_gb(process.pid or 0) > MEMORY_GB:
            problem = f"more than {MEMORY_GB} GB"
    try:
        result: Result = receiver.recv() if not problem else Result(name, "FAIL", reason=problem)
    except EOFError:
        result = Result(name, "FAIL", reason="the process ended without a result")
    if process.is_alive() and problem:
        process.kill()
    process.join()
    if problem:
        result.seconds = round(time.monotonic() - start, 1)
    return result


def _child(name: str, sender: Any) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with Path(os.devnull).open("w") as null:
        os.dup2(null.fileno(), 2)
    sender.send(check(name))
    sender.close()


def _resident_gb(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e9


if __name__ == "__main__":
    sys.exit(main())
