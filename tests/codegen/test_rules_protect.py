"""Each rule that keeps a model's meaning is needed: without it, a test of the suite fails.

A row names the trouble (as users of such systems met it), the test that stands against it, and the rule that the test
protects; here the rule is taken out and the test must fail, by what it compares.
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from removal import Removal, is_there, without, without_in_children

TESTS = Path(__file__).parents[1]
#: What tests of a whole model are called.
STAGES = "codegen/test_model_kinds.py::test_stages_compute_what_the_model_computes[{}]"
REFUSED = "codegen/test_model_kinds.py::test_what_cannot_be_kept_is_refused_at_its_line[{}]"

_PACKAGE = "hetpipe_compiler"


@dataclass(frozen=True)
class Rule:
    """A row.

    Attributes:
        trouble: What would go wrong.
        test: The test, below ``tests``; a model's name stands for `STAGES`.
        sees: A pattern in what the test says without the rule.
        removals: What is taken out.
        in_children: The rule is at work in processes that the test starts.
    """

    trouble: str
    test: str
    sees: str
    removals: tuple[Removal, ...]
    in_children: bool = False


def rule(
    trouble: str, test: str, sees: str, function: str, text: str, instead: str, times: int = 1, **more: bool
) -> Rule:
    test = test if "::" in test else STAGES.format(test)
    return Rule(trouble, test, sees, (Removal(f"{_PACKAGE}.{function}", text, instead, times),), **more)


RULES: tuple[Rule, ...] = (
    # --- what is traced ---
    rule("a branch on values is not told from other failures", REFUSED.format("BranchOnValue"), "depends on a tensor",
         "frontend.export:cannot_export", "isinstance(error, GuardOnDataDependentSymNode)", "False"),
    rule("a number counted in forward is frozen", REFUSED.format("Counter"), "DID NOT RAISE",
         "frontend.call_to_call:refuse_state", "len(left) < len(observed.changed) or", ""),
    rule("a tensor kept from call to call is frozen", REFUSED.format("PlainState"), "DID NOT RAISE",
         "frontend.call_to_call:refuse_state", "raise _keeps_state(step, place, \"\", path)", "pass"),
    rule("what a call leaves for the next is frozen", REFUSED.format("KeepsLast"), "DID NOT RAISE",
         "frontend.call_to_call:refuse_state", "or any(_follows_batch(program, tensor) for tensor in left)", ""),
    rule("a buffer grows, and the plan's does not", REFUSED.format("Resized"), "DID NOT RAISE|HP1",
         "frontend.call_to_call:_write_assigned", "new.shape != old.shape or", ""),
    rule("a buffer assigned in forward keeps its old value", "BufferWrites", "buffer assigned",
         "frontend.call_to_call:ObservedStep.forward", "_write_assigned(module, before)", "pass"),
    rule("constants of the loss have no values on meta",
         "frontend/test_capture.py::test_a_loss_with_state_needs_no_real_model", "built for real",
         "frontend.names:Names.of", "if self._loss is not None and target.startswith(_LOSS):", "if False:"),
    rule("a constant made on the data's device loses its value", "frontend/test_export_on_meta.py::"
         "test_a_constant_made_on_the_inputs_device_keeps_its_value_without_a_real_model", "built",
         "frontend.export:_meta_as_cpu", "if tensor.is_meta:", "if False:"),
    rule("a constant of a later stage is not made there", "ConstInForward", "NameError",
         "codegen.stage_cut:_Cutter._with_constants", "if self._home_of(i) is None]", "if False]"),
    rule("the device of the compiling machine stays in the stage",
         "codegen/test_stage_module.py::test_moves_to_another_dtype_and_device", "device|meta",
         "codegen.stage_module:_Writer._value", 'return "device"', "return 'torch.device(\"cpu\")'"),
    rule("a batch size seen once is taken for all", "frontend/test_capture.py::"
         "test_whether_the_batch_size_is_free[SizesCross-True-None]", "assert False is True",
         "frontend.export:_export", "{0: auto} if t.dim() else {}", "{}"),
    rule("a fixed batch size passes for a free one", "frontend/test_capture.py::"
         "test_whether_the_batch_size_is_free[FixedBatch-False-constant]", "assert True is False",
         "frontend.export:_is_free", "and not size.node.expr.is_number", ""),
    rule("noise is drawn in every stage that reads it", "RandomInForward", "cut",
         "passes.fuse_atomic:_constants", "not is_random(node) and", ""),
    rule("noise that nobody reads is not drawn, and all that follows differs", "RandomInForward", "cut",
         "passes.normalize:_drop_unread", "and not is_random(node)", ""),
    rule("flags and numbers of the batch get lost", "NestedIO", "",
         "frontend.training_step:TrainingStep.__init__", "else leaf for leaf in leaves]",
         "else None for leaf in leaves]"),
    rule("an optional argument takes another one's place", "OptionalKeywords", "",
         "frontend.training_step:TrainingStep.forward", "zip(self.tensor_leaves, tensors, strict=True)",
         "enumerate(tensors)"),
    rule("a target by name reaches the model", "OptionalKeywords", "",
         "frontend.training_step:split_batch", "if k not in keys}", "}"),
    rule("a keyword as a name gives a syntax error in nobody's file", REFUSED.format("Keyword"), "HP1|Syntax|DID NOT",
         "frontend.capture:_check_names", "if word is not None:", "if False:"),
    rule("parameters that overlap become two", REFUSED.format("SharedMemory"), "DID NOT RAISE",
         "frontend.names:_refuse_overlaps", "if other is not value and", "if False and"),
    rule("autocast that is off without a GPU is captured as off", REFUSED.format("EarlyAutocast"), "DID NOT RAISE|HP1",
         "frontend.capture:_refuse_control_flow", "and node.args[0] == \"cuda\"", "and False"),
    # --- regions ---
    rule("no_grad is lost, and frozen parts get gradients", "NoGrad", "",
         "frontend.regions:_copy_region", "env[node].meta[_KEY] = contexts", "pass"),
    rule("autocast is lost", "Autocast", "",
         "frontend.regions:_copy_region", "env[node].meta[_KEY] = contexts", "pass"),
    rule("regions are not written down", "NoGrad", "",
         "codegen.stage_module:_Writer._body", "yield from _enter(around)", "yield from _enter(())"),
    rule("a conversion of dtypes is dropped", "MixedDtype", "",
         "passes.normalize:_drop_idle_conversions", "and before.dtype == after.dtype", ""),
    rule("a model under inference_mode trains", "Inference", "",
         "frontend.frozen_calls:watched_calls", "torch.no_grad() if self.mode else contextlib.nullcontext()",
         "contextlib.nullcontext()"),
    rule("a branch on Python's random numbers is frozen", REFUSED.format("PythonRandom"), "DID NOT RAISE",
         "frontend.frozen_calls:refusing_other_random_numbers", "if _state() != before:", "if False:"),
    rule("a seed set in forward is left out", REFUSED.format("Seeded"), "DID NOT RAISE",
         "frontend.frozen_calls:watched_calls", "raise _refusal", "return (_refusal)"),
    rule("what no_grad writes into loses its gradient", "QuietWrite", "",
         "passes.annotate_cost:_CostInterpreter._measure",
         "kept = not grad and any(self._wants_gradient(n) for n in mutated_arguments(node))", "kept = False"),
    rule("what is written into a value without a gradient gives it none", "FilledByParts", "",
         "passes.annotate_cost:_CostInterpreter._measure",
         "for target in mutated_arguments(node) if differentiable else ():", "for target in ():"),
    # --- gradients of the model's own ---
    rule("a backward of the model's own is lost", REFUSED.format("StraightThrough"), "DID NOT RAISE",
         "frontend.own_gradients:OwnGradients.check", "if not same:", "if False:"),
    rule("a backward that only saves memory is refused", "OwnFunction", "HP119",
         "frontend.own_gradients:_is_derivative", "count == other_count and", "False and"),
    rule("a hook on a value is lost", REFUSED.format("HooksGradient"), "DID NOT RAISE",
         "frontend.own_gradients:OwnGradients.watched", "raise _refusal", "return (_refusal)"),
    rule("a hook on a parameter is lost", REFUSED.format("ParameterHook"), "DID NOT RAISE",
         "frontend.own_gradients:refuse_hooks",
         "if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:", "if False:"),
    rule("a hook on a module's gradient is lost", REFUSED.format("ModuleHook"), "DID NOT RAISE",
         "frontend.own_gradients:refuse_hooks",
         "if module._backward_hooks or module._backward_pre_hooks:", "if False:"),
    rule("reentrant checkpointing has no gradient", "Reentrant", "",
         "frontend.own_gradients:OwnGradients.watched", "if cls is CheckpointFunction:", "if False:"),
    rule("reentrant checkpointing has a gradient where it has none", "Reentrant", "",
         "frontend.own_gradients:_checkpointed", "contextlib.nullcontext() if wanted else torch.no_grad()",
         "contextlib.nullcontext()"),
    # --- dropout, batch norm: train and eval mode ---
    rule("train flags stay frozen in eval mode", "BNConvNet", "",
         "passes.eval_mode:_Comparison._mark", "if changed:", "if False:"),
    rule("what only training has runs in eval mode", "AuxiliaryHead", "",
         "passes.eval_mode:_Comparison._mark", "if ours not in self._met:", "if False:"),
    rule("a value of training is read in eval mode", "DropPath", "",
         "codegen.stage_module:_Writer._statement", "self._value(evaluated.stands_for_it)", "call"),
    rule("batch norm's counter is dropped because nobody reads it", "BNConvNet", "buffer",
         "passes.normalize:_drop_unread", "not mutated_arguments(node) and", ""),
    rule("two calls of one batch norm write statistics in two stages", "CalledTwice", "buffer",
         "passes.normalize:mutated_arguments", 'names += ["running_mean", "running_var"]', "pass"),
    rule("the plan does not say which buffers change",
         "codegen/test_model_kinds.py::test_the_plan_says_which_buffers_change[NoGrad]", "",
         "passes.normalize:normalize", '"mutated": b.name in mutated', '"mutated": False'),
    # --- writes in place ---
    rule("a write is parted from what shares its memory", "InplaceNet", "",
         "passes.fuse_atomic:fuse_atomic", "groups.union(*joined)", "pass"),
    rule("components that wait for each other are cut apart",
         "passes/test_fuse_atomic.py::test_every_order_is_a_legal_execution[InplaceNet]", "comes after",
         "passes.fuse_atomic:_order", "nx.lexicographical_topological_sort(merged, key=key.__getitem__)",
         "sorted(merged, key=key.__getitem__)"),
    rule("a view made before a write misses it", "InplaceNet", "",
         "passes.normalize:_functionalize",
         "if any(order[user] > order[node] for other in others for user in other.users):", "if False:"),
    rule("a functional twin has another dtype", "CompareInplace", "",
         "passes.normalize:_same_result", "result.dtype == into.dtype and", ""),
    rule("a write into a buffer is lost", "BufferWrites", "",
         "passes.normalize:_functionalize", 's.op == "get_attr"', "False"),
    rule("what shares memory on another device only is parted",
         "passes/test_normalize.py::test_what_may_share_memory_elsewhere_counts_as_sharing", "assert",
         "passes.normalize:_aliased_arguments",
         "if not any(r.alias_info is not None for r in schema.returns):", "if True:"),
    rule("a parameter is written in forward", REFUSED.format("WritesParameter"), "DID NOT RAISE",
         "passes.normalize:_refuse_written_parameters", "if storages.of(written) in held:", "if False:"),
    rule("a parameter is written through a view", REFUSED.format("WritesParameterView"), "DID NOT RAISE",
         "passes.normalize:_refuse_written_parameters", "if storages.of(written) in held:", "if written in held:"),
    rule("what memory looks like does not travel", "passes/test_fuse_atomic.py::test_strides_do_not_travel", "assert",
         "passes.fuse_atomic:fuse_atomic", "or node.target in LAYOUT", ""),
    rule("a view counts on a layout that another device does not give",
         "passes/test_normalize.py::test_a_view_of_unwritten_memory_becomes_a_reshape", "assert",
         "passes.normalize:_free_layouts", "node.target = torch.ops.aten.reshape.default", "pass"),
    rule("a tuple is parted from its items", "passes/test_fuse_atomic.py::test_tuples_stay_with_their_items", "assert",
         "passes.fuse_atomic:fuse_atomic", "node.target is getitem or", ""),
    rule("what derives from a written buffer is cloned", "BufferWrites", "",
         "passes.fuse_atomic:_constants", "or storages.of(n) in written", ""),
    rule("a plain tensor is written, and nobody keeps it", REFUSED.format("WritesPlain"), "DID NOT RAISE",
         "passes.normalize:_refuse_other_writes", "if plain:", "if False:"),
    rule("buffers that share memory part when one is written", REFUSED.format("WritesSharedBuffer"), "DID NOT RAISE",
         "passes.normalize:_refuse_other_writes", "if len(several) > 1:", "if False:"),
    rule("a buffer that is a parameter's memory stays behind", REFUSED.format("BufferOfParameter"), "DID NOT RAISE",
         "frontend.names:_refuse_overlaps", ", *model.named_buffers())", ",)"),
    rule("a parameter in a list is a constant", REFUSED.format("ListedParameter"), "DID NOT RAISE",
         "frontend.names:Names.of", "_memory(value) in self._memory:", "False:"),
    rule("a buffer in a list is a constant", "OddNames", "HP1|cut",
         "frontend.names:Names.of", "if id(value) in self._own:", "if False:"),
    rule("a constant has a buffer's name", "OddNames", "",
         "frontend.names:Names.of", "while name in self._first:", "while False:"),
    rule("two shared parameters have one name", "OddNames", "SyntaxError: duplicate argument",
         "codegen.stage_cut:_titles", "while title in taken:", "while False:"),
    rule("an operator that fake tensors cannot try stops the compiler", "LerpInplace", "SymInt",
         "passes.normalize:_same_result", '_on_meta(n.meta["val"])', 'n.meta["val"]'),
    # --- what crosses ---
    rule("a value that skips stages is not sent", "SkipOver", "shared|KeyError|read",
         "codegen.stage_cut:_Cutter._stage", "range(stage + 1, self._count)",
         "range(stage + 1, min(stage + 2, self._count))"),
    rule("only the nearest reader's gradient counts",
         "runtime/test_stage.py::test_gradients_of_several_consumers_are_summed_from_the_last[gradients1-5.0]", "",
         "runtime.stage:_sum", "total + gradient", "total"),
    rule("a missing gradient stops a sum",
         "runtime/test_stage.py::test_gradients_of_several_consumers_are_summed_from_the_last[gradients1-5.0]", "",
         "runtime.stage:_sum", "if gradient is not None:", "if True:"),
    rule("gradients of a skip are added in another order than without cuts",
         "runtime/test_stage.py::test_gradients_of_several_consumers_are_summed_from_the_last[gradients0-1.0]", "",
         "runtime.stage:StageEngine._backward", ", reverse=True", ""),
    rule("a value needs a gradient, and none is asked for", "SkipOver", "only|differ|cut",
         "codegen.stage_cut:_Cutter._value_port", "requires_grad=cost.requires_grad and not scalar",
         "requires_grad=False"),
    rule("gradients are asked of integers", "MaskedInt", "",
         "codegen.stage_cut:_Cutter._value_port", "requires_grad=cost.requires_grad and not scalar",
         "requires_grad=True"),
    rule("a value without a gradient is asked for one",
         "runtime/test_stage.py::test_gradients_of_several_consumers_are_summed_from_the_last[gradients2-0.0]", "",
         "runtime.stage:StageEngine._backward", "if total is not None:", "if True:"),
    rule("a receiver sees strides that do not travel", "runtime/test_stage.py::test_values_are_sent_contiguous", "",
         "runtime.stage:_to_send", "value.detach().contiguous()", "value.detach()"),
    rule("a target does not reach the last stage", "NestedIO", "",
         "codegen.stage_cut:_Cutter._home_of", '0 if node.op == "placeholder" else ', ""),
    rule("a new shape or dtype comes unannounced",
         "runtime/test_process_group.py::test_changed_shapes_dtypes_and_scalars_are_announced", "HP530|assert",
         "runtime.transport.process_group:ProcessGroupMailbox.send",
         "self._sent_layout.get((kind, peer)) != layout", "(kind, peer) not in self._sent_layout", in_children=True),
    rule("a message of another size is taken",
         "runtime/test_process_group.py::test_another_message_than_expected_is_refused[unannounced-words3]",
         "assert|Error",
         "runtime.transport.process_group:ProcessGroupMailbox._receive",
         "if payload_bytes != sum(_payload_bytes(entry) for entry in layout):", "if False:", in_children=True),
    rule("another minibatch's message is taken",
         "runtime/test_process_group.py::test_another_message_than_expected_is_refused[wrong_minibatch-words0]", "code",
         "runtime.transport.process_group:ProcessGroupMailbox._receive",
         "if (_KINDS[kind_index], got_minibatch, source) != (kind, minibatch, peer):", "if False:", in_children=True),
    # --- parameters and buffers ---
    rule("a tied parameter becomes two with half a gradient each", "TiedLM", "",
         "codegen.stage_cut:_Cutter._parameter_owners",
         "{name: sorted(stages) for name, stages in users.items()}", "{}"),
    rule("no gradient of a tied parameter comes back", "TiedLM", "",
         "codegen.stage_cut:_Cutter._parameter_port", "requires_grad=True", "requires_grad=False"),
    rule("names of one parameter count as parameters", "frontend/test_capture.py::test_ties_have_one_name_and_aliases",
         "assert", "frontend.names:Names._collect", "id(value)", "hash(name)", times=2),
    rule("a table read by every stage is in one", "RoPEDecoder", "attribute",
         "codegen.stage_cut:_Cutter._attributes", "self._owner.get(name, [stage])[0] == stage",
         "self._owner.get(name, [0])[0] == stage"),
    rule("non-persistent buffers are saved",
         "codegen/test_stage_module.py::test_state_has_the_models_names_and_flags", "assert",
         "codegen.stage_module:_state", '"" if tensor.persistent else ", persistent=False"', '""'),
    rule("non-persistent buffers pass for persistent ones",
         "frontend/test_capture.py::test_flags_of_parameters_and_buffers", "assert",
         "frontend.names:Names._collect", "any(name not in transient for name in names)", "True"),
    rule("frozen parameters train", "FrozenLoRA", "",
         "frontend.names:describe", "trainable=value.requires_grad", "trainable=True"),
    rule("frozen flags are not written down",
         "codegen/test_stage_module.py::test_frozen_parameters_are_frozen", "assert",
         "codegen.stage_module:_state", '"" if tensor.trainable else ", trainable=False"', '""'),
    rule("a tie is broken by building on meta",
         "runtime/test_build_model.py::test_a_model_left_on_meta_is_initialised_under_the_seed", "",
         "runtime.build_model:_ties", "ties[name] = first[id(parameter)]", "pass"),
    rule("virtual workers write each other's batch norm",
         "runtime/test_interpret.py::test_batchnorm_statistics_are_merged_over_virtual_workers", "",
         "runtime.weights:WeightVersions.__init__",
         "value.to(device, copy=True) if name in mutated else value.to(device)", "value.to(device)"),
    rule("batch norm's statistics are one virtual worker's",
         "runtime/test_interpret.py::test_batchnorm_statistics_are_merged_over_virtual_workers", "",
         "runtime.merge:merge_buffer", "value.to(wide) * weight", "value.to(wide)"),
    # --- running ---
    rule("a short batch counts as a whole one",
         "runtime/test_stage.py::test_samples_and_losses_are_exact_with_a_short_minibatch", "assert",
         "runtime.stage:StageEngine._batch_size", "if self._batch_dimension is None:", "if True:"),
    rule("a shorter shard ends before the others",
         "runtime/test_batches.py::test_epochs_follow_each_other_and_a_shorter_shard_wraps_round", "HP515|no batches",
         "runtime.batches:BatchSource._fetch", "if attempt == 0:", "if False:"),
    rule("a batch that does not fit is trained on",
         "runtime/test_batches.py::test_a_batch_that_does_not_fit_is_named", "DID NOT RAISE",
         "runtime.batches:BatchSource._check_leaf", "if not fits:", "if False:"),
    rule("updates of N virtual workers count N times",
         "runtime/test_interpret.py::test_without_staleness_equals_one_process_on_the_large_batch", "",
         "runtime.wsp.server:ParameterShard._advance", "total * self._scale", "total"),
    rule("weights are written that a backward needs",
         "runtime/test_weights.py::test_writing_a_slot_that_a_backward_needs_is_caught", "DID NOT RAISE",
         "runtime.weights:WeightVersions.fill", "if slot.pending:", "if False:"),
    rule("two stages both send first and wait for ever",
         "passes/test_place_communication.py::test_blocking_sends_never_hang", "",
         "passes.place_communication:_Placement.take_early", "yield from self.transfer(message)",
         "raise self.deadlock()"),
    rule("a backward before its forward is accepted", "passes/test_verify.py::test_mutations_are_refused", "",
         "passes.verify:_StageCheck.after", "if self.done[op] < p:", "if False:"),
)  # fmt: skip


class _Says:
    """Collects what a test run within this one says."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.ran = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran += report.when == "call"
        if report.failed:
            self.failures.append(str(report.longrepr))


def run(test: str) -> _Says:
    """Run one test of the suite in this process."""
    says = _Says()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        status = pytest.main(
            ["-x", "-s", "-p", "no:cacheprovider", "-p", "no:logging", str(TESTS / test)], plugins=[says]
        )
    assert status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), f"{test}: {status!r}"
    return says


@pytest.fixture(scope="module")
def passed() -> set[str]:
    """Tests that are known to pass with all rules."""
    return set()


@pytest.mark.parametrize("row", RULES, ids=[r.trouble for r in RULES])
def test_the_rule_is_where_the_table_says(row: Rule) -> None:
    assert all(is_there(removal) for removal in row.removals)
    assert (TESTS / row.test.partition("::")[0]).is_file()


@pytest.mark.slow
@pytest.mark.parametrize("row", RULES, ids=[r.trouble for r in RULES])
def test_without_the_rule_its_test_fails(row: Rule, passed: set[str], tmp_path: Path) -> None:
    if row.test not in passed:
        found = run(row.test)
        assert found.ran, "no such test"
        assert not found.failures, "it fails with the rule, too"
        passed.add(row.test)
    removed = without_in_children(tmp_path, *row.removals) if row.in_children else without(*row.removals)
    with removed:
        found = run(row.test)
    assert found.failures, "the test does not miss the rule"
    text = found.failures[0]
    print("\n".join(line for line in text.splitlines() if line.startswith("E "))[:300])
    assert re.search(row.sees, text), text
    if "Error" not in row.sees:
        assert not re.search(r"NameError|SyntaxError|UnboundLocalError", text), f"not by what it compares: {text}"
