"""The ONNX file: valid, each node on its stage in every partition, and the same loss as the stage modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import handmade_folder
import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from safetensors.torch import load_file

from hetpipe_compiler.codegen.graph_file import load_graph
from hetpipe_compiler.codegen.onnx import write_onnx
from hetpipe_compiler.codegen.stage_chain import StageChain, node_lines
from hetpipe_compiler.errors import ArtifactError
from hetpipe_compiler.ir.plan import Plan


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan, onnx.ModelProto]:
    folder = tmp_path_factory.mktemp("plan") / "out"
    plan = handmade_folder.write_folder(folder, ratio=0.0)
    path = folder.parent / "tiny.onnx"
    write_onnx(plan, folder, load_graph(folder), path)
    return folder, plan, onnx.load(str(path))


def facts(node: onnx.NodeProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in node.metadata_props}


def model_facts(model: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.metadata_props}


def stages(model: onnx.ModelProto, configuration: str) -> dict[str, set[int]]:
    """fx node -> stages of the ONNX nodes that it became."""
    found: dict[str, set[int]] = {}
    for node in model.graph.node:
        name = facts(node)["hetpipe.node"]
        for entry in node.device_configurations:
            if entry.configuration_id == configuration:
                found.setdefault(name, set()).add(entry.pipeline_stage)
    return found


def test_each_distinct_partition_is_a_configuration(exported: tuple[Path, Plan, onnx.ModelProto]) -> None:
    _, _, model = exported
    found = [(c.name, c.num_devices, list(c.device)) for c in model.configuration]
    assert found == [("virtual workers 0-1", 2, ["n0:0", "n1:0"]), ("virtual worker 2", 2, ["n0:2", "n1:2"])]
    assert model.ir_version >= 11


def test_every_node_carries_the_stage_of_every_partition(exported: tuple[Path, Plan, onnx.ModelProto]) -> None:
    _, plan, model = exported
    for worker, name in (
        (plan.virtual_workers[0], "virtual workers 0-1"),
        (plan.virtual_workers[2], "virtual worker 2"),
    ):
        where = stages(model, name)
        expected = {node: {stage.index} for stage in worker.stages for node in stage.nodes if node in where}
        assert where == expected
        # The counter's in-place update has no output, and dropout of nothing is nothing.
        assert set(where) == set(handmade_folder.NODES) - {"x", "y", "add_", "dropout"}
    assert model_facts(model)["hetpipe.without_node"] == "add_, dropout"


def test_costs_add_up_and_places_are_the_user_s(exported: tuple[Path, Plan, onnx.ModelProto]) -> None:
    _, _, model = exported
    total = sum(float(facts(node).get("hetpipe.forward_ms.titan-v", 0)) for node in model.graph.node)
    assert total == pytest.approx(1.5 * 9)
    conv = next(node for node in model.graph.node if node.op_type == "Conv")
    assert facts(conv)["hetpipe.module"] == "conv"
    assert facts(conv)["hetpipe.source"] == "model.py:12"
    assert facts(conv)["hetpipe.backward_ms.rtx-2060"] == "6"


def test_no_path_of_this_machine_is_in_the_file(exported: tuple[Path, Plan, onnx.ModelProto]) -> None:
    folder, _, model = exported
    text = str(model)
    assert str(folder) not in text
    assert str(Path(torch.__file__).parent) not in text
    assert "pkg.torch" not in text


def test_the_loss_equals_that_of_the_stage_modules(exported: tuple[Path, Plan, onnx.ModelProto]) -> None:
    folder, plan, model = exported
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(2, 3, 8, 8, generator=generator), torch.tensor([1, 7])
    chain = StageChain(plan.virtual_workers[0], folder)
    weights = {**load_file(folder / "weights.safetensors"), **load_file(folder / "constants.safetensors")}
    for stage in chain.children():
        own = dict([*stage.named_parameters(), *stage.named_buffers()])
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(weights[name])
    (expected,) = chain(x, y)
    found = ReferenceEvaluator(model).run(["add"], {"x": x.numpy(), "y": y.numpy()})
    assert 0.1 < expected.item() < 10
    np.testing.assert_allclose(found[0], expected.detach().numpy(), rtol=1e-5)


def test_buffer_updates_are_named_as_left_out(exported: tuple[Path, Plan, onnx.ModelProto]) -> None:
    _, _, model = exported
    note = model_facts(model)["hetpipe.not_exported"]
    assert all(f"bn.{name}" in note for name in ("running_mean", "running_var", "num_batches_tracked"))


def test_initialisers_have_the_model_s_names(exported: tuple[Path, Plan, onnx.ModelProto]) -> None:
    _, _, model = exported
    names = {tensor.name for tensor in model.graph.initializer}
    assert names == {*handmade_folder.weights(), "scale"} - {"bn.num_batches_tracked"}
    assert [value.name for value in model.graph.input] == ["x", "y"]


def test_large_weights_stay_outside_the_file(exported: tuple[Path, Plan, onnx.ModelProto], tmp_path: Path) -> None:
    folder, plan, embedded = exported
    graph = load_graph(folder)
    write_onnx(plan, folder, graph, tmp_path / "tiny.onnx", vw=0, embed_limit_bytes=0)
    write_onnx(plan, folder, graph, folder / "tiny.onnx", vw=0, embed_limit_bytes=0)
    assert (tmp_path / "tiny.onnx.data").is_file()
    # In the plan folder itself the weights are there already.
    assert not (folder / "tiny.onnx.data").exists()
    for path in (tmp_path / "tiny.onnx", folder / "tiny.onnx"):
        model: Any = onnx.load(str(path))
        assert [c.name for c in model.configuration] == ["virtual worker 0"]
        for outside, inside in zip(model.graph.initializer, embedded.graph.initializer, strict=True):
            np.testing.assert_array_equal(onnx.numpy_helper.to_array(outside), onnx.numpy_helper.to_array(inside))


def test_without_weights_they_are_inputs_and_dropout_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("out")  # relative, as people type it
    plan = handmade_folder.write_folder(folder, ratio=0.25, with_weights=False)
    write_onnx(plan, folder, load_graph(folder), Path("tiny.onnx"))
    model = onnx.load(str(tmp_path / "tiny.onnx"))
    assert all("hetpipe.node" in facts(node) for node in model.graph.node)
    assert "fc.weight" in {value.name for value in model.graph.input}
    assert {tensor.name for tensor in model.graph.initializer} == {"scale"}
    values = {n.output[0]: n.attribute[0].t for n in model.graph.node if n.op_type == "Constant"}
    dropout = next(node for node in model.graph.node if node.op_type == "Dropout")
    ratio, training = (onnx.numpy_helper.to_array(values[name]).item() for name in dropout.input[1:])
    assert (ratio, training) == (0.25, True)


def test_an_operator_without_onnx_form_is_named(tmp_path: Path) -> None:
    odd = handmade_folder.STAGE1.replace(
        "aten.sum.default(conv_bias)", "aten.igamma.default(conv_bias, conv_bias).sum()"
    )
    plan = handmade_folder.write_folder(tmp_path / "out", stage1=odd)
    with pytest.raises(ArtifactError, match="igamma") as caught:
        write_onnx(plan, tmp_path / "out", (), tmp_path / "tiny.onnx")
    assert caught.value.code == "HP447"
    assert not (tmp_path / "tiny.onnx").exists()


def test_a_stage_that_cannot_be_captured_is_refused(tmp_path: Path) -> None:
    odd = handmade_folder.STAGE1.replace("return (add,)", "return (add * float(add),)")
    plan = handmade_folder.write_folder(tmp_path / "out", stage1=odd)
    with pytest.raises(ArtifactError) as caught:
        write_onnx(plan, tmp_path / "out", (), tmp_path / "tiny.onnx")
    assert caught.value.code == "HP446"


def test_missing_stage_modules_and_weights_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    plan = handmade_folder.write_folder(folder)
    (folder / "weights.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"no weight 'conv\.weight'") as caught:
        write_onnx(plan, folder, (), tmp_path / "tiny.onnx")
    assert caught.value.code == "HP445"
    (folder / "weights.safetensors").write_bytes(b"\x10" + 7 * b"\0" + b"{ half a header")
    with pytest.raises(ArtifactError, match="cannot be read: JSONDecodeError") as caught:
        write_onnx(plan, folder, (), tmp_path / "tiny.onnx")
    assert caught.value.code == "HP445"
    (folder / "stages/a_stage1.py").write_text("def (")
    with pytest.raises(ArtifactError, match="SyntaxError") as caught:
        write_onnx(plan, folder, (), tmp_path / "tiny.onnx")
    assert caught.value.code == "HP415"
    (folder / "stages/a_stage1.py").unlink()
    with pytest.raises(ArtifactError, match="stage 1's module is missing"):
        write_onnx(plan, folder, (), tmp_path / "tiny.onnx")


def test_lines_of_regions_belong_to_their_call(tmp_path: Path) -> None:
    path = tmp_path / "stage.py"
    path.write_text(
        "class Stage:\n"
        "    def forward(self, x):\n"
        "        with region():\n"
        "            wrap = self._submod(x)\n"
        "        a = f(\n"
        "            wrap\n"
        "        );  wrap = None\n"
        "        return (a,)\n"
        "    def _submod(self, x):\n"
        "        a = g(x)\n"
    )
    assert node_lines(path) == {4: "wrap", 5: "a", 6: "a", 7: "a"}
