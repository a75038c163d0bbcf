"""Cases of ../shared/cases.md that no row stands against, and why."""

from __future__ import annotations

#: Case -> why there is no rule to take out.
ELSEWHERE = {
    "S8": "more devices than blocks are left over by the exact search itself, compiled code: test_partition.py holds it"
    " to brute force",
    "V9": "nothing to take out: a receive allocates its tensor, and hooks on values are refused (a row)",
    "R8": "gradients are never clipped: an optimizer sees its stage's parameters only (docs/troubleshooting.md)",
    "C2": "runs do not resume; weights are saved under the model's own names, whatever the stages (rows of C1)",
    "C4": "runs do not resume, so no scheduler's state is restored",
    "C5": "no stage saves: the launcher asks the servers, which hold everything",
}
