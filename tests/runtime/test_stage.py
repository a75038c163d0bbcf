"""The stage engine: gradients, samples, optimizers and user errors. What it computes: test_interpret.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import BATCH, Network, Toy, make_batches, write_toy

from hetpipe_compiler.errors import ArtifactError, RunError
from hetpipe_compiler.ir.plan import Port
from hetpipe_compiler.ir.schedule import Instruction
from hetpipe_compiler.runtime.channels import MessageKind, PulledWeights
from hetpipe_compiler.runtime.initial import load_constants, load_weights
from hetpipe_compiler.runtime.randomness import data_seed, epoch_seed, minibatch_seed
from hetpipe_compiler.runtime.stage import StageEngine

torch.set_num_threads(1)


class Letters:
    """A mailbox whose incoming letters the test writes."""

    def __init__(self) -> None:
        self.incoming: dict[tuple[MessageKind, int, int], dict[str, Any]] = {}
        self.sent: dict[tuple[MessageKind, int, int], dict[str, Any]] = {}

    def send(self, kind: MessageKind, minibatch: int, peer: int, values: Mapping[str, Any]) -> None:
        self.sent[kind, minibatch, peer] = dict(values)

    def receive(self, kind: MessageKind, minibatch: int, peer: int, names: tuple[str, ...]) -> dict[str, Any]:
        values = self.incoming[kind, minibatch, peer]
        assert tuple(values) == names
        return values


class NoServer:
    """A parameter link that remembers and never answers."""

    def __init__(self) -> None:
        self.pushed: list[tuple[int, tuple[str, ...], int]] = []
        self.reported: list[tuple[tuple[str, ...], int]] = []
        self.finished = False

    def push(self, wave: int, updates: Mapping[str, torch.Tensor], need: int) -> None:
        self.pushed.append((wave, tuple(updates), need))

    def poll(self) -> list[PulledWeights]:
        return []

    def wait(self, clock: int) -> list[PulledWeights]:
        raise AssertionError(f"waits for clock {clock}")

    def buffers(self, values: Mapping[str, torch.Tensor], samples: int) -> None:
        self.reported.append((tuple(values), samples))

    def finish(self) -> None:
        self.finished = True


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def engine(
    toy: Toy, stage: int, mailbox: Letters, link: NoServer, optimizer: Any = sgd, batches: Any = None
) -> StageEngine:
    return StageEngine(
        toy.plan,
        toy.folder,
        0,
        stage,
        workload=toy.workload(optimizer),
        mailbox=mailbox,
        link=link,
        weights=load_weights(toy.plan, toy.folder / "weights.safetensors"),
        constants=load_constants(toy.plan, toy.folder),
        batches=batches,
        seed=0,
        device="cpu",
        reproducible=True,
    )


def execute(target: StageEngine, tokens: str) -> None:
    for token in tokens.split():
        target.execute(Instruction.parse(token))


def two_stages(folder: Path, **network: Any) -> Toy:
    return write_toy(folder, Network(**network), cuts=[[2]], in_flight=[[4, 1]], nm=4, staleness=0)


def test_samples_and_losses_are_exact_with_a_short_minibatch(tmp_path: Path) -> None:
    toy = two_stages(tmp_path / "p", norm=True)
    batches = make_batches(1, 2)[0]
    front, back = Letters(), Letters()
    link = NoServer()
    first = engine(toy, 0, front, NoServer(), batches=lambda p: list(batches[p - 1]))
    last = engine(toy, 1, back, link)
    for p in (1, 2):
        execute(first, f"F{p} a{p}>1")
        back.incoming[MessageKind.ACTIVATIONS, p, 0] = front.sent[MessageKind.ACTIVATIONS, p, 1]
        execute(last, f"a{p}<0 F{p} B{p} U{p} g{p}>0")
    execute(last, "^0")
    last.finish()
    assert first.samples == last.samples == 2 * BATCH - 2
    assert set(last.losses) == {1, 2}
    assert first.losses == {}
    assert link.pushed == [(0, last.weights.trainable, 1)]
    assert link.reported == [(("bn.running_mean", "bn.running_var", "bn.num_batches_tracked"), 2 * BATCH - 2)] * 2
    assert link.finished
    sent = back.sent[MessageKind.GRADIENTS, 1, 0]
    assert list(sent) == ["h0", "h1"]
    assert all(gradient.shape == (BATCH, 16) for gradient in sent.values())


def test_what_the_stage_module_raises_names_the_line(tmp_path: Path) -> None:
    toy = two_stages(tmp_path / "p")
    leaves = [leaf[..., :1] if leaf.is_floating_point() else leaf for leaf in make_batches(1, 1)[0][0]]
    first = engine(toy, 0, Letters(), NoServer(), batches=lambda _: leaves)
    with pytest.raises(RunError, match="stage 0 raised RuntimeError: ") as caught:
        execute(first, "F1")
    assert caught.value.code == "HP519"
    assert f"({toy.plan.virtual_workers[0].stages[0].module}:" in str(caught.value.hint)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_finish_refuses_to_forget_a_minibatch(tmp_path: Path) -> None:
    toy = two_stages(tmp_path / "p")
    first = engine(toy, 0, Letters(), NoServer(), batches=lambda p: list(make_batches(1, p)[0][0]))
    execute(first, "F1")
    with pytest.raises(AssertionError, match="unfinished"):
        first.finish()


FAN = """
import torch
class Stage(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc0 = torch.nn.Module()
        self.fc0.bias = torch.nn.Parameter(torch.empty(1))
    def forward(self, x):
        return (self.fc0.bias * 1,)
"""


def fan_out(folder: Path) -> Toy:
    """Stage 0 sends one value to stages 1, 2 and 3."""
    toy = write_toy(folder, Network(), cuts=[[1, 2, 3]], in_flight=[[1, 1, 1, 1]], nm=1, staleness=0)
    (worker,) = toy.plan.virtual_workers
    (toy.folder / "stages/fan.py").write_text(FAN)
    port = Port(name="h0", kind="tensor", source=0, shape=(1,), dtype="float32", requires_grad=True, bytes=4)
    first = worker.stages[0].model_copy(
        update={
            "module": "stages/fan.py",
            "inputs": worker.stages[0].inputs[:1],
            "outputs": (port,),
            "sends": dict.fromkeys((1, 2, 3), ("h0",)),
        }
    )
    others = tuple(s.model_copy(update={"inputs": (port,)}) for s in worker.stages[1:])
    toy.plan = toy.plan.model_copy(
        update={"virtual_workers": (worker.model_copy(update={"stages": (first, *others)}),)}
    )
    return toy


@pytest.mark.parametrize(
    ("gradients", "change"), [((1.0, -1e8, 1e8), 1.0), ((2.0, None, 3.0), 5.0), ((None, None, None), 0.0)]
)
def test_gradients_of_several_consumers_are_summed_from_the_last(
    tmp_path: Path, gradients: tuple[float | None, ...], change: float
) -> None:
    """(g3 + g2) + g1, whatever the order in which they come: in float32 another order gives another sum."""
    toy = fan_out(tmp_path / "p")
    values = {"fc0.bias": torch.zeros(1)}
    mailbox = Letters()
    target = StageEngine(
        toy.plan,
        toy.folder,
        0,
        0,
        workload=toy.workload(lambda p: torch.optim.SGD(p, lr=1.0)),
        mailbox=mailbox,
        link=NoServer(),
        weights=values,
        constants={},
        batches=lambda p: list(make_batches(1, p)[0][0]),
        seed=0,
        device="cpu",
        reproducible=True,
    )
    for peer, g in enumerate(gradients, start=1):
        mailbox.incoming[MessageKind.GRADIENTS, 1, peer] = {"h0": None if g is None else torch.tensor([g])}
    execute(target, "F1 a1>1 a1>2 a1>3 g1<2 g1<1 g1<3 B1 U1")
    assert target.weights.parameters["fc0.bias"].item() == -change
    target.finish()


def test_a_missing_gradient_travels_as_none(tmp_path: Path) -> None:
    toy = two_stages(tmp_path / "p")
    path = toy.folder / "stages/vw0_stage1.py"
    path.write_text(path.read_text().replace("+ h0", "+ h0.detach()"))
    batch = make_batches(1, 1)[0][0]
    back = Letters()
    back.incoming[MessageKind.ACTIVATIONS, 1, 0] = {"y": batch[1], "h0": torch.ones(4, 16), "h1": torch.ones(4, 16)}
    last = engine(toy, 1, back, NoServer())
    execute(last, "a1<0 F1 B1 U1 g1>0")
    sent = back.sent[MessageKind.GRADIENTS, 1, 0]
    assert sent["h0"] is None
    assert sent["h1"].shape == (4, 16)


def test_values_are_sent_contiguous(tmp_path: Path) -> None:
    toy = two_stages(tmp_path / "p")
    path = toy.folder / "stages/vw0_stage0.py"
    path.write_text(path.read_text().replace("return (", "h1 = h1.t().contiguous().t()\n        return ("))
    mailbox = Letters()
    first = engine(toy, 0, mailbox, NoServer(), batches=lambda p: list(make_batches(1, p)[0][0]))
    execute(first, "F1 a1>1")
    assert mailbox.sent[MessageKind.ACTIVATIONS, 1, 1]["h1"].is_contiguous()


def test_optimizers_may_ask_for_names(tmp_path: Path) -> None:
    toy = two_stages(tmp_path / "p")
    got: list[str] = []

    def make(named_parameters: Any) -> torch.optim.Optimizer:
        got.extend(name for name, _ in named_parameters)
        return sgd([p for _, p in named_parameters])

    engine(toy, 0, Letters(), NoServer(), make)
    assert got == ["fc0.weight", "fc0.bias", "fc1.weight", "fc1.bias"]


def raising_optimizer(parameters: Any) -> torch.optim.Optimizer:
    raise ValueError(f"{len(parameters)} are too many")


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (raising_optimizer, r"optimizer\(\) raised ValueError: 4 are too many"),
        (lambda p: torch.optim.LBFGS(p), r"LBFGS.step\(\) needs 'closure'"),
        (lambda p: len(p), r"optimizer\(\) returned int, which has no step\(\)"),
    ],
)
def test_optimizers_that_cannot_work_are_refused(tmp_path: Path, optimizer: Any, message: str) -> None:
    toy = two_stages(tmp_path / "p")
    with pytest.raises(RunError, match=message) as caught:
        engine(toy, 0, Letters(), NoServer(), optimizer)
    assert caught.value.code == "HP518"
    assert caught.value.hint


def test_nothing_to_train_means_no_optimizer_push_or_pull(tmp_path: Path) -> None:
    toy = write_toy(tmp_path / "p", Network(frozen=True), cuts=[[1]], in_flight=[[2, 1]], nm=2, staleness=0)
    link, mailbox = NoServer(), Letters()
    first = engine(toy, 0, mailbox, link, batches=lambda p: list(make_batches(1, p)[0][0]))
    mailbox.incoming[MessageKind.GRADIENTS, 1, 1] = {"h0": torch.ones(4, 16)}
    execute(first, "F1 a1>1 g1<1 B1 U1 ^0 v0")
    first.finish()
    assert first.optimizer is None
    assert link.pushed == []
    assert link.finished


def test_missing_values_are_named(tmp_path: Path) -> None:
    toy = two_stages(tmp_path / "p")
    path = toy.folder / "weights.safetensors"
    with pytest.raises(ArtifactError, match=r"HP416.*has no fc9.weight"):
        load_weights(toy.plan, path, ["fc0.bias", "fc9.weight"])
    assert list(load_weights(toy.plan, path, ["fc0.bias"])) == ["fc0.bias"]
    path.write_bytes(b"damaged")
    with pytest.raises(ArtifactError, match=r"HP416.*cannot be read"):
        load_weights(toy.plan, path)
    path.unlink()
    with pytest.raises(ArtifactError, match=r"HP416.*no such file"):
        load_weights(toy.plan, path)


def test_seeds_depend_on_every_argument_and_never_change() -> None:
    seeds = [minibatch_seed(*a) for a in [(0, 0, 1, 0), (1, 0, 1, 0), (0, 1, 1, 0), (0, 0, 2, 0), (0, 0, 1, 1)]]
    seeds += [data_seed(0, 0, 1), epoch_seed(0, 0), epoch_seed(0, 1)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= s < 2**63 for s in seeds)
    assert 0 <= epoch_seed(3, 9) < 2**31
    # What a saved run was trained with must not move under it.
    assert minibatch_seed(0, 0, 1, 0) == 8812588279635027609
