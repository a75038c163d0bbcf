"""Every error that a user can cause, one tree.

::

    HetpipeError                     exit status 2
     ├── WorkloadError      HP1xx    model.py cannot be loaded, captured or verified
     ├── ClusterError       HP2xx    the cluster, groups or profile file is wrong
     ├── PlanningError      HP3xx    no plan exists under these constraints
     ├── ArtifactError      HP4xx    a plan folder is missing, stale or damaged
     └── RunError           HP5xx    training cannot start, or a process of it died

An error says four things: a stable code, the place, what is wrong (with the amount), and the next thing to try.
``assert`` and other exceptions are for our own bugs; the command line turns those into exit status 1.
"""

from __future__ import annotations


class HetpipeError(Exception):
    """Base of the tree.

    Args:
        code: Stable identifier such as ``HP201``; ``docs/errors.md`` lists them all.
        message: What is wrong, with the amount and its unit where there is one.
        where: The place: a file with its line, a path inside a YAML file, a device, a process.
        hint: The next thing to try.
    """

    def __init__(self, code: str, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        text = f"error[{self.code}]: {place}{self.message}"
        return f"{text}\n  next: {self.hint}" if self.hint else text


class WorkloadError(HetpipeError):
    """model.py cannot be loaded, captured or verified (HP1xx)."""


class ClusterError(HetpipeError):
    """The cluster, groups or profile file is wrong (HP2xx)."""


class PlanningError(HetpipeError):
    """No plan exists under these constraints (HP3xx)."""


class ArtifactError(HetpipeError):
    """A plan folder is missing, stale or damaged (HP4xx)."""


class RunError(HetpipeError):
    """Training cannot start, or a process of it died (HP5xx)."""
