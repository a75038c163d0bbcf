"""Code that asks how it is run, or of what type something is, goes the way that it goes in eager mode."""

from __future__ import annotations

import builtins
from pathlib import Path

import pytest
import torch
from small_net import captured, factors, line_of

from hetpipe_compiler.errors import WorkloadError

IN_EAGER = {
    "compiling": "not torch.compiler.is_compiling()",
    "exporting": "not torch.compiler.is_exporting()",
    "by another name": "not asked()",
    "of dynamo": "not torch._dynamo.is_compiling()",
    "of torch's own": "not torch._utils.is_compiling()",
    "type of a tensor": "type(h) is torch.Tensor and type(x) == torch.Tensor",
    "type of a parameter": "type(self.b.weight) is nn.Parameter",
    "type by name": "type(x).__name__ == 'Tensor'",
    "type among others": "type(x) in (torch.Tensor, nn.Parameter)",
    "type of a size": "type(x.shape[0]) is int",
    "size": "isinstance(x.shape[0], int)",
    "size or more": "isinstance(x.shape[0], (str, int))",
    "half a size": "isinstance(x.shape[0] / 2, float)",
    "number": "isinstance(x.shape[0], numbers.Number) and not isinstance(x.shape[0], str)",
    "type of old": "isinstance(x, torch.FloatTensor) and not isinstance(x, torch.LongTensor)",
    "node of autograd": "type(h.grad_fn).__name__ == 'AddmmBackward0' and h.grad_fn == h.grad_fn",
}


@pytest.mark.parametrize("name", IN_EAGER)
def test_the_answer_is_that_of_eager_mode(name: str, tmp_path: Path) -> None:
    top = "import numbers\nfrom torch.compiler import is_compiling as asked\nimport torch._dynamo"
    found = captured(tmp_path, f"h = h * 3 if {IN_EAGER[name]} else h * 2", top)
    assert factors(found) == [3]
    assert found.dynamic_batch


def test_type_can_still_do_what_else_it_does(tmp_path: Path) -> None:
    body = (
        "class Meta(type): pass\nmade = Meta('Made', (), {})\nassert type(made) is Meta and isinstance(made, type)\n"
        "assert type('Other', (), {'n': 4})().n == 4 and type.mro(int)[0] is int and issubclass(Meta, type)\nh = h * 3"
    )
    assert factors(captured(tmp_path, body)) == [3]


def test_everything_is_put_back(tmp_path: Path) -> None:
    before = torch.compiler.is_compiling, torch.compiler.is_exporting, torch.Tensor.grad_fn
    captured(tmp_path, "h = h * (type(self.a) is nn.Linear)", "import sys\nHERE = sys.modules[__name__]")
    assert (torch.compiler.is_compiling, torch.compiler.is_exporting, torch.Tensor.grad_fn) == before
    assert type is builtins.type


def test_gradients_are_off_in_eval_mode(tmp_path: Path) -> None:
    found = captured(tmp_path, "h = h * 2 if torch.is_grad_enabled() else h * 3", evaluation=True)
    assert found.in_eval is not None
    assert (factors(found), factors(found.in_eval)) == ([2], [3])


_LIBRARY = """
import torch
from torch import nn

def scaled(x):
    if not torch.compiler.is_compiling() and (x > 0).all():
        return x * 2
    return torch.where((x > 0).all(), x * 2, x)
"""


def test_a_library_may_go_another_way_where_export_cannot_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "site-packages" / "asking_library"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text(_LIBRARY)
    monkeypatch.syspath_prepend(str(library.parent))
    body = "h = scaled(h)\nh = h * 3 if not torch.compiler.is_compiling() else h * 5"
    assert factors(captured(tmp_path, body, "from asking_library import scaled")) == [2, 3]


def test_the_users_own_code_may_not(tmp_path: Path) -> None:
    (tmp_path / "asking_helper.py").write_text(_LIBRARY)
    with pytest.raises(WorkloadError) as caught:
        captured(tmp_path, "h = scaled(h)", "from asking_helper import scaled")
    assert caught.value.code == "HP111"
    assert line_of(tmp_path, "scaled(h)") in str(caught.value)
    assert "asking_helper.py:6" in str(caught.value)
