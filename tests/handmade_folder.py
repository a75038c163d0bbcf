"""A plan folder written by hand: a tiny CNN with batch normalisation, dropout and a shared parameter, in two stages.

Virtual worker 0 has stage modules; virtual worker 1 cuts one node later (and has none: only its node names count).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from handmade_plans import make_plan, worker
from safetensors.torch import save_file

from hetpipe_compiler.ir.plan import Plan, Port, Stage, Tensor

STAGE0 = """import torch
from torch import nn


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Module()
        self.conv.weight = nn.Parameter(torch.empty(4, 3, 3, 3))
        self.conv.bias = nn.Parameter(torch.empty(4))
        self.bn = nn.Module()
        self.bn.weight = nn.Parameter(torch.empty(4))
        self.bn.bias = nn.Parameter(torch.empty(4))
        self.bn.register_buffer("running_mean", torch.empty(4))
        self.bn.register_buffer("running_var", torch.empty(4))
        self.bn.register_buffer("num_batches_tracked", torch.empty((), dtype=torch.int64))
        self.register_buffer("scale", torch.empty(4, 1, 1), persistent=False)

    def forward(self, x, y):
        # conv, model.py:12
        conv2d = torch.ops.aten.conv2d.default(
            x, self.conv.weight, self.conv.bias, [1, 1], [1, 1]
        )
        add_ = torch.ops.aten.add_.Tensor(self.bn.num_batches_tracked, 1)
        batch_norm = torch.ops.aten.batch_norm.default(
            conv2d, self.bn.weight, self.bn.bias, self.bn.running_mean, self.bn.running_var, True, 0.1, 1e-05, True
        );  conv2d = None
        relu = torch.ops.aten.relu.default(batch_norm);  batch_norm = None
        mul = torch.ops.aten.mul.Tensor(relu, self.scale);  relu = None
        dropout = torch.ops.aten.dropout.default(mul, RATIO, True);  mul = None
        return (dropout, y, self.conv.bias)
"""

STAGE1 = """import torch
from torch import nn


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Module()
        self.fc.weight = nn.Parameter(torch.empty(10, 256))

    def forward(self, dropout, y, conv_bias):
        with torch.no_grad():
            sum_1 = torch.ops.aten.sum.default(conv_bias)
        view = torch.ops.aten.view.default(dropout, [dropout.size(0), 256])
        linear = torch.ops.aten.linear.default(view, self.fc.weight)
        cross_entropy_loss = torch.ops.aten.cross_entropy_loss.default(linear, y)
        add = torch.ops.aten.add.Tensor(cross_entropy_loss, sum_1)
        return (add,)
"""

NODES = {
    # name: (op, module, inputs)
    "x": ("input", "", ()),
    "y": ("input", "", ()),
    "conv2d": ("aten.conv2d.default", "conv", ("x",)),
    "add_": ("aten.add_.Tensor", "bn", ()),
    "batch_norm": ("aten.batch_norm.default", "bn", ("conv2d",)),
    "relu": ("aten.relu.default", "act", ("batch_norm",)),
    "mul": ("aten.mul.Tensor", "", ("relu",)),
    "dropout": ("aten.dropout.default", "drop", ("mul",)),
    "sum_1": ("aten.sum.default", "", ()),
    "view": ("aten.view.default", "", ("dropout",)),
    "linear": ("aten.linear.default", "fc", ("view",)),
    "cross_entropy_loss": ("aten.cross_entropy_loss.default", "", ("linear", "y")),
    "add": ("aten.add.Tensor", "", ("cross_entropy_loss", "sum_1")),
}
BATCH = 2


def weights() -> dict[str, torch.Tensor]:
    """Seeded values for all parameters and buffers."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "conv.weight": (4, 3, 3, 3),
        "conv.bias": (4,),
        "bn.weight": (4,),
        "bn.bias": (4,),
        "fc.weight": (10, 256),
    }
    values = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    counters = {"bn.running_mean": torch.zeros(4), "bn.running_var": torch.ones(4)}
    return {**values, **counters, "bn.num_batches_tracked": torch.zeros((), dtype=torch.int64)}


def write_folder(folder: Path, *, ratio: float = 0.5, with_weights: bool = True, stage1: str = STAGE1) -> Plan:
    """Write plan.json, graph.json, stages/ and the weights; returns the plan."""
    (folder / "stages").mkdir(parents=True)
    (folder / "stages/a_stage0.py").write_text(STAGE0.replace("RATIO", str(ratio)))
    (folder / "stages/a_stage1.py").write_text(stage1)
    plan = _plan(with_weights)
    (folder / "plan.json").write_text(plan.to_json())
    (folder / "graph.json").write_text(json.dumps({"nodes": [_node(name) for name in NODES]}))
    save_file({"scale": torch.full((4, 1, 1), 2.0)}, folder / "constants.safetensors")
    if with_weights:
        save_file(weights(), folder / "weights.safetensors")
    return plan


def _node(name: str) -> dict[str, object]:
    op, module, inputs = NODES[name]
    times = {"titan-v": 1.5, "rtx-2060": 3.0} if op != "input" else {}
    source = f"model.py:{10 + list(NODES).index(name)}"
    return {
        "name": name,
        "op": op,
        "module": module,
        "source": source,
        "inputs": inputs,
        "forward_ms": times,
        "backward_ms": {kind: 2 * ms for kind, ms in times.items()},
        "flops": 1000,
        "output_bytes": 2048,
        "shape": None,
        "dtype": None,
    }


def _port(name: str, shape: tuple[int | str, ...], **more: object) -> Port:
    facts = {"kind": "tensor", "source": 0, "dtype": "float32", "requires_grad": True, "bytes": 2048, **more}
    return Port.model_validate({"name": name, "shape": shape, **facts})


def _plan(with_weights: bool) -> Plan:
    calls = [name for name, (op, _, _) in NODES.items() if op != "input"]
    workers = tuple(
        worker(vw, [(f"n0:{vw}", "titan-v", 1.0), (f"n1:{vw}", "rtx-2060", 0.5)], [None, "pcie3-x16"])
        for vw in range(3)
    )
    cuts = (6, 6, 3)  # calls in stage 0
    placed = tuple(
        w.model_copy(update={"stages": (_stage(w.stages[0], calls[:cut]), _stage(w.stages[1], calls[cut:]))})
        for w, cut in zip(workers, cuts, strict=True)
    )
    values = {**weights(), "scale": torch.zeros(4, 1, 1)}
    tensors = {
        name: Tensor(
            name=name,
            shape=tuple(value.shape),
            dtype=str(value.dtype).removeprefix("torch."),
            mutated=name.startswith(("bn.running", "bn.num")),
            bytes=value.nbytes,
        )
        for name, value in values.items()
    }
    buffers = tuple(t for name, t in tensors.items() if t.mutated)
    return make_plan(placed, policy="groups").model_copy(
        update={
            "name": "tiny",
            "batch_size": BATCH,
            "loss": "add",
            "weights": with_weights,
            "parameters": tuple(t for name, t in tensors.items() if not t.mutated and name != "scale"),
            "buffers": buffers,
            "constants": (tensors["scale"],),
        }
    )


def _stage(stage: Stage, nodes: list[str]) -> Stage:
    x = _port("x", ("batch", 3, 8, 8), requires_grad=False, batch_leaf=0)
    y = _port("y", ("batch",), dtype="int64", requires_grad=False, batch_leaf=1)
    sent = (_port("dropout", ("batch", 4, 8, 8)), y, _port("conv_bias", (4,), kind="parameter"))
    loss = _port("add", (), source=1)
    ports = {"inputs": (x, y), "outputs": sent} if stage.index == 0 else {"inputs": sent, "outputs": (loss,)}
    return stage.model_copy(update={"nodes": tuple(nodes), "sends": {1: ("dropout", "y", "conv_bias")}, **ports})
