"""``--verify``: one training step of the written stages against one of the user's own model.

1. The original runs on a batch of random values, with every random operator seeded on its own: loss, the gradient of
   every parameter, every buffer afterwards.
2. So do the stages, imported from the plan folder and chained by the plan's ports; a random operator gets the seed
   that it had in the original.
3. If the plan evaluates, both run forward in eval mode too: the loss, and buffers that must stay as they are.
4. In float64 they may differ by 1e-9 of a value's size: they do the same arithmetic, but for the order in which
   gradients are added. A model that cannot run in float64 is held to ten times what one ulp of its input changes, in
   float32.
5. Autocast leaves float64 alone. Under it the loss and the buffers must be the same in float32 as well, where forward
   does the same arithmetic on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.load import LoadedWorkload
from hetpipe_compiler.ir.plan import Plan
from hetpipe_compiler.user_code import USER_ERRORS, first_line, told, user_line
from hetpipe_compiler.verification.original import Original
from hetpipe_compiler.verification.outcome import Difference, Outcome, Reference, largest_difference
from hetpipe_compiler.verification.stages import WrittenStages

#: Allowed in float64, relative to a value's size.
ALLOWED_FLOAT64 = 1e-9
#: Allowed in float32 where one ulp of the input changes nothing: a few roundings.
_LEAST_FLOAT32 = 1e-6


@dataclass(frozen=True)
class Verification:
    """A plan that has been run beside its model.

    Attributes:
        dtype: In which the two were compared.
        difference: The largest.
        allowed: What it may be.
        note: Why not in float64.
    """

    dtype: str
    difference: Difference
    allowed: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.difference.relative <= self.allowed

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return (
            f"verified in {self.dtype}: largest difference {self.difference.relative:.2g}"
            f" ({self.difference.value}), allowed {self.allowed:.2g}{note}"
        )


class Verifier:
    """Holds plans of one workload to its original, which runs once for all of them.

    Args:
        loaded: The workload.
        model: Its model with real weights; it is used up (its dtype changes).
        seed: For the batch and for random operators.

    Raises:
        WorkloadError: HP110 the model raises; HP122 its loss is not finite, or it has no values.
    """

    def __init__(self, loaded: LoadedWorkload, model: torch.nn.Module, seed: int = 0) -> None:
        self._where = str(loaded.path)
        if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
            raise WorkloadError(
                "HP122",
                "cannot be verified: Workload.model() builds a model without values (on the meta device)",
                where=self._where,
                hint="build it on the CPU, or leave out --verify",
            )
        self._seed = seed
        self._original = Original(loaded, model, seed)
        self._cache: dict[tuple[bool, bool], tuple[Reference, int]] = {}
        self._effect: float | None = None
        self._note = ""
        self._first = self._prepare(loaded)

    def _prepare(self, loaded: LoadedWorkload) -> bool:
        """Whether the original runs in float64; its outcome is kept."""
        for wide in (True, False):
            try:
                self._original.widen(wide)
                found = self._original.choose_batch()
            except USER_ERRORS as error:
                if wide:
                    self._note = f"the model does not run in float64: {first_line(error)}"
                    continue
                raise WorkloadError(
                    "HP110",
                    f"the model or its loss raised {told(error)}",
                    where=user_line(error, loaded.path),
                    hint="run one training step on the example in plain PyTorch",
                ) from error
            if not found.finite:
                raise WorkloadError(
                    "HP122",
                    f"cannot be verified: the loss is {float(found.loss)} on the example",
                    where=self._where,
                    hint="give an example batch on which the freshly built model has a finite loss",
                )
            self._cache[wide, False] = Reference(found), self._original.draws
            return wide
        raise AssertionError

    def verify(self, folder: Path, plan: Plan | None = None) -> Verification:
        """Hold a plan folder to the original; all its virtual workers, each distinct partition once.

        Raises:
            WorkloadError: HP120 a value differs, or other random numbers are drawn; HP121 the stages raise.
        """
        plan = plan or Plan.load(folder)
        workers = {tuple(s.module for s in w.stages): w.index for w in plan.virtual_workers}
        found = [self._verify_worker(folder, plan, worker) for worker in workers.values()]
        worst = max(found, key=lambda v: v.difference.relative / v.allowed)
        if not worst.passed:
            raise _refusal(worst, self._where)
        return worst

    def _verify_worker(self, folder: Path, plan: Plan, worker: int) -> Verification:
        note = self._note
        if self._first:
            try:
                difference = self._difference(folder, plan, worker, wide=True)
                if difference.relative <= ALLOWED_FLOAT64:
                    found = Verification("float64", difference, ALLOWED_FLOAT64)
                    return self._under_autocast(folder, plan, worker, found) if self._original.casts else found
                note = f"float64 differs by {difference.relative:.2g} ({difference.value})"
            except WorkloadError as error:
                note = f"the stages do not run in float64: {error.message}"
        # The graph may hold what the model would have chosen otherwise in float64: its own precision decides.
        difference = self._difference(folder, plan, worker, wide=False)
        return Verification("float32", difference, max(10 * self._ulp_effect(), _LEAST_FLOAT32), note)

    def _under_autocast(self, folder: Path, plan: Plan, worker: int, found: Verification) -> Verification:
        """``found`` in float64, unless forward differs in float32."""
        difference = self._difference(folder, plan, worker, wide=False, gradients=False)
        if difference.relative <= _LEAST_FLOAT32:
            return found
        return Verification("float32", difference, _LEAST_FLOAT32, "autocast does nothing in float64")

    def _difference(self, folder: Path, plan: Plan, worker: int, wide: bool, gradients: bool = True) -> Difference:
        """The largest in a training step (``gradients`` or not) and, if the plan evaluates, in a forward pass in eval
        mode."""
        expected = [self._expected(wide, evaluate) for evaluate in ((False, True) if plan.evaluation else (False,))]
        differences = []
        try:
            stages = WrittenStages(folder, plan, worker, self._original.tensors, wide)
            for evaluate, (held, draws) in enumerate(expected):
                found, met = stages.run(self._original.leaves, self._seed, evaluate=bool(evaluate))
                if met != draws:
                    what = f"{draws} in the model, {met} in the stages"
                    difference = Difference("random numbers", float("inf"), what)
                else:
                    complete = _with_unread_buffers(held, found, self._original)
                    difference = largest_difference(held, complete, gradients=gradients)
                mode = " in eval mode" if evaluate else ""
                differences.append(replace(difference, value=difference.value + mode))
        except USER_ERRORS as error:
            raise WorkloadError(
                "HP121",
                f"the stages raised {told(error)}",
                where=self._where,
                hint="please report this with your model; without --verify the plan is written all the same",
            ) from error
        return max(differences, key=lambda d: d.relative)

    def _expected(self, wide: bool, evaluate: bool = False) -> tuple[Reference, int]:
        """What the original does, and how many random operators it meets."""
        self._original.widen(wide)
        if (wide, evaluate) not in self._cache:
            found = self._original.evaluate() if evaluate else self._original.run()
            self._cache[wide, evaluate] = Reference(found), self._original.draws
        return self._cache[wide, evaluate]

    def _ulp_effect(self) -> float:
        """What the smallest change of the input does to the original, in float32."""
        if self._effect is None:
            expected, _ = self._expected(wide=False)
            self._effect = largest_difference(expected, self._original.run_one_ulp_away()).relative
        return self._effect


def _with_unread_buffers(expected: Reference, found: Outcome, original: Original) -> Outcome:
    """No stage has a buffer that nothing reads: it stays what it was."""
    tensors = original.tensors
    absent = {n: tensors[n.removeprefix("buffer ")] for n in expected.kinds if n.startswith("buffer ")}
    return Outcome({**absent, **found.values})


def _refusal(found: Verification, where: str) -> WorkloadError:
    what = found.difference.what or f"differs by {found.difference.relative:.3g}"
    note = f"; {found.note}" if found.note else ""
    return WorkloadError(
        "HP120",
        f"the stages do not compute what the model computes: {found.difference.value}: {what},"
        f" allowed {found.allowed:.2g} in {found.dtype}{note}",
        where=where,
        hint="no plan is written; please report this with your model",
    )
