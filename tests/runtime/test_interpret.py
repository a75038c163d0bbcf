"""The interpreter trains exactly what the definition of WSP says, and keeps its bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import wsp
from toy import Network, Toy, make_batches, write_toy

from hetpipe_compiler.errors import HetpipeError
from hetpipe_compiler.runtime.interpret import InterpretResult, interpret

torch.set_num_threads(1)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}
CUTS = ((2,), (1, 3), ())
IN_FLIGHT = {1: ((1, 1), (1, 1, 1), (1,)), 4: ((4, 1), (4, 2, 1), (3,))}
#: Enough that gates are passed at D = 4; the last wave is short.
MINIBATCHES = {1: 10, 4: 30}


def make(
    folder: Path, network: Network, *, workers: int, nm: int, staleness: int, speeds: Sequence[float] = (1, 1.7, 3)
) -> Toy:
    return write_toy(
        folder,
        network,
        cuts=CUTS[:workers],
        in_flight=IN_FLIGHT[nm][:workers],
        nm=nm,
        staleness=staleness,
        speeds=speeds[:workers],
    )


def oracle(toy: Toy, batches: Any, make_optimizer: Any, make_scheduler: Any = None) -> wsp.Outcome:
    workers = len(toy.plan.virtual_workers)
    return wsp.train(
        [toy.network.whole() for _ in range(workers)],
        [[wsp.Group(names, w) for names, w in toy.groups(vw)] for vw in range(workers)],
        batches,
        nm=toy.plan.nm,
        staleness=toy.plan.staleness,
        scale=1 / workers,
        make_optimizer=make_optimizer,
        make_scheduler=make_scheduler,
        loss_of=lambda model, batch: model(*batch)[0],
    )


def run(
    toy: Toy, batches: Any, make_optimizer: Any, *, reproducible: bool = True, scheduler: Any = None
) -> InterpretResult:
    workload = toy.workload(make_optimizer, batches, scheduler)
    return interpret(toy.plan, toy.folder, workload, minibatches=len(batches[0]), seed=3, reproducible=reproducible)


def assert_same(result: InterpretResult, expected: wsp.Outcome) -> None:
    for name, value in expected.weights.items():
        assert torch.equal(result.weights[name], value), name
    for vw, losses in enumerate(expected.losses):
        assert [result.losses[vw][p] for p in range(1, len(losses) + 1)] == losses


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("nm", [1, 4])
def test_equals_the_oracle_bit_for_bit(tmp_path: Path, nm: int, staleness: int, workers: int, optimizer: str) -> None:
    toy = make(tmp_path / "p", Network(), workers=workers, nm=nm, staleness=staleness)
    batches = make_batches(workers, MINIBATCHES[nm])
    result = run(toy, batches, OPTIMIZERS[optimizer])
    expected = oracle(toy, batches, OPTIMIZERS[optimizer])
    assert_same(result, expected)
    moved = max((expected.weights[n] - v).abs().max().item() for n, v in toy.network.initial().items())
    assert moved > 1e-2


@pytest.mark.parametrize("minibatches", [1, 2, 3, 4, 5, 7])
def test_runs_of_fewer_minibatches_than_stages_or_waves(tmp_path: Path, minibatches: int) -> None:
    toy = make(tmp_path / "p", Network(), workers=2, nm=4, staleness=0)
    batches = make_batches(2, minibatches)
    assert_same(run(toy, batches, OPTIMIZERS["adamw"]), oracle(toy, batches, OPTIMIZERS["adamw"]))


@pytest.mark.parametrize("cuts", [((2,), (1, 3)), ((1, 2, 3, 4), ()), ((4,), (2, 4))])
def test_tied_weights_cut_apart_equal_the_oracle(tmp_path: Path, cuts: tuple[tuple[int, ...], ...]) -> None:
    network = Network(tied=True)
    in_flight = [[4, 3, 2, 2, 1][: len(c) + 1] for c in cuts]
    toy = write_toy(tmp_path / "p", network, cuts=cuts, in_flight=in_flight, nm=4, staleness=0)
    batches = make_batches(2, 18)
    assert_same(run(toy, batches, OPTIMIZERS["adamw"]), oracle(toy, batches, OPTIMIZERS["adamw"]))


def test_schedulers_step_once_a_minibatch_and_frozen_weights_stay(tmp_path: Path) -> None:
    toy = make(tmp_path / "p", Network(frozen=True), workers=2, nm=4, staleness=1)
    batches = make_batches(2, 18)

    def decay(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    result = run(toy, batches, OPTIMIZERS["sgd"], scheduler=decay)
    assert_same(result, oracle(toy, batches, OPTIMIZERS["sgd"], decay))
    assert torch.equal(result.weights["fc0.weight"], toy.network.initial()["fc0.weight"])


def test_batchnorm_statistics_are_merged_over_virtual_workers(tmp_path: Path) -> None:
    toy = make(tmp_path / "p", Network(norm=True), workers=2, nm=4, staleness=0)
    batches = make_batches(2, 18)
    batches[1][0] = (batches[1][0][0][:3], batches[1][0][1][:3])  # fewer samples in virtual worker 1
    result = run(toy, batches, OPTIMIZERS["sgd"])
    expected = oracle(toy, batches, OPTIMIZERS["sgd"])
    assert_same(result, expected)
    samples = [sum(len(x) for x, _ in b) for b in batches]
    local = [dict(m.named_buffers()) for m in expected.models]
    for name in ("bn.running_mean", "bn.running_var"):
        mean = sum(b[name].double() * n for b, n in zip(local, samples, strict=True)) / sum(samples)
        torch.testing.assert_close(result.weights[name], mean.float(), rtol=1e-6, atol=0)
    assert result.weights["bn.num_batches_tracked"].item() == 36


@pytest.mark.parametrize("nesterov", [False, True])
def test_without_staleness_equals_one_process_on_the_large_batch(tmp_path: Path, nesterov: bool) -> None:
    toy = make(tmp_path / "p", Network(dtype="float64", tied=True), workers=3, nm=1, staleness=0)
    batches = make_batches(3, 12, "float64")

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.01)

    result = run(toy, batches, sgd)
    model = toy.network.whole()
    optimizer = sgd(model.parameters())
    for shards in zip(*batches, strict=True):
        optimizer.zero_grad()
        model(*(torch.cat(parts) for parts in zip(*shards, strict=True)))[0].backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(result.weights[name], parameter.detach(), rtol=1e-10, atol=1e-12)


def test_reproducible_runs_have_the_same_bits_whatever_the_timing(tmp_path: Path) -> None:
    network, batches = Network(dropout=True), make_batches(3, 18)
    results = []
    for i, speeds in enumerate([(1, 1, 1), (5, 1, 0.1), (0.1, 3, 1)]):
        toy = make(tmp_path / str(i), network, workers=3, nm=4, staleness=1, speeds=speeds)
        results.append(run(toy, batches, OPTIMIZERS["adamw"]))
    for name in network.initial():
        assert torch.equal(results[0].weights[name], results[1].weights[name])
        assert torch.equal(results[0].weights[name], results[2].weights[name])
    assert results[0].losses == results[1].losses == results[2].losses
    orders = [[(e["vw"], e["wave"]) for e in r.events if e["event"] == "push"] for r in results]
    assert orders[0] != orders[1]
    assert orders[1] != orders[2]


@pytest.mark.parametrize("reproducible", [True, False])
@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("nm", [1, 4])
def test_clock_log_breaks_no_bound(tmp_path: Path, nm: int, staleness: int, reproducible: bool) -> None:
    toy = make(tmp_path / "p", Network(tied=True), workers=3, nm=nm, staleness=staleness)
    result = run(toy, make_batches(3, MINIBATCHES[nm]), OPTIMIZERS["sgd"], reproducible=reproducible)
    forwards = [e for e in result.events if e["event"] == "forward"]
    pushes = [e for e in result.events if e["event"] == "push"]
    pulls = [e for e in result.events if e["event"] == "pull"]
    assert len(forwards) == MINIBATCHES[nm] * 6
    for e in forwards:
        p, in_flight = e["minibatch"], toy.in_flight[e["vw"]][e["stage"]]
        assert e["own"] == max(0, p - in_flight)
        # The start rule, written out again.
        c = p // nm - 1 if p % nm == 0 else (p - 1) // nm - 1
        assert e["clock"] >= max(0, c - staleness)
        if reproducible:
            assert e["clock"] == max(0, c - staleness)
    if (nm, staleness, reproducible) == (4, 4, False):  # fresh weights are used where nothing waits for them, too
        places = sorted(forwards, key=lambda e: (e["vw"], e["stage"], e["minibatch"]))
        ungated = [(a, b) for a, b in pairwise(places) if a["stage"] == b["stage"] and b["minibatch"] % nm > 1]
        assert any(b["clock"] > a["clock"] for a, b in ungated)
    # The start rule gates the last minibatch of a wave. A short last wave has none, so its push may be one more ahead.
    lead = [e["wave"] + 1 - e["clock"] for e in pushes if (e["wave"] + 1) * nm <= MINIBATCHES[nm]]
    assert max(lead) == staleness + 1  # the bound is reached: the fastest virtual worker was held back
    assert all(e["clock"] == e["need"] if reproducible else e["clock"] >= e["need"] for e in pulls)
    assert {e["vw"] for e in result.events if e["event"] == "finish"} == {0, 1, 2}


class _Counting(torch.optim.Optimizer):
    """Adds 1 to every parameter a step, and notes the first parameter's values just before its steps."""

    seen: list[list[float]] = []

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.values: list[float] = []
        _Counting.seen.append(self.values)

    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        self.values.append(self.param_groups[0]["params"][0].flatten()[0].item())
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(1)


@pytest.mark.parametrize("reproducible", [True, False])
@pytest.mark.parametrize("staleness", [0, 2])
def test_no_update_is_lost_or_added_twice(tmp_path: Path, staleness: int, reproducible: bool) -> None:
    toy = make(tmp_path / "p", Network(dtype="float64"), workers=3, nm=4, staleness=staleness)
    toy.plan = toy.plan.model_copy(update={"update_scale": 1.0})
    batches = make_batches(3, 30, "float64")
    zeros = {n: torch.zeros_like(v) for n, v in toy.network.initial().items()}
    _Counting.seen = []
    result = interpret(
        toy.plan,
        toy.folder,
        toy.workload(_Counting, batches),
        minibatches=30,
        seed=0,
        reproducible=reproducible,
        weights=zeros,
    )
    for name in zeros:
        assert (result.weights[name] == 3 * 30).all(), name
    assert len(_Counting.seen) == 6
    for values in _Counting.seen:
        for p, value in enumerate(values, start=1):
            others = value - (p - 1)
            needed = max(0, -(-(p - (staleness + 1) * 4 - 3) // 4))
            assert others >= 2 * 4 * needed
            assert others <= 2 * 30


def test_free_running_trains_and_repeats(tmp_path: Path) -> None:
    toy = make(tmp_path / "p", Network(), workers=3, nm=4, staleness=1)
    batches = [b * 10 for b in make_batches(3, 4)]
    results = [run(toy, batches, OPTIMIZERS["adamw"], reproducible=False) for _ in range(2)]
    assert results[0].events == results[1].events
    for losses in results[0].losses:
        assert losses[37] < 0.7 * losses[1]


def test_events_name_every_instruction_in_virtual_time(tmp_path: Path) -> None:
    toy = make(tmp_path / "p", Network(), workers=2, nm=4, staleness=0)
    heard: list[dict[str, Any]] = []
    batches = make_batches(2, 6)
    result = interpret(
        toy.plan,
        toy.folder,
        toy.workload(OPTIMIZERS["sgd"], batches),
        minibatches=6,
        seed=0,
        reproducible=True,
        on_event=heard.append,
    )
    assert heard == list(result.events)
    times = [e["t_ms"] for e in heard]
    assert times == sorted(times)
    tokens = [e["token"] for e in heard if e["event"] == "instruction" and (e["vw"], e["stage"]) == (0, 0)]
    assert [t for t in tokens if t[0] in "FBU^v"] == (
        [
            "F1",
            "F2",
            "F3",
            "F4",
            "B1",
            "U1",
            "F5",
            "B2",
            "U2",
            "F6",
            "B3",
            "U3",
            "B4",
            "U4",
            "^0",
            "B5",
            "U5",
            "B6",
            "U6",
            "^1",
        ]
    )
    losses = [e for e in heard if e["event"] == "loss" and e["vw"] == 1]
    assert [(e["minibatch"], e["samples"]) for e in losses] == [(p, 6) for p in range(1, 6)] + [(6, 4)]


def test_a_schedule_that_waits_for_ever_is_reported(tmp_path: Path) -> None:
    toy = make(tmp_path / "p", Network(), workers=2, nm=1, staleness=0)
    path = toy.folder / "schedule.csv"
    path.write_text(path.read_text().replace("v0", "v1"))
    with pytest.raises(HetpipeError, match="HP437"):
        run(toy, make_batches(2, 6), OPTIMIZERS["sgd"])
