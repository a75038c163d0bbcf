"""Random models: a list of steps, each a name and three numbers. Any list is a model, so shrinking leaves out steps."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from random_models import steps, steps_memory, steps_more
from random_models.program import Program
from random_models.steps import Step

#: Steps by name, the plainest first; how often each comes.
_WEIGHTS: tuple[tuple[Step, int], ...] = (
    (steps.unary, 4), (steps.submodule, 7), (steps.binary, 5), (steps.embedding, 3), (steps.again, 3),
    (steps_memory.view, 7), (steps_memory.write, 5), (steps_memory.write_part, 4), (steps_memory.write_value, 4),
    (steps.maybe_alias, 3), (steps.parameter, 2), (steps.reduction, 2), (steps.mixing, 3), (steps.integers, 3),
    (steps.masking, 2), (steps.size, 2), (steps.constant, 3), (steps.noise, 2), (steps_memory.buffer, 4),
    (steps.tied_head, 2), (steps.grad_mode, 2), (steps.training_only, 1), (steps.recomputed, 1), (steps.optional, 1),
    (steps_memory.write_integers, 2), (steps.cast, 1), (steps.refused, 1),
)  # fmt: skip
#: The rarer kinds, drawn among the plain ones.
_RARE: tuple[tuple[Step, int], ...] = (
    (steps_more.same_shape, 12), (steps_more.on_last, 14), (steps_more.sequence, 6), (steps_more.pool, 3),
    (steps_more.assigned, 5), (steps_more.shared_buffer, 2), (steps_more.by_labels, 2), (steps_more.indexed, 6),
)  # fmt: skip
_STEPS = {step.__name__: step for step, _ in (*_WEIGHTS, *_RARE)}
_NAMES = [step.__name__ for step, weight in _WEIGHTS for _ in range(weight)]
_NAMES_WITH_RARE = _NAMES + [step.__name__ for step, weight in _RARE for _ in range(weight)]

_number = st.integers(0, 15)


@dataclass(frozen=True)
class Drawn:
    """A model's file, with what may be refused in it.

    Attributes:
        casts: It has an autocast region.
    """

    text: str
    refusable: frozenset[str]
    casts: bool

    def __repr__(self) -> str:
        return f"a model:\n{self.text[self.text.index('class Net') :]}"


@dataclass(frozen=True)
class DrawnCut:
    """How a model is cut: ``order`` seeds the order of its components (0: their own); where stages begin."""

    order: int
    starts: tuple[int, ...]


def models(most: int = 26, *, rare: bool = False) -> st.SearchStrategy[Drawn]:
    """Models of up to ``most`` steps. ``rare``: also of the rarer kinds."""
    step = st.tuples(st.sampled_from(_NAMES_WITH_RARE if rare else _NAMES), _number, _number, _number)
    # By themselves lists stay short.
    taken = st.lists(step, min_size=1, max_size=most // 2) | st.lists(step, min_size=most // 2, max_size=most)
    return st.builds(build, taken, st.booleans(), st.lists(_number, max_size=2))


def cuts() -> st.SearchStrategy[list[DrawnCut]]:
    """One to four cuts into 1 to 4 stages."""
    starts = st.lists(st.integers(0, 1 << 12), max_size=3).map(tuple)
    return st.lists(st.builds(DrawnCut, st.integers(0, 1 << 12), starts), min_size=1, max_size=4)


def build(taken: list[tuple[str, int, int, int]], nested: bool, terms: list[int]) -> Drawn:
    """The model that these steps make; ``terms``: which values its loss sums up."""
    program = Program(nested)
    for name, a, b, c in taken:
        _STEPS[name](program, a, b, c)
        program.step_done()
    text = program.finish(terms)
    return Drawn(text, frozenset(program.refusable), program.casts)
