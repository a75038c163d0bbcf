"""A small model with a hole in its ``forward``, for tests of what capture does with the line that they put there."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch
from torch import fx

from hetpipe_compiler.frontend.capture import capture
from hetpipe_compiler.frontend.eager_check import EagerCheck
from hetpipe_compiler.frontend.load import load_workload
from hetpipe_compiler.ir.captured import Captured

_MODEL = """
{top}
import torch
from torch import nn

from hetpipe_compiler import Workload


class Net(nn.Module):
    {attributes}

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        {init}

    def forward(self, x):
        h = self.a(x)
        {body}
        return self.head(h)


def workload():
    return Workload(
        model=Net,
        example=lambda: (torch.randn(4, 8), torch.randint(0, 5, (4,))),
        loss=nn.CrossEntropyLoss(),
        targets=1,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
"""


def captured(
    folder: Path, body: str, top: str = "", init: str = "", attributes: str = "", *, evaluation: bool = False
) -> Captured:
    """The capture of ``folder/model.py`` with these lines in it: in ``forward``, at the top, at the end of ``__init__``
    and in the class."""
    path = folder / "model.py"
    text = _MODEL.replace("{top}", top).replace("{attributes}", attributes)
    for name, lines in {"body": body, "init": init or "pass"}.items():
        text = text.replace(f"{{{name}}}", lines.replace("\n", "\n        "))
    path.write_text(text)
    return capture(load_workload(path, {}), evaluation=evaluation)


def compared(folder: Path, body: str, top: str = "", init: str = "", *, evaluation: bool = False) -> list[Captured]:
    """The capture of the same, if its graphs could be held to eager mode; else nothing."""
    check, answers = EagerCheck.check, list[bool]()

    def noted(self: EagerCheck, graph_module: fx.GraphModule, tensors: tuple[torch.Tensor, ...]) -> bool:
        answers.append(check(self, graph_module, tensors))
        return answers[-1]

    with mock.patch.object(EagerCheck, "check", noted):
        found = captured(folder, body, top, init, evaluation=evaluation)
    return [found] if answers and all(answers) else []


def line_of(folder: Path, text: str) -> str:
    """``model.py:7``: where a text stands in the model."""
    lines = (folder / "model.py").read_text().splitlines()
    return f"model.py:{next(at for at, line in enumerate(lines, 1) if text in line)}"


def factors(found: Captured) -> list[object]:
    """What the model multiplies by that is a number."""
    nodes = found.graph_module.graph.nodes
    return [
        n.args[1] for n in nodes if n.target is torch.ops.aten.mul.Tensor and not isinstance(n.args[1], torch.fx.Node)
    ]
