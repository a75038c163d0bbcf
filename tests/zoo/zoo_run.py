"""Run the zoo: every model in a process of its own, results appended to a JSONL file, tables written to docs/zoo.md.

``python tests/zoo/zoo_run.py`` goes on where an earlier run of the same code and library versions stopped, with as many
models at a time as there are cores. ``--only timm:`` takes the models whose names begin so, ``--again`` forgets earlier
results.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import signal
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

#: Of a process: resident memory, CPU time.
MEMORY_GB, CPU_S = 4.0, 240
#: Wall time that a process gets, as a multiple of its CPU time: others may use the machine too.
PATIENCE = 10
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
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="models at a time (default: one a core)")
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
        rows = run(names, options.results, again=options.again, kept=options.kept, jobs=options.jobs)
    if not options.only:
        current = sum(row["digest"] == code_digest(row["name"]) for row in rows)
        options.page.write_text(render(rows, versions(), MEMORY_GB, models=len(names), current=current))
    passed = sum(r["outcome"] == "pass" for r in rows)
    failed = [r["name"] for r in rows if r["outcome"] == "FAIL"]
    print(f"{passed} of {len(rows)} pass, {len(rows) - passed - len(failed)} refused, {len(failed)} FAIL {failed}")
    return 0 if passed >= GOAL * len(rows) and not failed else 1


def run(
    names: Sequence[str], results: Path, *, again: bool = False, kept: bool = False, jobs: int = 1
) -> list[dict[str, Any]]:
    """Results of ``names`` in their order; what has one for the same code (and is not asked for again) is not run."""
    found = earlier_results(results)
    # What the code was when this process read it: the result's, however long the run takes.
    digests = {name: code_digest(name) for name in names}
    waiting = [
        name
        for name in names
        if again
        or name not in found
        or (found[name]["digest"] != digests[name] and not (kept and found[name]["outcome"] == "pass"))
    ]
    running: list[_Child] = []
    done = 0
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_Child(waiting.pop(0)))
        time.sleep(0.1)
        for child in list(running):
            result = child.poll()
            if result is None:
                continue
            running.remove(child)
            done += 1
            row = {**asdict(result), "digest": digests[child.name], "date": time.strftime("%Y-%m-%d")}
            found[child.name] = row
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            told = f"{row['code']} {row['reason']}".strip()
            of = done + len(waiting) + len(running)
            print(f"{done}/{of} {child.name} {row['outcome']} {row['cpu_s']} s {told}", flush=True)
    return [found[name] for name in names]


def earlier_results(results: Path) -> dict[str, dict[str, Any]]:
    """The last result of each model."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}


class _Child:
    """`check` in a forked process, which is ended when it takes more than its memory or time."""

    def __init__(self, name: str) -> None:
        self.name = name
        context = multiprocessing.get_context("fork")
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(name, sender))
        self._start = time.monotonic()
        self._process.start()
        sender.close()

    def poll(self) -> Result | None:
        """The result, or None while there is none."""
        problem = ""
        if self._receiver.poll():
            try:
                result: Result = self._receiver.recv()
            except EOFError:
                problem = "the process ended without a result"
        elif not self._process.is_alive():
            problem = f"the process ended with status {self._process.exitcode}"
        elif time.monotonic() - self._start > PATIENCE * CPU_S:
            problem = f"more than {PATIENCE * CPU_S} s"
        elif _resident_gb(self._process.pid or 0) > MEMORY_GB:
            problem = f"more than {MEMORY_GB} GB"
        else:
            return None
        if problem:
            self._process.kill()
            result = Result(self.name, "FAIL", reason=problem)
        self._process.join()
        if self._process.exitcode == -signal.SIGXCPU:
            result.reason = f"more than {CPU_S} s of CPU time"
        return result


def _work(name: str, sender: Any) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 5))
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
