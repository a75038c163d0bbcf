"""docs/zoo.md from the zoo's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

_HEAD = """# Zoo

Models that nobody here wrote, captured from meta tensors, cut, written as stage modules, and run beside themselves:
one training step of the model as its library ships it against one of the stages chained by the plan's ports. Compared
are the loss, the gradient of every parameter and every buffer; random operators (dropout, stochastic depth) are live
and get the same seeds on both sides. Each model is cut three times: at the planner's choice for a cluster of three
unlike kinds of device, and at two random places. Written by `make zoo`; a single model is repeated by

    hetpipe-compile tests/zoo/model.py --set name=torchvision:resnet18 --cluster CLUSTER.yaml --verify

* **difference** is the largest of any value in any of the three cuts, relative to that value's size (a gradient's
  size counts as at least a thousandth of the model's largest gradient). In float64 1e-9 is allowed. Where a model
  cannot be compared in float64, ten times what one ulp of its input changes is allowed in float32; the reason is given.
* **eval**: whether the stages were compared in eval mode too (the loss of a forward pass), or why they cannot be.
* **refused** means that the compiler said what it cannot do, with a code, and wrote nothing. **FAIL** means that it
  made a plan that does not compute the same, or broke, or that the process ran out of its time or memory.
"""


def render(
    rows: Sequence[Mapping[str, Any]], versions: Mapping[str, str], memory_gb: float, *, models: int, current: int
) -> str:
    """The page.

    Args:
        rows: Results, library by library.
        versions: Of the libraries.
        memory_gb: Limit of a process.
        models: How many the zoo has.
        current: How many results come from the code as it is.
    """
    passed = [r for r in rows if r["outcome"] == "pass"]
    refused = [r for r in rows if r["outcome"] == "refused"]
    failed = [r for r in rows if r["outcome"] == "FAIL"]
    exact = sum(r["difference"] == 0.0 for r in passed)
    timed = [r["cpu_s"] for r in rows if r.get("cpu_s")]
    dates = sorted({r["date"] for r in rows})
    parts = [
        _HEAD,
        f"Run {dates[0] if len(dates) == 1 else f'{dates[0]} to {dates[-1]}'} on CPU with"
        f" {', '.join(f'{n} {v}' for n, v in versions.items())}; at most {memory_gb:g} GB a process;"
        f" {sum(timed) / 60:.0f} minutes of CPU time for {len(timed)} of the models.\n",
        f"**{len(passed)} of {len(rows)} pass ({len(passed) / len(rows):.1%})**, {len(refused)} are refused,"
        f" {len(failed)} fail. {exact} are equal bit for bit;"
        f" {sum(r['dtype'] == 'float32' for r in passed)} are compared in float32.\n",
    ]
    if len(rows) < models:
        parts.append(
            f"The run is not complete: {models - len(rows)} of the zoo's {models} models have no result yet.\n"
        )
    if current < len(rows):
        parts.append(
            f"{len(rows) - current} of the results come from earlier states of the compiler;"
            " `make zoo` runs those anew.\n"
        )
    if refused or failed:
        parts += ["## Not passed\n", "| model | result | code | reason |", "|--|--|--|--|"]
        parts += [f"| {r['name']} | {r['outcome']} | {r['code']} | {_cell(r['reason'])} |" for r in (*failed, *refused)]
        parts.append("")
    for library, group in groupby(rows, key=lambda r: r["name"].partition(":")[0]):
        members = list(group)
        good = sum(r["outcome"] == "pass" for r in members)
        parts += [f"## {library}: {good} of {len(members)}\n", _TABLE]
        parts += [_row(r) for r in members]
        parts.append("")
    return "\n".join(parts)


_TABLE = (
    "| model | parameters | stages | largest difference | compared in | eval | result | |\n|--|--:|--|--:|--|--|--|--|"
)


def _row(row: Mapping[str, Any]) -> str:
    difference = "" if row["difference"] is None else f"{row['difference']:.1e}" if row["difference"] else "0"
    stages = ", ".join(map(str, row["stages"]))
    notes = "; ".join(filter(None, (row["note"], _cell(row["reason"]) if row["outcome"] == "pass" else row["code"])))
    return (
        f"| {row['name'].partition(':')[2]} | {_count(row['parameters'])} | {stages} | {difference} | {row['dtype']}"
        f" | {_cell(row.get('evaluation', ''))} | {row['outcome']} | {notes} |"
    )


def _count(parameters: int) -> str:
    return f"{parameters / 1e6:.1f} M" if parameters >= 1e5 else f"{parameters / 1e3:.0f} k" if parameters else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
