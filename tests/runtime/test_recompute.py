"""Stages that recompute train the same numbers as those that keep everything, and keep less."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kinds import compile_kind
from oracles import wsp
from safetensors.torch import load_file
from test_interpret import OPTIMIZERS, assert_same, oracle, run
from test_stage import Letters, NoServer, engine, execute
from toy import Network, Toy, is_buffer, make_batches, write_toy
from toy_run import hetpipe_run, write_runnable

from hetpipe_compiler.frontend.load import load_workload
from hetpipe_compiler.ir.plan import Plan
from hetpipe_compiler.ir.schedule import Schedule
from hetpipe_compiler.passes.schedules.wsp import wsp_program
from hetpipe_compiler.runtime.interpret import interpret
from hetpipe_compiler.runtime.randomness import seed_torch
from hetpipe_compiler.runtime.recompute import buffers_replaced, kept_inputs, nothing_saved, random_state_kept

torch.set_num_threads(1)


def recomputing(plan: Plan, *, stages: set[int] | None = None, in_flight: int | None = None) -> Plan:
    """The plan with recomputation on these stages (None: all), and ``in_flight`` - index minibatches in flight."""
    workers = []
    for worker in plan.virtual_workers:
        changed = []
        for stage in worker.stages:
            w = stage.in_flight if in_flight is None else max(1, in_flight - stage.index)
            update = {"recompute": stages is None or stage.index in stages, "in_flight": w}
            changed.append(stage.model_copy(update=update))
        workers.append(worker.model_copy(update={"stages": tuple(changed)}))
    return plan.model_copy(update={"virtual_workers": tuple(workers)})


def recompute_toy(
    folder: Path, network: Network, cuts: tuple[tuple[int, ...], ...], *, stages: set[int] | None = None
) -> Toy:
    in_flight = [[4, 3, 2, 2, 1][: len(c) + 1] for c in cuts]
    toy = write_toy(folder, network, cuts=cuts, in_flight=in_flight, nm=4, staleness=1)
    toy.plan = recomputing(toy.plan, stages=stages)
    return toy


@pytest.mark.parametrize("stages", [None, {0}, {1}])
@pytest.mark.parametrize("cuts", [((2,), (1, 3)), ((1, 2, 3, 4), ())])
@pytest.mark.parametrize("network", [Network(norm=True), Network(tied=True, frozen=True)], ids=["norm", "tied"])
def test_equals_the_oracle_bit_for_bit(
    tmp_path: Path, network: Network, cuts: tuple[tuple[int, ...], ...], stages: set[int] | None
) -> None:
    toy = recompute_toy(tmp_path / "p", network, cuts, stages=stages)
    batches = make_batches(2, 14)
    result, expected = run(toy, batches, OPTIMIZERS["adamw"]), oracle(toy, batches, OPTIMIZERS["adamw"])
    assert_same(result, expected)
    if network.norm:  # every F counts once
        assert result.weights["bn.num_batches_tracked"].item() == 28
        _assert_merged_statistics(result.weights, expected, batches)


def _assert_merged_statistics(
    weights: dict[str, torch.Tensor], expected: wsp.Outcome, batches: list[list[tuple[torch.Tensor, torch.Tensor]]]
) -> None:
    samples = [sum(len(x) for x, _ in b) for b in batches]
    local = [dict(m.named_buffers()) for m in expected.models]
    for name in ("bn.running_mean", "bn.running_var"):
        mean = sum(b[name].double() * n for b, n in zip(local, samples, strict=True)) / sum(samples)
        torch.testing.assert_close(weights[name], mean.float(), rtol=1e-6, atol=0)


#: Kinds of `models` with what makes a second run dangerous: buffers read and written, writes into the batch and into
#: activations, random numbers, autocast and no_grad regions, tied parameters, recurrent kernels.
KINDS = (
    "BNConvNet", "TiedLM", "InplaceNet", "CompareInplace", "Autocast", "MixedDtype", "NoGrad", "RandomInForward",
    "DropPath", "Recurrent", "BufferWrites", "CalledTwice", "WritesBatch", "Parametrized", "FrozenLoRA", "Checkpointed",
)  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_model_gets_the_same_bits(tmp_path: Path, name: str) -> None:
    """One minibatch in flight and several; with several, what F changes lies between a first run and its second."""
    folder, loaded, plan = compile_kind(name, tmp_path / "plan", most=2)
    in_flight = [[max(1, 3 - stage.index) for stage in w.stages] for w in plan.virtual_workers]
    programs = tuple(wsp_program(w, 3, 0) for w in in_flight)
    (folder / "schedule.csv").write_text(Schedule(3, 0, programs).to_csv())
    plan = plan.model_copy(update={"nm": 3})
    results = []
    for stages in (set[int](), None):
        changed = recomputing(plan, stages=stages, in_flight=3)
        results.append(interpret(changed, folder, loaded, minibatches=7, seed=3, reproducible=True))
    plain, recomputed = results
    assert recomputed.losses == plain.losses
    for key, value in plain.weights.items():
        assert torch.equal(recomputed.weights[key], value), key
    assert [e for e in recomputed.events if e["event"] == "loss"] == [e for e in plain.events if e["event"] == "loss"]


def test_processes_agree_with_the_interpreter_without(tmp_path: Path) -> None:
    network = Network(norm=True, tied=True, dropout=True)
    plan = write_runnable(tmp_path / "plan", network, cuts=((2,),), in_flight=((3, 1),), nm=3)
    loaded = load_workload(tmp_path / "plan/model.py", {})
    expected = interpret(plan, tmp_path / "plan", loaded, minibatches=8, seed=5, reproducible=True)
    (tmp_path / "plan/plan.json").write_text(recomputing(plan).to_json())
    done = hetpipe_run(tmp_path / "plan", tmp_path / "run", "--steps", "8", "--seed", "5", "--reproducible")
    assert done.returncode == 0, done.stderr
    weights = load_file(tmp_path / "run/weights.safetensors")
    for name, value in expected.weights.items():
        assert torch.equal(weights[name], value), name


@pytest.mark.parametrize("minibatches", [1, 3])
def test_memory_between_forward_and_backward_is_the_inputs_and_the_buffers(tmp_path: Path, minibatches: int) -> None:
    """Bytes allocated and not freed again by the forwards, as torch's own profiler counts them."""
    network = Network(norm=True, dropout=True)
    toy = write_toy(tmp_path / "p", network, cuts=[[4]], in_flight=[[4, 1]], nm=4, staleness=0)
    plain = _kept_bytes(toy, minibatches)
    toy.plan = recomputing(toy.plan)
    x, y = make_batches(1, 2)[0][0]
    buffers = [value for name, value in network.initial().items() if is_buffer(name)]
    needed = minibatches * sum(value.nbytes for value in (x, y, *buffers))
    assert _kept_bytes(toy, minibatches) == needed
    assert plain > 8 * needed


def _kept_bytes(toy: Toy, minibatches: int) -> int:
    batches, mailbox = make_batches(1, 9)[0], Letters()
    first = engine(toy, 0, mailbox, NoServer(), batches=lambda p: [leaf.clone() for leaf in batches[p - 1]])
    execute(first, "F1 a1>1")  # what is made once
    mailbox.sent.clear()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        for p in range(2, minibatches + 2):
            execute(first, f"F{p} a{p}>1")
            mailbox.sent.clear()
    events = seen.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


def test_nothing_is_saved_but_paths_stay_those_of_training() -> None:
    """The first run has gradients on (operators choose by that), and its backward cannot run by mistake."""
    x = torch.ones(3, requires_grad=True)
    with nothing_saved():
        y = x.exp() * x
    assert y.requires_grad
    with pytest.raises(AssertionError, match="thrown away"):
        y.sum().backward()


def test_buffers_come_back_even_after_an_error() -> None:
    module = torch.nn.BatchNorm1d(2)
    own = module.running_mean
    with pytest.raises(ValueError, match="more than 1"), buffers_replaced(module, {"running_mean": torch.ones(2)}):
        module(torch.ones(1, 2))
    assert module.running_mean is own
    with buffers_replaced(module, {"running_mean": torch.ones(2)}):
        module(torch.ones(3, 2))
    assert own is not None
    assert own.sum() == 0


def test_random_numbers_go_on_as_if_nothing_had_run_again() -> None:
    seed_torch(1)
    torch.rand(3)
    expected = torch.rand(2)
    seed_torch(1)
    torch.rand(3)
    with random_state_kept(torch.device("cpu")):
        seed_torch(2)
        torch.rand(7)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(60.0).view(5, 12)[1:, 3:7],
        torch.arange(60.0)[7:13],
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(3.0).expand(4, 3),
        torch.empty(0, 3),
        torch.tensor(True),
    ],
)
def test_kept_batches_are_laid_out_as_the_originals(tmp_path: Path, value: torch.Tensor) -> None:
    toy = write_toy(tmp_path / "p", Network(), cuts=[[2]], in_flight=[[1, 1]], nm=1, staleness=0)
    port = toy.plan.virtual_workers[0].stages[0].inputs[0]
    (kept,) = kept_inputs({"x": value}, [port]).values()
    assert torch.equal(kept, value)
    assert kept.stride() == value.stride()
    if value.numel():
        assert kept.data_ptr() != value.data_ptr()
        assert kept.data_ptr() % 64 == value.data_ptr() % 64
