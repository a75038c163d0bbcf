"""Any model, cut at any legal place, computes what it computes whole; or it is refused with a code that says why.

A failure prints the shrunk model as a file: save it as model.py to look into it. The slow test tries 2500 models
and 1000 more with rarer steps, in parts that each draw from a seed of their own: ``-m slow -k rare03`` runs one again.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, event, example, given, seed, settings
from random_models.check import compiled, load, verified
from random_models.strategy import Drawn, DrawnCut, build, cuts, models
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from hetpipe_compiler.errors import HetpipeError
from hetpipe_compiler.frontend.construct import build_real
from hetpipe_compiler.frontend.load import LoadedWorkload
from hetpipe_compiler.frontend.training_step import TrainingStep

#: The slow test: so many models a part, and the parts with plain steps and with rare ones among them.
_MODELS_A_PART = 100
_PARTS = [f"plain{n:02}" for n in range(1, 26)] + [f"rare{n:02}" for n in range(1, 11)]

_SETTINGS = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("random")


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)
    _forget_models()


def _runs(loaded: LoadedWorkload) -> bool:
    """Whether plain PyTorch runs the model forward and backward, to a finite loss."""
    step = TrainingStep(loaded.workload, build_real(loaded, 0), loaded.workload.example_batch()).train()
    try:
        loss = step(
            *(v.clone() for v in pytree.tree_leaves(loaded.workload.example_batch()) if isinstance(v, torch.Tensor))
        )
        loss.backward()
    except (RuntimeError, IndexError) as error:
        event(f"not valid in eager: {str(error).splitlines()[0][:120]}")
        return False
    return bool(torch.isfinite(loss))


def _forget_models() -> None:
    """Have torch forget what operators do on fake tensors of models that are gone: some 1.7 MB a model.

    What it knows of sizes that are free lies in each model's own `ShapeEnv`, which torch does not let go of.
    """
    FakeTensorMode.cache_clear()
    for left in gc.get_objects():
        if type(left) is ShapeEnv:
            left.fake_tensor_cache.clear()


def check(drawn: Drawn, where: list[DrawnCut], place: Path) -> None:
    """The property; a model that is no model in plain PyTorch is passed over."""
    torch.set_default_dtype(torch.float32 if drawn.casts else torch.float64)
    loaded = load(drawn.text, place)
    if not _runs(loaded):
        hypothesis.reject()
    folder = place / f"{loaded.path.stem}_plan"
    try:
        plan = compiled(loaded, where, folder)
        found = verified(loaded, folder, plan)
    except HetpipeError as error:
        if error.code not in drawn.refusable:
            raise
        event(f"refused: {error.code}")
        return
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        loaded.path.unlink()
    event("evaluates" if plan.evaluation else f"does not evaluate: {str(plan.evaluation_note)[:60]}")
    event("any batch" if plan.dynamic_batch else f"fixed batch: {str(plan.dynamic_batch_note)[:100]}")
    assert found.dtype == "float64", found


#: A dropout whose result nobody reads, in a stage that runs it after later ones.
_UNREAD = [
    ("submodule", 10, 15, 9), ("maybe_alias", 11, 5, 10), ("view", 7, 10, 1), ("maybe_alias", 10, 12, 6),
    ("submodule", 7, 15, 7),
]  # fmt: skip


@settings(_SETTINGS, max_examples=25)
@given(models(12), cuts())
@example(build(_UNREAD, True, [5, 13]), [DrawnCut(3207, (202,))])
def test_a_random_model_cut_anywhere(place: Path, drawn: Drawn, where: list[DrawnCut]) -> None:
    check(drawn, where, place)


@settings(_SETTINGS, max_examples=8)
@given(models(12, rare=True), cuts())
def test_a_random_model_with_rarer_steps_cut_anywhere(place: Path, drawn: Drawn, where: list[DrawnCut]) -> None:
    check(drawn, where, place)


@pytest.mark.slow
@pytest.mark.parametrize("part", _PARTS)
def test_many_random_models_cut_anywhere(place: Path, part: str) -> None:
    tried = 0

    @seed(int(part[-2:]))
    @settings(_SETTINGS, max_examples=_MODELS_A_PART)
    @given(models(rare=part.startswith("rare")), cuts())
    def holds(drawn: Drawn, where: list[DrawnCut]) -> None:
        nonlocal tried
        check(drawn, where, place)
        tried += 1

    holds()
    assert tried == _MODELS_A_PART
