"""Stages run forward only give the eval loss of the model itself.

All kinds of `models` are held to it in codegen/test_model_kinds.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import MODELS, chained_in_eval, cluster_of, compile_kind, eager_in_eval, load_stage

from hetpipe_compiler.compiler import CompileOptions, compile
from hetpipe_compiler.errors import RunError
from hetpipe_compiler.frontend.load import load_workload
from hetpipe_compiler.ir.plan import Plan
from hetpipe_compiler.runtime.forward_only import ForwardOnly, evaluate

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL: dict[str, dict[str, Any]] = {
    "digits": {"batch_size": 4},
    "gpt2": {"batch_size": 2, "seq_len": 16, "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 300},
    "resnet152": {"batch_size": 2, "image_size": 32, "num_classes": 10, "images": 4},
    "vgg19": {"batch_size": 2, "image_size": 32, "num_classes": 10, "images": 4},
}


@pytest.mark.parametrize("name", SMALL)
def test_examples_evaluate_as_the_model_does(name: str, tmp_path: Path) -> None:
    path = EXAMPLES / name / "model.py"
    options = CompileOptions(policy="NP", nm=1)
    plan = compile(path, cluster_of(1), tmp_path / "out", settings=SMALL[name], options=options).plan
    assert plan.evaluation, plan.evaluation_note
    loaded = load_workload(path, SMALL[name])
    expected = eager_in_eval(loaded)
    torch.testing.assert_close(chained_in_eval(tmp_path / "out", loaded, 0), expected, rtol=1e-5, atol=1e-6)


def test_stages_change_their_mode(tmp_path: Path) -> None:
    options = CompileOptions(policy="NP", nm=1, splits=(("head",),))
    cluster = cluster_of(1)
    plan = compile(MODELS, cluster, tmp_path / "out", settings={"name": "BNConvNet"}, options=options).plan
    stage = load_stage(tmp_path / "out", str(plan.virtual_workers[0].stages[0].module))
    for buffer in stage.buffers():
        buffer.zero_() if buffer.dtype is torch.int64 else buffer.fill_(1.0)
    for parameter in stage.parameters():
        torch.nn.init.ones_(parameter)
    before = {name: buffer.clone() for name, buffer in stage.named_buffers()}
    batch = load_workload(MODELS, {"name": "BNConvNet"}).workload.example_batch()
    first = stage.eval()(*batch)
    assert all(torch.equal(before[name], buffer) for name, buffer in stage.named_buffers())
    trained = stage.train()(*batch)
    assert int(stage.bn1.num_batches_tracked) == 1
    assert not torch.equal(before["bn1.running_mean"], stage.bn1.running_mean)
    assert any(not torch.equal(a, b) for a, b in zip(first, trained, strict=True))


def test_other_weights_and_a_plan_that_does_not_evaluate(tmp_path: Path) -> None:
    folder, loaded, plan = compile_kind("BNConvNet", tmp_path / "out", most=1)
    model = loaded.workload.model()
    batch = loaded.workload.example_batch()
    found = evaluate(folder, batch, weights=model.state_dict())
    loss = loaded.workload.loss
    assert loss is not None
    expected = loss(model.eval()(batch[0]), batch[1])
    assert found == pytest.approx(expected.item(), rel=1e-6)
    refusing = plan.model_copy(update={"evaluation": False, "evaluation_note": "it branches (model.py:3)"})
    (folder / "plan.json").write_text(refusing.to_json())
    with pytest.raises(RunError, match=r"it branches \(model.py:3\)") as caught:
        ForwardOnly(folder)
    assert caught.value.code == "HP520"
    with pytest.raises(RunError) as caught:
        ForwardOnly(folder, Plan.model_validate({**plan.model_dump(), "weights": False}))
    assert caught.value.code == "HP513"


def test_a_plan_says_at_which_line_the_modes_part(tmp_path: Path) -> None:
    model = Path(__file__).parents[1] / "golden" / "explained_model.py"
    options = CompileOptions(policy="NP", nm=1)
    plan = compile(model, cluster_of(1), tmp_path / "out", options=options).plan
    line = next(at for at, text in enumerate(model.read_text().splitlines(), 1) if "h.tanh()" in text)
    place = f"(aten.tanh.default at explained_model.py:{line})"
    assert plan.evaluation_note == f"the model computes something else in eval mode {place}"
    assert not plan.evaluation
    assert Plan.load(tmp_path / "out") == plan
