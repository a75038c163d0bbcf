"""What export captures otherwise than eager mode computes is refused, or the plan's batch size is fixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_net import captured, compared, factors, line_of
from torch import fx

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend import capture

_SUBCLASS = "class Scaled(nn.Parameter):\n    scale = 3\n"

OTHERWISE = {
    "attribute of a parameter": ("", "self.b.weight.scale = 3", "getattr(self.b.weight, 'scale', 2) == 3"),
    "attribute of a buffer": (
        "",
        "self.register_buffer('t', torch.ones(8)); self.t.scale = 3",
        "hasattr(self.t, 'scale')",
    ),
    "type of a parameter": (_SUBCLASS, "self.p = Scaled(torch.ones(8))", "type(self.p) is Scaled"),
    "kind of a parameter": (_SUBCLASS, "self.p = Scaled(torch.ones(8))", "isinstance(self.p, Scaled)"),
    "a parameter itself": ("", "self.kept = (self.b.weight,)", "self.kept[0] is self.b.weight"),
    "a parameter by its id": ("", "self.ids = {id(self.b.weight)}", "id(self.b.weight) in self.ids"),
    "class of a tensor": ("", "pass", "x.__class__ is torch.Tensor"),
    "size as a text": ("", "pass", "str(x.shape[0]).isdigit()"),
    "a switch of torch's": ("", "pass", "torch.backends.mkldnn.enabled"),
}


def refused(folder: Path, body: str, top: str = "", init: str = "") -> WorkloadError:
    with pytest.raises(WorkloadError) as caught:
        captured(folder, body, top, init)
    assert caught.value.code == "HP128"
    return caught.value


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_eager_mode_alone_computes_is_refused(name: str, tmp_path: Path) -> None:
    top, init, question = OTHERWISE[name]
    top = f"from torch import nn\n{top}"
    error = refused(tmp_path, f"h = h * 3 if {question} else h * 2", top, init)
    assert line_of(tmp_path, "h = h * 3 if") in str(error)
    assert "aten.mul.Tensor" in str(error)


def test_what_only_the_graph_computes_is_refused_too(tmp_path: Path) -> None:
    error = refused(tmp_path, "if x.__class__ is not torch.Tensor:\n    h = h * 2")
    assert "something else" in str(error)


def test_other_gradients_are_refused(tmp_path: Path) -> None:
    error = refused(tmp_path, "h = h + (h.detach() if x.__class__ is torch.Tensor else h)")
    assert line_of(tmp_path, "h = h + (") in str(error)
    assert "gradients are not those of aten.add.Tensor" in str(error)


@pytest.mark.parametrize(
    "body",
    [
        "with torch.no_grad(): g = self.b(x)\nk = self.b(h)",
        "k = self.b(h)\nwith torch.inference_mode(): g = self.b(x)",
        "with torch.inference_mode(): g = self.b(x)\nk = self.b(h)",
        "with torch.no_grad():\n    g = self.b(h)\n    with torch.enable_grad(): k = self.b(h)",
    ],
)
@pytest.mark.parametrize("cached", [False, True])
def test_whether_casts_are_cached_is_no_difference(body: str, cached: bool, tmp_path: Path) -> None:
    region = f"with torch.autocast(x.device.type, dtype=torch.bfloat16, cache_enabled={cached}):\n"
    text = region + "".join(f"    {line}\n" for line in body.splitlines())
    assert compared(tmp_path, f"{text}h = (k + g.clone()).float()")


_DOUBLED = """class Doubled(torch.autograd.Function):
    @staticmethod
    def forward({arguments}):
        return x * 2 * 1

    {setup}

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2
"""


@pytest.mark.parametrize("apart", [False, True])
def test_a_function_of_the_users_own_has_its_forwards_gradients(apart: bool, tmp_path: Path) -> None:
    setup = "@staticmethod\n    def setup_context(ctx, inputs, output): pass" if apart else ""
    top = "import torch\n" + _DOUBLED.format(arguments="x" if apart else "ctx, x", setup=setup)
    assert compared(tmp_path, "h = h + Doubled.apply(h)", top)


@pytest.mark.parametrize("evaluation", [False, True])
def test_a_text_of_the_batch_size_fixes_it(evaluation: bool, tmp_path: Path) -> None:
    found = captured(
        tmp_path, "h = h * getattr(self, f'scale_{int(x.shape[0])}', 2)", init="self.scale_4 = 3", evaluation=evaluation
    )
    assert factors(found) == [3]
    assert not found.dynamic_batch


def test_a_key_of_the_batch_size_fixes_it(tmp_path: Path) -> None:
    found = captured(tmp_path, "h = h * self.scales.get(len(x), 2)", init="self.scales = {4: 3, 5: 7}")
    assert not found.dynamic_batch


def test_a_graph_that_is_the_model_at_one_size_only_is_fixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph_of = capture._graph

    def frozen(*args: Any) -> fx.GraphModule:
        graph_module = graph_of(*args)
        for node in graph_module.graph.nodes:
            if node.target is torch.ops.aten.mul.Tensor and isinstance(node.args[1], fx.Node):
                node.update_arg(1, 4)
        return graph_module

    monkeypatch.setattr(capture, "_graph", frozen)
    found = captured(tmp_path, "h = h * x.shape[0]")
    assert not found.dynamic_batch
    assert "something else at batch size 5" in str(found.dynamic_batch_note)
    assert "model.py:" in str(found.dynamic_batch_note)


def test_a_graph_that_raises_is_refused(tmp_path: Path) -> None:
    body = "torch.set_default_dtype(torch.float64)\nt = torch.ones(8)\ntorch.set_default_dtype(torch.float32)"
    error = refused(tmp_path, f"{body}\nh = h * t.float()", init="self.real = float(torch.ones(1).sum())")
    assert "graph that torch.export has captured raises" in error.message


def test_a_model_that_raises_at_another_size_is_fixed(tmp_path: Path) -> None:
    sizes = "sizes = [2, 4, 6]\nassert [s for s in sizes if s == x.shape[0]]"
    assert not captured(tmp_path, sizes).dynamic_batch


def test_what_is_done_under_inference_mode_is_compared(tmp_path: Path) -> None:
    body = "with torch.inference_mode():\n    g = nn.functional.linear(h, self.b.weight)\nh = h + g.clone()"
    assert captured(tmp_path, body).dynamic_batch
    refused(tmp_path, body.replace("g = ", "g = h if x.__class__ is torch.Tensor else "))


def test_arithmetic_on_the_batch_size_leaves_it_free(tmp_path: Path) -> None:
    assert captured(tmp_path, "h = h * (x.shape[0] / 3 + x.numel() ** 0.5)").dynamic_batch


#: Written otherwise by export, or on meta tensors, but computed alike.
ALIKE = (
    "h = h + torch.zeros(8, device=x.device)",
    "mask = torch.zeros(8, device=x.device); mask[:4] = 1; mask[5] = 0.25; h = h * mask",
    "h = h * torch.tensor([1.0, 2.0] * 4, device=x.device)",
    "h = h + torch.tensor(2.0).item()",
    "h = h.clone(); h[:, 2:4] += 1; h.t()[0] = 0",
    "h = h.view(-1, 2, 4).transpose(1, 2).reshape(-1, 8).contiguous()",
    "with torch.no_grad(): scale = h.norm()\nh = h / scale",
    "h = nn.functional.dropout(h, 0.5, self.training)",
    "h = h.to(x.device).float().double().float()",
    "k = torch.arange(8).float() * 2; h = h * k",
    "h = h * self.late",
    "self.count += 1; h = h * self.count",
    "self.count += h.mean()",
    "self.count = self.count + h.detach().mean(); h = h * self.count",
    "h = h.detach() * 2 + h; h.data[0] = 1; h[1].detach().zero_()",
    "h = h + torch.ones(8, requires_grad=True); h = h + nn.Linear(8, 8)(h)",
    "d = h.detach(); d.requires_grad = True; h = h + d * h.detach().requires_grad_()",
    "h = nn.functional.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None])[:, 0]",
)


@pytest.mark.parametrize("body", ALIKE)
def test_what_is_only_written_otherwise_passes(body: str, tmp_path: Path) -> None:
    init = "self.register_buffer('count', torch.zeros(())); self.late = torch.linspace(0, 1, 8)"
    (found,) = compared(tmp_path, body, init=init, evaluation=True)
    assert found.dynamic_batch
    assert found.in_eval is not None


def test_a_buffer_that_wants_gradients_keeps_doing_so(tmp_path: Path) -> None:
    assert compared(tmp_path, "h = h * self.m", init="self.register_buffer('m', torch.ones(8, requires_grad=True))")


def test_a_kind_that_only_tensors_without_values_have_is_looked_at_on_real_ones(tmp_path: Path) -> None:
    question = "isinstance(x, torch.FloatTensor)"
    assert factors(captured(tmp_path, f"h = h * 3 if {question} else h * 2")) == [3]
    body = f"if not self.training:\n    h = h * 3 if {question} else h * 2"
    found = captured(tmp_path, body, evaluation=True)
    assert found.in_eval is not None
    assert factors(found.in_eval) == [3]


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    body = "self.steps = getattr(self, 'steps', 0)\nself.mean = h.mean(0)\nh = h + self.late * 0"
    init = "self.register_buffer('mean', torch.zeros(8)); self.late = torch.tensor([float(torch.ones(1))] * 8)"
    found = captured(tmp_path, body, init=init)
    assert [t.name for t in found.buffers] == ["mean"]


def test_a_buffer_that_is_part_of_a_larger_memory_may_be_assigned(tmp_path: Path) -> None:
    init = "self.register_buffer('m', torch.zeros(16)[:8])"
    assert captured(tmp_path, "self.m = h.detach().mean(0); h = h + self.m", init=init).dynamic_batch


def test_an_expanded_tensor_does_not_switch_the_check_off(tmp_path: Path) -> None:
    init = "self.real = float(torch.ones(1).sum()); self.e = torch.ones(1).expand(8)"
    refused(tmp_path, "h = h * self.e; h = h * 3 if x.__class__ is torch.Tensor else h * 2", init=init)


def test_one_draw_is_not_two(tmp_path: Path) -> None:
    draw = "nn.functional.dropout(h, 0.5, self.training)"
    assert captured(tmp_path, f"h = {draw} + {draw}").dynamic_batch
    refused(tmp_path, f"d = {draw}; e = d if x.__class__ is torch.Tensor else {draw}; h = d + e")
