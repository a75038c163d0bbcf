"""The evaluation data of a workload: how many minibatches it has, and their leaves, in order.

Everything here draws from the run's seed only, so that the launcher, which counts, and stage 0 see the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from hetpipe_compiler.codegen.quantities import counted
from hetpipe_compiler.errors import RunError
from hetpipe_compiler.runtime.batch_form import BatchForm
from hetpipe_compiler.runtime.batches import counted_aloud, length_of, yields_nothing
from hetpipe_compiler.runtime.randomness import data_seed, epoch_seed, seed_everything
from hetpipe_compiler.user_code import telling

if TYPE_CHECKING:
    from hetpipe_compiler.frontend.load import LoadedWorkload
    from hetpipe_compiler.ir.plan import Plan

CALL = "evaluation_data()"


def evaluation_minibatches(
    plan: Plan, vw: int, workload: LoadedWorkload, seed: int, on_note: Callable[[str], None]
) -> int:
    """How many minibatches an evaluation has.

    ``len()`` of what ``evaluation_data`` returns where it has one, else its batches are counted once. Where the plan's
    batch size is fixed they are always gone through: if the last one is smaller, it is left out, and ``on_note`` told.

    Raises:
        RunError: HP515 no batches, or none that is whole; HP516 a last one of another form; HP517 ``evaluation_data``
            raises, or returns what yields nothing; HP522 the workload has none.
    """
    last: Any = None
    hint = "call it once in plain Python: for batch in evaluation_data()"
    with telling(RunError, "HP517", f"{CALL} raised", workload.path, hint=hint):
        batches = _open(workload, seed)
        count = length_of(batches) if plan.dynamic_batch else None
        if count is None:
            count = 0
            for count, last in enumerate(counted_aloud(batches, CALL, on_note, "it must have an end"), 1):  # noqa: B007
                pass
    if count and not plan.dynamic_batch:
        form = BatchForm(plan, vw, workload.workload.example_batch(), CALL)
        samples = form.samples_too_few(last, "the last batch of the evaluation data")
        if samples is not None:
            count -= 1
            on_note(
                f"the last batch has {counted(samples, 'sample')} and is left out:"
                f" the plan's batch size is fixed at {plan.batch_size} ({plan.dynamic_batch_note})"
            )
    if not count:
        raise RunError(
            "HP515",
            f"{CALL} yields no {'batches' if last is None else 'whole batch'}",
            where=str(workload.path),
            hint="it needs at least one",
        )
    return count


def no_samples(workload: LoadedWorkload) -> RunError:
    """HP515 for evaluation data whose batches are all empty."""
    return RunError(
        "HP515",
        f"the batches of {CALL} have no samples: there is no loss to tell",
        where=str(workload.path),
        hint="it needs at least one",
    )


class EvaluationBatches:
    """minibatch (from 1) -> the leaves of its batch, in ``tree_flatten`` order. Ask in order, each once.

    Args:
        minibatches: What `evaluation_minibatches` says.
        samples: Told the samples of each: ``(minibatch, samples)``.

    Raises:
        RunError: HP516 a batch that is not what the plan was made for; HP517 not as many batches as counted.
    """

    def __init__(
        self,
        plan: Plan,
        vw: int,
        workload: LoadedWorkload,
        seed: int,
        minibatches: int,
        samples: Callable[[int, int], None],
    ) -> None:
        self._workload, self._seed, self._minibatches, self._samples = workload, seed, minibatches, samples
        self._form = BatchForm(plan, vw, workload.workload.example_batch(), CALL)
        self._whole = plan.dynamic_batch
        self._iterator: Iterator[Any] = iter(_open(workload, seed))

    def __call__(self, minibatch: int) -> list[Any]:
        """The leaves of a minibatch's batch."""
        seed_everything(data_seed(self._seed, 0, minibatch))
        missing = object()
        batch = next(self._iterator, missing)
        if batch is missing:
            raise self._other_count(f"only {minibatch - 1}")
        leaves = self._form.leaves(batch, f"batch {minibatch} of the evaluation data")
        if minibatch == self._minibatches and self._whole and next(self._iterator, missing) is not missing:
            raise self._other_count("more")
        self._samples(minibatch, self._form.samples(leaves))
        return leaves

    def _other_count(self, came: str) -> RunError:
        return RunError(
            "HP517",
            f"{CALL} should yield {counted(self._minibatches, 'batch')}, but {came} came",
            where=str(self._workload.path),
            hint="it must yield the same batches each time, and as many as its len() says",
        )


def _open(workload: LoadedWorkload, seed: int) -> Any:
    """What ``evaluation_data`` returns; raises `RunError` HP517, HP522."""
    make = workload.workload.evaluation_data
    if make is None:
        raise RunError(
            "HP522",
            "the workload has no evaluation_data",
            where=str(workload.path),
            hint="give Workload(..., evaluation_data=...), a function that returns batches in the example's form;"
            " --workload MODEL.py takes it without compiling again",
        )
    seed_everything(epoch_seed(seed, 0))
    batches = make()
    if not hasattr(batches, "__iter__"):
        raise yields_nothing(CALL, batches, workload)
    return batches
