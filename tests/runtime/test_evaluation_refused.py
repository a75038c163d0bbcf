"""What keeps an evaluation from starting: the whole messages, as golden text; nothing is written, nothing started."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from toy import Network
from toy_run import write_runnable

from hetpipe_compiler.errors import HetpipeError
from hetpipe_compiler.frontend.load import load_workload
from hetpipe_compiler.ir.plan import Plan
from hetpipe_compiler.runtime.run_evaluation import prepare_evaluation
from hetpipe_compiler.runtime.run_options import RunOptions
from hetpipe_compiler.runtime.trained import load_trained, unsaved_buffers

GOLDEN = Path(__file__).parents[1] / "golden" / "evaluate_errors.txt"
X, Y = "torch.zeros({0}, 8)", "torch.zeros({0}, dtype=torch.int64)"
WHOLE, SHORT = (f"({X}, {Y})".format(size) for size in (6, 4))


class Toy:
    """A plan of two stages that runs in eval mode, its weights, and how they are changed."""

    def __init__(self, folder: Path) -> None:
        self.plan_folder, self.run, self.weights = folder / "plan", folder / "run", folder / "trained.safetensors"
        write_runnable(self.plan_folder, Network(norm=True), cuts=((2,),), in_flight=((2, 1),))
        self.edit_plan(evaluation=True)
        self.values = load_file(self.plan_folder / "weights.safetensors")
        self.data(f"[{WHOLE}, {SHORT}]")

    def edit_plan(self, **changes: Any) -> None:
        plan = Plan.load(self.plan_folder).model_copy(update=changes)
        (self.plan_folder / "plan.json").write_text(plan.to_json())

    def fix_batch_size(self) -> None:
        self.edit_plan(dynamic_batch=False, dynamic_batch_note="it says so")
        text = Plan.load(self.plan_folder).model_dump_json()
        (self.plan_folder / "plan.json").write_text(Plan.model_validate_json(text.replace('"s0"', "6")).to_json())

    def data(self, value: str | None) -> None:
        """``evaluation_data`` returns this expression."""
        text = (self.plan_folder / "model.py").read_text().partition("\n_workload")[0]
        if value is not None:
            text += "\n_workload = workload\ndef workload():\n    import dataclasses\n"
            text += f"    return dataclasses.replace(_workload(), evaluation_data=lambda: {value})\n"
        (self.plan_folder / "model.py").write_text(text)

    def prepare(self, **options: Any) -> tuple[Any, str]:
        """What would start, or the error; and what was printed, without the warning of an edited model.py."""
        save_file(self.values, self.weights)
        out = io.StringIO()
        wanted = {"evaluate": self.weights, **options}
        try:
            found: Any = prepare_evaluation(
                RunOptions(self.plan_folder, self.run, **wanted), Console(file=out, width=200)
            )
        except HetpipeError as error:
            found = error
        return found, "".join(f"{line}\n" for line in out.getvalue().splitlines() if "edited it" not in line)


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path)


def misshapen(toy: Toy) -> None:
    toy.values["fc3.weight"] = torch.zeros(3, 4)


def other_dtype(toy: Toy) -> None:
    toy.values["bn.num_batches_tracked"] = torch.tensor(1.0)


def short_last(data: str) -> Callable[[Toy], None]:
    def change(toy: Toy) -> None:
        toy.fix_batch_size()
        toy.data(data)

    return change


CASES: dict[str, tuple[Callable[[Toy], None], dict[str, Any]]] = {
    "no evaluation data": (lambda toy: toy.data(None), {}),
    "no batches": (lambda toy: toy.data("[]"), {}),
    "no iterable": (lambda toy: toy.data("5"), {}),
    "it raises": (lambda toy: toy.data("1 / 0"), {}),
    "fixed batch size, and only a short batch": (short_last(f"[{SHORT}]"), {}),
    "a plan for training only": (
        lambda toy: toy.edit_plan(evaluation=False, evaluation_note="it branches (model.py:3)"),
        {},
    ),
    "a weight is missing": (lambda toy: toy.values.pop("fc3.weight"), {}),
    "a weight has another shape": (misshapen, {}),
    "a buffer has another dtype": (other_dtype, {}),
    "no weights file": (lambda _: None, {"evaluate": Path("nowhere.safetensors")}),
    "no safetensors file": (lambda _: None, {"evaluate": Path(__file__)}),
    "a folder of weights": (lambda _: None, {"evaluate": Path(__file__).parent}),
    "no such virtual worker": (lambda _: None, {"vw": 1}),
    "an option of training": (lambda _: None, {"save_every": 2}),
    "the interpreter": (lambda _: None, {"interpret": True}),
}


def test_the_messages(tmp_path: Path) -> None:
    text = ""
    for at, (name, (change, options)) in enumerate(CASES.items()):
        toy = Toy(tmp_path / str(at))
        change(toy)
        found, printed = toy.prepare(**options)
        assert isinstance(found, HetpipeError), name
        assert not toy.run.exists(), name
        text += f"# {name}\n{printed}{found}\n\n"
        text = text.replace(f"{tmp_path / str(at)}/", "").replace(str(Path(__file__).parent), "tests")
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_a_short_last_batch_counts_where_the_batch_size_is_free(toy: Toy) -> None:
    found, printed = toy.prepare()
    assert (found.job.minibatches, found.job.evaluates, printed) == (2, 0, "")


def test_a_short_last_batch_is_left_out_with_a_word_where_it_is_fixed(toy: Toy) -> None:
    toy.fix_batch_size()
    toy.data(f"iter([{WHOLE}, {WHOLE}, {SHORT}])")
    found, printed = toy.prepare()
    assert found.job.minibatches == 2
    told = "the last batch has 4 samples and is left out: the plan's batch size is fixed at 6 (it says so)\n"
    assert printed == told


def test_values_that_the_model_has_not_are_told(toy: Toy) -> None:
    toy.values |= {"extra.a": torch.zeros(1), "extra.b": torch.zeros(1)}
    _, printed = toy.prepare()
    assert printed == f"{toy.weights} has values that the model has not, which are not used: extra.a and 1 more\n"


def test_a_tied_weight_may_stand_under_its_other_name(toy: Toy) -> None:
    plan = Plan.load(toy.plan_folder)
    aliased = [
        p.model_copy(update={"aliases": ("other.name",)} if p.name == "fc0.weight" else {}) for p in plan.parameters
    ]
    toy.edit_plan(parameters=tuple(aliased))
    toy.values["other.name"] = toy.values.pop("fc0.weight")
    found, printed = toy.prepare()
    assert printed == ""
    values = load_trained(found.plan, found.plan.worker(0).stages[0], toy.weights, None)
    assert torch.equal(values["fc0.weight"], toy.values["other.name"])
    assert set(values) == {*found.plan.worker(0).stages[0].parameters, *found.plan.worker(0).stages[0].buffers}


def test_buffers_that_are_not_saved_come_from_the_plan_or_from_a_model(toy: Toy) -> None:
    plan = Plan.load(toy.plan_folder)
    own = {"bn.running_mean", "bn.running_var"}
    toy.edit_plan(buffers=tuple(b.model_copy(update={"persistent": b.name not in own}) for b in plan.buffers))
    for name in own:
        toy.values.pop(name)
    found, _ = toy.prepare()
    assert found.job.unsaved_buffers == toy.plan_folder / "weights.safetensors"
    toy.edit_plan(weights=False)
    plan, worker = Plan.load(toy.plan_folder), Plan.load(toy.plan_folder).worker(0)
    path = unsaved_buffers(plan, worker, toy.plan_folder, load_workload(toy.plan_folder / "model.py"), toy.run)
    assert path is not None
    assert set(load_file(path)) == own
    (stage,) = [stage for stage in worker.stages if own <= set(stage.buffers)]
    assert own <= set(load_trained(plan, stage, toy.weights, path))
