"""Submodules that export does not look into: what is seen of their calls, and which cannot be kept whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetpipe_compiler.errors import WorkloadError
from hetpipe_compiler.frontend.capture import capture
from hetpipe_compiler.frontend.load import LoadedWorkload, load_workload
from hetpipe_compiler.ir.captured import Captured
from hetpipe_compiler.ir.opaque import OpaqueCall, Slot, opaque_call
from hetpipe_compiler.ir.workload import Workload
from hetpipe_compiler.passes.annotate_cost import count_costs
from hetpipe_compiler.passes.eval_mode import compare_with_eval
from hetpipe_compiler.passes.normalize import normalize


class Part(nn.Module):
    """What is kept whole: a layer, a buffer, and what ``does(part, h, ...)``."""

    def __init__(self, does: Callable[..., Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))
        self.kept: Any = 0
        self._does = does

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._does(self, *args, **kwargs)


class Whole(nn.Module):
    def __init__(self, does: Callable[..., Any], call: Callable[[Part, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.parts = nn.ModuleList([Part(does)])
        self._call = call

    def forward(self, x: Tensor) -> Tensor:
        return self._call(self.parts[0], self.fc(x)).mean()


def looked_at(
    does: Callable[..., Any], call: Callable[..., Any] = lambda part, h: part(h), batch: int = 3, name: str = "parts.0"
) -> Captured:
    example = (torch.arange(4.0 * batch).view(batch, 4),)
    workload = Workload(lambda: Whole(does, call), example, lambda p: torch.optim.SGD(p, lr=0.1), targets=0)
    return capture(LoadedWorkload(workload, Path(__file__), {}), evaluation=True, opaque=(name,))


def calls(captured: Captured) -> list[OpaqueCall]:
    return [call for n in captured.graph_module.graph.nodes if (call := opaque_call(n)) is not None]


def until_small(part: Any, h: Tensor) -> Tensor:
    while float(h.detach().norm()) > 1:
        h = part.fc(h) / 8
    return h


def test_sizes_and_numbers_follow_the_batch() -> None:
    def does(_: Any, h: Tensor, rows: int, mode: str, pair: tuple[Tensor, None]) -> dict[str, Any]:
        return {"t": torch.cat([h, pair[0]]).T, "n": 2 * rows + 1, "name": mode}

    def call(part: Any, h: Tensor) -> Tensor:
        out = part(h, h.shape[0], "fast", pair=(h + 1, None))
        assert out["name"] == "fast"
        return out["t"] / out["n"]

    captured = looked_at(does, call)
    assert captured.dynamic_batch
    (found,) = calls(captured)
    assert found.module == "parts.0"
    assert found.arguments == ((Slot("tensor", 0), Slot("number", 0), "fast"), {"pair": (Slot("tensor", 1), None)})
    assert found.batch == (0, 0, 1, 0)
    number, _, tensor = (found.returns[i] for i in (1, 2, 0))
    assert number == (2, 1)
    assert (tensor.sizes, tensor.order) == ((4, (2, 0)), (1, 0))


def test_work_and_saved_bytes_are_those_of_the_example() -> None:
    def thrice(part: Any, h: Tensor) -> Tensor:
        for _ in range(3 if bool(h.detach().isfinite().all()) else 1):
            h = torch.sigmoid(part.fc(h))
        return h

    costs = count_costs(normalize(looked_at(thrice)))
    cost = costs["parts_0"]
    assert sum(work.flops for work in cost.forward if work.operator_class == "matrix") == 3 * 2 * 3 * 4 * 4
    assert sum(work.flops for work in cost.backward if work.operator_class == "matrix") == 2 * 3 * 2 * 3 * 4 * 4
    # The module's input (made by the layer before it), and three results of sigmoid.
    assert sorted(s.bytes for s in cost.saved) == [48, 48, 48, 48]
    assert {s.producer for s in cost.saved} == {"linear", "parts_0"}


def test_under_autocast_it_runs_on_real_values_too() -> None:
    def call(part: Any, h: Tensor) -> Tensor:
        with torch.autocast(h.device.type, torch.bfloat16):
            return part(h).float()

    costs = count_costs(normalize(looked_at(until_small, call)))
    result = next(cost for name, cost in costs.items() if name.startswith("getitem"))
    assert (result.dtype, result.shape) == ("bfloat16", (3, 4))
    assert {w.dtype for w in costs["parts_0"].forward if w.operator_class == "matrix"} == {"bfloat16"}


def test_a_result_that_had_no_gradient_on_the_example_can_have_one() -> None:
    def sometimes(part: Any, h: Tensor) -> Tensor:
        return h.detach() if float(h.detach().sum()) > -1e9 else part.fc(h)

    assert count_costs(normalize(looked_at(sometimes)))["getitem"].requires_grad


def test_what_only_training_writes_is_no_difference_in_eval_mode() -> None:
    def does(part: Any, h: Tensor) -> Tensor:
        if part.training:
            part.count = part.count + 1
        return until_small(part, h)

    captured = compare_with_eval(normalize(looked_at(does)))
    assert captured.evaluation, captured.evaluation_note
    assert calls(captured)[0].written == ("count",)
    assert [b.name for b in captured.buffers if b.mutated] == ["parts.0.count"]


def test_statistics_that_batch_norm_updates_are_written() -> None:
    def does(part: Any, h: Tensor) -> Tensor:
        mean, square = part.count, torch.ones(4)  # no version of `mean` tells
        return until_small(part, nn.functional.batch_norm(h, mean, square, training=part.training))

    captured = compare_with_eval(normalize(looked_at(does)))
    assert calls(captured)[0].written == ("count",)
    assert [b.name for b in captured.buffers if b.mutated] == ["parts.0.count"]


def test_another_argument_in_eval_mode_is_told() -> None:
    captured = looked_at(lambda part, h, _: until_small(part, h), lambda part, h: part(h, part.training))
    note = compare_with_eval(normalize(captured)).evaluation_note
    assert note is not None
    assert "hetpipe.opaque" in note


def test_a_batch_of_one_stays_fixed() -> None:
    captured = looked_at(until_small, batch=1)
    assert not captured.dynamic_batch


def test_a_model_that_takes_no_other_batch_size_stays_fixed() -> None:
    def does(part: Any, h: Tensor) -> Tensor:
        if h.shape[0] != 3:
            raise ValueError(h.shape)
        return until_small(part, h)

    captured = looked_at(does)
    assert not captured.dynamic_batch
    assert calls(captured)[0].returns[0].sizes == (3, 4)


def test_hooks_that_the_model_puts_on_see_the_result() -> None:
    seen: list[Tensor] = []

    def call(part: Any, h: Tensor) -> Tensor:
        seen.clear()
        hook = part.register_forward_hook(lambda _module, _args, out: seen.append(out))
        total = part(h).sum() + seen[0].mean()
        hook.remove()
        return total

    captured = looked_at(until_small, call)
    (node,) = (n for n in captured.graph_module.graph.nodes if opaque_call(n) is not None)
    (result,) = node.users
    assert len(result.users) == 2


REFUSED: dict[str, tuple[Callable[..., Any], Callable[..., Any], str, str]] = {
    "no such module": (until_small, lambda part, h: part(h), "part.0", "HP123"),
    "a container": (until_small, lambda part, h: part(h), "parts", "HP123"),
    "the model itself": (until_small, lambda part, h: part(h), "", "HP123"),
    "its argument is written": (lambda _, h: h.mul_(2), lambda part, h: part(h), "parts.0", "HP124"),
    "a parameter is written": (
        lambda part, h: (part.fc.bias.data.zero_(), part.fc.bias.detach().add_(1), h)[2],
        lambda part, h: part(h), "parts.0", "HP124",
    ),
    "a parameter is returned": (lambda part, h: (h, part.fc.bias), lambda part, h: sum(part(h)), "parts.0", "HP124"),
    "a size depends on values": (
        lambda _, h: h[h.detach()[:, 0] != h.detach()[0, 0]], lambda part, h: part(h), "parts.0", "HP124"),
    "a number depends on values": (
        lambda _, h: (h, float(h.detach().sum())), lambda part, h: part(h)[0], "parts.0", "HP124"),
    "an object is given": (
        lambda _, h, o: h + o.real, lambda part, h: part(h, Path()), "parts.0", "HP124"),
    "an object is returned": (lambda _, h: (h, Path()), lambda part, h: part(h)[0], "parts.0", "HP124"),
    "the buffer grows": (
        lambda part, h: (setattr(part, "count", torch.cat([part.count, part.count])), h)[1],
        lambda part, h: part(h), "parts.0", "HP124",
    ),
    "state of two calls": (
        lambda part, h: (setattr(part, "kept", part.kept + 1), h * part.kept)[1],
        lambda part, h: part(part(h)), "parts.0", "HP124",
    ),
}  # fmt: skip


def test_a_module_inside_one_that_is_kept_whole(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\nfrom hetpipe_compiler import Workload\n\n\n"
        "def workload():\n"
        "    model = lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Identity()), nn.Linear(4, 2))\n"
        "    return Workload(model, (torch.zeros(3, 4), torch.zeros(3, 2)), torch.optim.SGD, nn.MSELoss())\n"
    )
    loaded = load_workload(tmp_path / "model.py")
    capture(loaded, opaque=["0.0"])
    with pytest.raises(WorkloadError, match=r"'0.0': this module lies in '0', which is kept whole") as caught:
        capture(loaded, opaque=["0", "0.0"])
    assert caught.value.code == "HP123"


@pytest.mark.parametrize("title", REFUSED)
def test_what_cannot_be_kept_whole_is_refused(title: str) -> None:
    does, call, name, code = REFUSED[title]
    with pytest.raises(WorkloadError) as caught:
        looked_at(does, call, name=name)
    assert caught.value.code == code
    assert str(caught.value.where).startswith("--opaque")
    assert caught.value.hint
