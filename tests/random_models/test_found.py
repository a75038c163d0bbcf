"""Models that random search found to be cut wrongly, written out: each cut everywhere, into two and three stages."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from random_models.check import compiled, load, verified
from random_models.program import WIDTH, Memory, Program, Value
from random_models.strategy import DrawnCut

#: Name -> lines of ``__init__`` and of ``forward``, which ends with an ``h`` as large as ``x``.
FOUND: dict[str, tuple[str, str]] = {
    # The stage of `rand_like` has no other tensor in eval mode, when `g` is not computed.
    "a stage whose only input is there in training": (
        "self.fc = nn.Linear(6, 6)",
        """
        h = torch.tanh(x)
        g = self.fc(x)
        torch.rand(6, device=x.device)
        g = torch.rand_like(g) if self.training else g
        """,
    ),
    # --verify computes in double precision and back: the buffer is another tensor then.
    "a buffer that is another tensor after a step, and autocast": (
        "self.fc = nn.Linear(6, 6); self.register_buffer('b', torch.linspace(0.5, 1, 6))",
        """
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            h = self.fc(x)
        self.b = self.b * 0.5
        h = h.to(x.dtype) * self.b
        """,
    ),
    # While exporting, a module is another object at each look.
    "a buffer that is another tensor after a step, of a module with two names": (
        "self.fc = Average(6, True); self.too = self.fc; self.register_buffer('b', torch.linspace(0.5, 1, 6))",
        """
        self.b = self.b * 0.5
        h = self.fc(x * self.b) + self.too(x)
        self.fc.mean = self.too.mean + 1
        h = self.fc(h)
        """,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_model_that_was_cut_wrongly(name: str, tmp_path: Path) -> None:
    init, forward = FOUND[name]
    program = Program(init=_lines(init), body=_lines(forward))
    program.values.append(Value("h", ("B", WIDTH), "f", True, Memory()))
    cuts = [DrawnCut(0, at) for first in range(12) for at in ((first,), (first, first + 1))]
    loaded, folder = load(program.finish([]), tmp_path), tmp_path / "plan"
    assert verified(loaded, folder, compiled(loaded, cuts, folder)).dtype == "float64"


def _lines(text: str) -> list[str]:
    return textwrap.dedent(text).strip().splitlines()
