"""The emitted Python: as people read it, and as a module that needs nothing but torch."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import captured
from kinds import cluster_of, compile_kind, load_stage
from torch import Tensor

from hetpipe_compiler.codegen.stage_cut import cut_stages
from hetpipe_compiler.codegen.stage_module import emit_stage
from hetpipe_compiler.compiler import CompileOptions, compile
from hetpipe_compiler.passes.annotate_cost import count_costs
from hetpipe_compiler.passes.coarsen import build_chain
from hetpipe_compiler.passes.fuse_atomic import fuse_atomic
from hetpipe_compiler.passes.normalize import normalize

GOLDEN = Path(__file__).parents[1] / "golden"


def whole(then: Any) -> str:
    """The forward of the only stage of a `graphs.Body`."""
    graph = normalize(captured(then))
    costs = count_costs(graph)
    chain = build_chain(graph, costs, fuse_atomic(graph).nodes, (), name="m", optimizer_factor=0.0)
    (cut,) = cut_stages(graph, costs, chain, [(0, len(chain))])
    text = emit_stage(cut, model="m", stages=1, root=Path(__file__).parent)
    return text[text.index("def forward") :]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder, _, plan = compile_kind("TiedLM", tmp_path_factory.mktemp("plan") / "out", most=1)
    return folder, plan.virtual_workers[-1]


def test_golden(tmp_path: Path) -> None:
    """Rewrite with: UPDATE_GOLDEN=1 pytest tests/codegen/test_stage_module.py"""
    options = CompileOptions(policy="NP", nm=1, splits=(("add", "norm"),))
    plan = compile(GOLDEN / "emitted_model.py", cluster_of(1), tmp_path / "out", options=options).plan
    stages = plan.virtual_workers[0].stages
    assert len(stages) == 3
    for stage in stages:
        text = (tmp_path / "out" / str(stage.module)).read_text()
        golden = GOLDEN / f"emitted_stage{stage.index}.txt"
        if os.environ.get("UPDATE_GOLDEN"):
            golden.write_text(text)
        assert text == golden.read_text()


def test_a_fresh_process_elsewhere_without_this_package(tied: tuple[Path, Any], tmp_path: Path) -> None:
    folder, worker = tied
    code = (
        "import importlib.util, io, pickle, sys, torch\n"
        "for path in sys.argv[1:]:\n"
        "    spec = importlib.util.spec_from_file_location('stage_' + path[-4], path)\n"
        "    module = importlib.util.module_from_spec(spec)\n"
        "    sys.modules[spec.name] = module\n"
        "    spec.loader.exec_module(module)\n"
        "    stage = pickle.loads(pickle.dumps(module.Stage()))\n"
        "    assert type(stage) is module.Stage\n"
        "    print(sorted(stage.state_dict()))\n"
        "assert not [name for name in sys.modules if name.startswith('hetpipe_compiler')]\n"
    )
    paths = [str(folder / stage.module) for stage in worker.stages]
    result = subprocess.run(
        [sys.executable, "-I", "-c", code, *paths], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == len(paths)


def test_state_has_the_models_names_and_flags(tmp_path: Path) -> None:
    folder, loaded, plan = compile_kind("RoPEDecoder", tmp_path / "out", most=1)
    model = loaded.workload.model()
    stages = [load_stage(folder, s.module) for s in plan.virtual_workers[-1].stages]
    assert set().union(*(s.state_dict() for s in stages)) == set(model.state_dict())
    assert {n for s in stages for n, _ in s.named_buffers()} == {"cos", "sin"}
    assert not {"cos", "sin"} & set().union(*(s.state_dict() for s in stages))
    for stage in stages:
        for name, parameter in stage.named_parameters():
            original = model.get_parameter(name)
            assert (parameter.shape, parameter.dtype) == (original.shape, original.dtype)


def test_frozen_parameters_are_frozen(tmp_path: Path) -> None:
    folder, _, plan = compile_kind("FrozenLoRA", tmp_path / "out", most=1)
    flags = {
        n: p.requires_grad
        for s in plan.virtual_workers[-1].stages
        for n, p in load_stage(folder, s.module).named_parameters()
    }
    assert {n for n, wants in flags.items() if wants} == {"down", "up"}
    assert len(flags) == 10


def test_a_tied_parameter_is_returned_by_its_owner_and_received_by_others(tied: tuple[Path, Any]) -> None:
    folder, worker = tied
    owners = [s.index for s in worker.stages if "embed.weight" in s.parameters]
    assert owners == [0]
    port = next(p for p in worker.stages[-1].inputs if p.kind == "parameter" and p.name == "shared_embed_weight")
    assert (port.source, port.requires_grad, port.shape) == (0, True, (17, 8))
    stage = load_stage(folder, worker.stages[0].module)
    returned = dict(zip((p.name for p in worker.stages[0].outputs), stage(*_inputs(worker.stages[0])), strict=True))
    assert returned["shared_embed_weight"] is stage.get_parameter("embed.weight")
    assert "head.weight" not in dict(load_stage(folder, worker.stages[-1].module).named_parameters())


def _inputs(stage: Any) -> list[Tensor]:
    return [torch.zeros([4 if isinstance(s, str) else s for s in p.shape], dtype=torch.int64) for p in stage.inputs]


def test_moves_to_another_dtype_and_device(tmp_path: Path) -> None:
    folder, _, plan = compile_kind("ConstInForward", tmp_path / "out", most=1)
    for planned in plan.virtual_workers[-1].stages:
        with torch.device("meta"):
            stage = load_stage(folder, planned.module).to(torch.float64)
        assert all(t.is_meta for t in (*stage.parameters(), *stage.buffers()))
        inputs = [
            torch.empty(
                [4 if isinstance(s, str) else s for s in p.shape],
                dtype=torch.float64 if p.dtype.startswith("float") else getattr(torch, p.dtype),
                device="meta",
            )
            for p in planned.inputs
        ]
        outputs = stage(*inputs)
        assert all(value.is_meta for value in outputs), "no device of the compiling machine is left in the code"


def test_every_module_pickles(tied: tuple[Path, Any]) -> None:
    folder, worker = tied
    stage = load_stage(folder, worker.stages[0].module)
    with torch.no_grad():
        for value in stage.state_dict().values():
            value.fill_(3.0)
    copy = pickle.loads(pickle.dumps(stage))
    for name, value in stage.state_dict().items():
        assert torch.equal(copy.state_dict()[name], value)


def test_contexts_are_written_around_their_lines() -> None:
    def then(module: Any, h: Tensor) -> Tensor:
        with torch.no_grad():
            g = h.sin()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                g = module.fc2(g)
        return h + g

    text = whole(then)
    lines = [line.strip() for line in text.splitlines() if "#" not in line and "del" not in line]
    assert lines[1:] == [
        "device = input_0.device",
        "linear = aten.linear.default(input_0, self.fc.weight, self.fc.bias)",
        "with torch.set_grad_enabled(False):",
        "sin = aten.sin.default(linear)",
        "with torch.set_grad_enabled(False):",
        "with torch.autocast(device.type, torch.bfloat16, True):",
        "linear_2 = aten.linear.default(sin, self.fc2.weight, self.fc2.bias)",
        "add = aten.add.Tensor(linear, linear_2)",
        "mean = aten.mean.default(add)",
        "return (mean,)",
    ]


def test_arithmetic_on_sizes_reads_as_python() -> None:
    def then(_: Any, h: Tensor) -> Tensor:
        return h.reshape(h.shape[0] * 2, 2) / (h.shape[0] + 1) * float("inf") + torch.zeros(h.shape[0] * 2, 1)

    text = whole(then)
    assert "* 2" in text
    assert "+ 1" in text
    assert 'float("inf")' in text
    assert "SymInt" not in text


def test_the_device_without_an_input_is_that_of_the_stages_own_tensors(tmp_path: Path) -> None:
    folder, _, plan = compile_kind("NoInputFirst", tmp_path / "out", most=1)
    texts = [(folder / s.module).read_text() for w in plan.virtual_workers for s in w.stages]
    assert not any("get_default_device" in text for text in texts)


def test_names_are_let_go_of_when_nobody_reads_them_any_more() -> None:
    def then(module: Any, h: Tensor) -> Tensor:
        return module.fc2(h.sin()).cos() + h

    text = whole(then)
    assert "del sin" in text
    assert "del linear," not in text
    scope: dict[str, Any] = {}
    exec(f"import torch\naten = torch.ops.aten\n{text}", scope)
    module = torch.nn.Module()
    module.fc, module.fc2 = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    x = torch.ones(3, 4)
    h = module.fc(x)
    assert torch.equal(scope["forward"](module, x)[0], (module.fc2(h.sin()).cos() + h).mean())
