"""A hook on a gradient is refused, however ``forward`` hangs it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_net import captured, line_of

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.gradient_hooks import refuse_hooks

HOOKS = {
    "tensor": "h.register_hook(lambda g: g * 2)",
    "node": "h.grad_fn.register_hook(lambda into, out: (into[0] * 2,))",
    "node before": "h.grad_fn.register_prehook(lambda out: (out[0] * 2,))",
    "node behind": "h.sin().grad_fn.next_functions[0][0].register_prehook(lambda out: (out[0] * 2,))",
    "edge": "torch.autograd.graph.get_gradient_edge(h).node.register_prehook(lambda out: (out[0] * 2,))",
    "several": "torch.autograd.graph.register_multi_grad_hook((h,), lambda g: None)",
    "parameter": "self.b.weight.register_post_accumulate_grad_hook(lambda p: None)",
    "module": "self.b.register_full_backward_hook(lambda m, into, out: (into[0] * 2,))",
    "module before": "self.b.register_full_backward_pre_hook(lambda m, out: (out[0] * 2,))",
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_of_forward_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="hangs a hook on a gradient") as caught:
        captured(tmp_path, f"{HOOKS[name]}; h = self.b(h)")
    assert caught.value.code == "HP119"
    assert str(caught.value.where).endswith(line_of(tmp_path, HOOKS[name]))


def test_looking_at_autograds_nodes_is_not(tmp_path: Path) -> None:
    captured(tmp_path, "h = h * 2 if h.grad_fn is None or h.grad_fn.name() == '' or x.grad_fn else h.sin()")


def test_a_hook_on_all_modules_is_refused() -> None:
    hook = torch.nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        with pytest.raises(WorkloadError, match="all modules have a backward hook"):
            refuse_hooks(torch.nn.Linear(2, 2), "model.py")
    finally:
        hook.remove()
    refuse_hooks(torch.nn.Linear(2, 2), "model.py")
