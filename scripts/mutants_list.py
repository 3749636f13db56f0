"""Faults for `scripts/mutants.py`: what is replaced by what, and the test that must fail then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Mutant(NamedTuple):
    """A planted fault.

    Attributes:
        file: in ``monet_like/``.
        text: that is replaced; found exactly once in the file.
        instead: what is there in its place.
        test: in ``tests/``; fails with the fault, passes without.
    """

    file: str
    text: str
    instead: str
    test: str

    def __str__(self) -> str:
        return f"{self.file}: {self.text} -> {self.instead or 'nothing'}".replace("\n", " ")


_MODEL = "replay/test_step_key.py::test_a_model_that_changes_between_calls[{}]"
_CALL = "replay/test_step_key.py::test_arguments_that_differ_between_calls[{}]"
_KEY = "replay/test_step_key.py::{}"
_PLACE = "replay/test_calls_that_differ.py::test_the_same_modules_in_other_places_are_another_program[{}]"
_DIFFERS = "replay/test_calls_that_differ.py::{}"
_VALUE = "capture/test_reads.py::test_a_value_that_changes_is_followed[{}]"
_READS = "capture/test_reads.py::{}"
_GRADIENTS = "capture/test_buffer_gradients.py::{}"
_LATE = "capture/test_reads.py::test_what_a_hook_reads_may_change_before_the_backward[{}]"
_SETTING = "capture/test_settings_followed.py::test_a_setting_that_changes_is_followed[{}]"

#: What a captured step is of: (text, in its place, test).
_CALL_KEYS = [
    ("tuple(map(weakref.ref, modules)), tree", "(weakref.ref(model),), tree", _MODEL.format("a layer was replaced by an equal one")),
    ("tuple(map(type, modules)), tuple(names)", "(), tuple(names)", _PLACE.format("a layer has another class")),
    ("tuple(names), tuple(again)", "(), tuple(again)", _PLACE.format("a layer is in another branch")),
    ("tuple(names), tuple(again)", "tuple(names), ()", _PLACE.format("another layer that is there has a second name")),
    ("names.append((*parts.keys(),))", "names.append(())", _PLACE.format("two layers have each other's name")),
    ("(len(names), name, places[id(part)])", "(name, places[id(part)])", _MODEL.format("two branches have each other's layer")),
    ("(len(names), name, places[id(part)])", "(len(names), places[id(part)])", _MODEL.format("two names have each other's layer")),
    ("(len(names), name, places[id(part)])", "(len(names), name)", _MODEL.format("a second name is of another layer")),
    ("tuple(map(_training, modules))", "()", _MODEL.format("a dropout is in eval mode")),
    ("absent, tied, scattered, looks", "tied, scattered, looks", _MODEL.format("another parameter is there")),
    ("absent, tied, scattered, looks", "absent, scattered, looks", _MODEL.format("two layers are no longer tied")),
    ("absent, tied, scattered, looks", "absent, tied, looks", _MODEL.format("a weight lies otherwise")),
    ("absent, tied, scattered, looks", "absent, tied, scattered", _MODEL.format("a layer is wider")),
    ('attrgetter("shape", "dtype", "requires_grad")', 'attrgetter("dtype", "requires_grad")', _MODEL.format("a layer is wider")),
    ('attrgetter("shape", "dtype", "requires_grad")', 'attrgetter("shape", "requires_grad")', _MODEL.format("a buffer has another dtype")),
    ('attrgetter("shape", "dtype", "requires_grad")', 'attrgetter("shape", "dtype")', _MODEL.format("a parameter is frozen")),
    ("tensors += module._buffers.values()", "pass", _MODEL.format("a buffer is longer")),
    ("tensors += module._parameters.values()", "pass", _MODEL.format("a layer is wider")),
    ("(type(leaf), *hashable(leaf))", "hashable(leaf)", _CALL.format("class of a number")),
    ("(type(leaf), *hashable(leaf))", "(type(leaf),)", _CALL.format("a word")),
    ("(one, None if plain else type(leaf), attributes_of(leaf))", "(None if plain else type(leaf), attributes_of(leaf))", _DIFFERS.format("test_inputs_that_are_one_tensor")),
    ("(one, None if plain else type(leaf), attributes_of(leaf))", "(one, attributes_of(leaf))", _DIFFERS.format("test_an_input_whose_class_computes_otherwise_is_refused")),
    ("(one, None if plain else type(leaf), attributes_of(leaf))", "(one, None if plain else type(leaf))", _DIFFERS.format("test_attributes_of_an_input_that_the_forward_reads_are_refused")),
    ("shape, leaf.dtype, leaf.device", "leaf.dtype, leaf.device", _CALL.format("shape")),
    ("shape, leaf.dtype, leaf.device", "shape, leaf.device", _CALL.format("dtype")),
    ("shape, leaf.dtype, leaf.device", "shape, leaf.dtype", _KEY.format("test_a_key_knows_the_device_of_a_tensor")),
    ("lies, leaf.requires_grad, leaf.is_leaf", "leaf.requires_grad, leaf.is_leaf", _CALL.format("strides")),
    ("lies, leaf.requires_grad, leaf.is_leaf", "lies, leaf.is_leaf", _CALL.format("gradient")),
    ("lies, leaf.requires_grad, leaf.is_leaf", "lies, leaf.requires_grad", _KEY.format("test_an_input_that_is_a_leaf_is_cast_once_under_autocast")),
    ("leaf.start, leaf.stop, leaf.step", "leaf.stop, leaf.step", _CALL.format("start of a slice")),
    ("leaf.start, leaf.stop, leaf.step", "leaf.start, leaf.step", _CALL.format("end of a slice")),
    ("leaf.start, leaf.stop, leaf.step", "leaf.start, leaf.stop", _CALL.format("step of a slice")),
    ("return (leaf,)", "return ()", _CALL.format("an object with a hash")),
    ("leaf.shape, leaf.strides, str(leaf.dtype), leaf.tobytes()", "leaf.strides, str(leaf.dtype), leaf.tobytes()", _CALL.format("shape of an array")),
    ("leaf.shape, leaf.strides, str(leaf.dtype), leaf.tobytes()", "leaf.shape, str(leaf.dtype), leaf.tobytes()", _CALL.format("strides of an array")),
    ("leaf.shape, leaf.strides, str(leaf.dtype), leaf.tobytes()", "leaf.shape, leaf.strides, leaf.tobytes()", _CALL.format("dtype of an array")),
    ("leaf.shape, leaf.strides, str(leaf.dtype), leaf.tobytes()", "leaf.shape, leaf.strides, str(leaf.dtype)", _CALL.format("numbers in an array")),
]  # fmt: skip

#: From a call to its step.
_STEPPING = [
    ("structure(self._model), arguments(leaves)", "((),), arguments(leaves)", _MODEL.format("a dropout is in eval mode")),
    ("structure(self._model), arguments(leaves)", "structure(self._model)", _CALL.format("shape")),
    ("str(spec), device, autocast, group", "device, autocast, group", _CALL.format("nesting")),
    ("str(spec), device, autocast, group", "str(spec), autocast, group", _KEY.format("test_a_key_knows_the_device_of_the_model")),
    ("str(spec), device, autocast, group", "str(spec), device, group", _KEY.format("test_each_kind_of_autocast_is_another_program")),
    ("str(spec), device, autocast, group", "str(spec), device, autocast", _KEY.format("test_a_key_knows_the_processes_that_share_statistics")),
    ("autocast_name(device), torch.is_autocast_cache_enabled()", "torch.is_autocast_cache_enabled()", _KEY.format("test_each_kind_of_autocast_is_another_program")),
    ("autocast_name(device), torch.is_autocast_cache_enabled()", "autocast_name(device)", _KEY.format("test_each_kind_of_autocast_is_another_program")),
    ("not self.training or not torch.is_grad_enabled()", "not torch.is_grad_enabled()", "replay/test_wrapper.py::test_eval_and_no_grad_run_the_plain_model"),
    ("not self.training or not torch.is_grad_enabled()", "not self.training", _KEY.format("test_without_gradients_nothing_is_captured")),
    ("is_empty(leaves) or", "", _KEY.format("test_an_empty_batch_runs_as_the_plain_model")),
    ("check_transforms(self._model, inputs)", "pass", _DIFFERS.format("test_more_than_a_backward_is_refused")),
    ("kept.captured.changed:", "False:", "replay/test_inputs_in_place.py::test_memory_that_two_inputs_share_is_not_changed"),
    ("reads.change() or reads.holds_others", "reads.holds_others", _READS.format("test_a_captured_model_that_was_changed_since_is_captured_anew")),
    ("if reason := mismatch(record, self._model, args, kwargs)", 'if reason := ""', "replay/test_wrapper.py::test_a_larger_batch_another_size_or_another_model_is_refused"),
    ("check_program(record, captured, type(self._model).__name__, captured.device)", "pass", "replay/test_matching.py::test_equal_parameters_and_another_program"),
    ("self._begun or isinstance(error, NewInput)", "True", "replay/test_plain_calls.py::test_before_the_first_step_it_is_an_error"),
    ("self._begun or isinstance(error, NewInput)", "False", "replay/test_plain_calls.py::test_a_form_that_cannot_be_captured_runs_as_the_plain_model_with_one_warning"),
    ("name and name not in KINDS", "False", "capture/test_absent_gpu_attention.py::test_a_schedule_pins_the_attention_it_was_planned_with"),
]  # fmt: skip
_WRAPPER = [
    ("record.autocast not in AUTOCASTS", "False", "capture/test_precision.py::test_what_a_schedule_was_not_solved_for_is_refused"),
    ("isinstance(model, ScheduleWrapper):", "False:", "replay/test_wrapper.py::test_a_larger_batch_another_size_or_another_model_is_refused"),
    ("check_initialized(model)", "pass", _KEY.format("test_a_model_without_memory_is_refused")),
    ("backend not in BACKENDS", "False", "replay/test_compiled_calls.py::test_an_unknown_backend_is_refused"),
]  # fmt: skip

_INNER = "replay/test_gradients_of_results.py::test_the_whole_gradient_of_an_inner_result_is_refused"
_TAKEN = "replay/test_values_not_taken.py::{}"
_ENGINE = "replay/test_gradients_of_results.py::test_an_engine_that_scales_gradients_of_inner_results_is_refused[{}]"
_IN_PLACE = "replay/test_inputs_in_place.py::{}"
_SIZES = "replay/test_sizes.py::test_sizes_{}"
_WRAPPED = "replay/test_wrapper.py::{}"

#: On the way from a call to its backward.
_CHECKS = [
    ("replay/checks/changed_inputs.py", "value in captured.changed and uses[storage] > 1", "False", _IN_PLACE.format("test_memory_that_two_inputs_share_is_not_changed")),
    ("replay/checks/changed_inputs.py", "inputs[position].requires_grad and inputs[position].is_leaf", "False", _KEY.format("test_a_leaf_that_would_change_in_place_is_refused_before_anything_changes")),
    ("replay/checks/changed_inputs.py", "inputs[position].requires_grad and inputs[position].is_leaf", "inputs[position].requires_grad", _IN_PLACE.format("test_inputs_change_as_in_plain_pytorch")),
    ("replay/checks/backward_checks.py", "if torch.is_grad_enabled()", "if False", "capture/test_corners.py::test_second_derivatives_are_plain_pytorchs"),
    ("replay/checks/backward_checks.py", "if torch.is_autocast_enabled(captured.device.type)", "if False", "capture/test_precision.py::test_a_backward_inside_autocast_is_warned_of"),
    ("replay/checks/backward_checks.py", "gradient is not None and _is_batched(gradient) for", "False for", "capture/test_effects.py::test_many_gradients_at_once_are_refused"),
    ("replay/checks/backward_checks.py", "if not asked:", "if True:", _INNER),
    ("replay/checks/backward_checks.py", "if users:", "if False:", _INNER),
    ("replay/checks/backward_checks.py", "elif result is not None and result.retains_grad:", "elif False:", _INNER),
    ("replay/checks/backward_checks.py", "elif gradient is not None and not torch._C._will_engine_execute_node(self.next_node):", "elif False:", _INNER),
    ("replay/checks/backward_checks.py", "self.by_another is None or not torch._C._will_engine_execute_node(self.next_node)", "False", _INNER),
    ("replay/checks/backward_checks.py", "if tangent in met", "if False", _INNER),
    ("replay/checks/backward_checks.py", "returned is not None and returned is not given", "False", _ENGINE.format("result,features")),
    ("replay/checks/backward_checks.py", "torch.zeros(()) if gradient is None else gradient", "gradient", _ENGINE.format("result")),
    ("replay/checks/one_pass.py", "function._backward_cls.register_prehook = refuse", "pass", "auto/test_pipelines.py"),
    ("replay/checks/transforms.py", "if any(map(_copies_before_writes, _python_dispatch._get_current_dispatch_mode_stack()))", "if False", _DIFFERS.format("test_more_than_a_backward_is_refused")),
    ("replay/checks/transforms.py", "elif torch._C._functorch.peek_interpreter_stack() is None", "elif True", _DIFFERS.format("test_more_than_a_backward_is_refused")),
    ("replay/checks/transforms.py", "forward_ad._current_level < 0", "True", _DIFFERS.format("test_more_than_a_backward_is_refused")),
    ("replay/checks/transforms.py", "(*inputs, *model.parameters(), *model.buffers())", "(*model.parameters(), *model.buffers())", _DIFFERS.format("test_more_than_a_backward_is_refused")),
    ("replay/checks/transforms.py", "(*inputs, *model.parameters(), *model.buffers())", "(*inputs, *model.buffers())", _KEY.format("test_tangents_of_parameters_and_buffers_are_refused[parameter]")),
    ("replay/checks/transforms.py", "(*inputs, *model.parameters(), *model.buffers())", "(*inputs, *model.parameters())", _KEY.format("test_tangents_of_parameters_and_buffers_are_refused[buffer]")),
    ("replay/kept_steps.py", "if self.reads is not None and self.reads.holds_others(inputs)", "if False", _DIFFERS.format("test_an_input_that_the_model_holds_is_one_with_it")),
    ("replay/kept_steps.py", "if kept.change() is None", "", _READS.format("test_a_variable_of_the_function_around_is_followed")),
    ("replay/kept_steps.py", "return KeptSteps, ()", "return object.__reduce__(self)", _KEY.format("test_a_wrapper_that_has_trained_can_be_copied_and_pickled")),
    ("replay/kept_steps.py", "len(own) >= OWN_STEPS:", "False:", "capture/test_effects.py::test_a_form_whose_forward_changes_what_it_reads_soon_runs_plainly"),
    ("replay/kept_steps.py", "fills or self.reads.roots.late_names", "self.reads.roots.late_names", _TAKEN.format("test_an_argument_that_is_filled_keeps_its_values")),
    ("replay/kept_steps.py", "fills or self.reads.roots.late_names", "fills", _TAKEN.format("test_a_value_that_a_hook_takes_in_the_backward_is_followed")),
    ("replay/kept_steps.py", "without_values(other, not_taken) != shorter", "False", _TAKEN.format("test_what_decides_about_a_value_decides_about_the_step")),
    ("capture/trace/taken.py", "None if answers else frozenset", "frozenset", _TAKEN.format("test_a_value_that_is_taken_where_a_tensor_says_so_is_followed")),
    ("capture/trace/taken.py", "_THERE if of_all else name", "name", _TAKEN.format("test_values_that_are_taken_in_any_way_are_followed[a copy]")),
    ("capture/trace/taken.py", "        watch.returned(result)", "", _TAKEN.format("test_values_that_are_taken_in_any_way_are_followed[the object as a result]")),
    ("replay/kept_steps.py", "> KEPT_STEPS:", "> 10**9:", _READS.format("test_values_that_come_again_are_captured_once_and_the_oldest_are_dropped")),
    ("replay/stepping.py", "if is_observed() or is_empty", "if is_empty", "auto/test_schedules_within.py::test_a_capture_is_that_of_the_plain_model[a part]"),
    ("replay/stepping.py", " or is_for_shapes(inputs)", "", "auto/test_real_loops.py::test_a_loop_trains_as_in_plain_pytorch[calls that pytorch records-whole]"),
    ("capture/trace/alone.py", " or torch.jit.is_tracing()", "", "auto/test_real_loops.py::test_a_loop_trains_as_in_plain_pytorch[calls that pytorch records-whole]"),
    ("auto/blocks.py", " and not is_for_shapes(tensors_of((args, kwargs)))", "", "auto/test_real_loops.py::test_a_loop_trains_as_in_plain_pytorch[calls that pytorch records-blocks]"),
    ("auto/block_calls.py", " or is_for_shapes(tensors_of((args, kwargs)))", "", "auto/test_real_loops.py::test_a_loop_trains_as_in_plain_pytorch[calls that pytorch records-blocks]"),
    ("capture/trace/known_values.py", '.to("cpu", copy=True)', "", "auto/test_fake_rehearsal.py::test_fakes_count_what_real_tensors_take[asks]"),
    ("auto/auto_schedule.py", "if _is_from_forward(error, self._model):", "if False:", "auto/test_found_parts.py::test_what_the_forward_raises_in_the_first_call_is_raised_as_it_is"),
    ("auto/found_parts.py", "self.parts if other else self.candidates", "self.candidates", "auto/test_found_parts.py::test_an_expert_that_gets_rows_with_other_weights_alone_is_not_found"),
    ("profile/task_inputs.py", "maker = self._for(task)\n            self.cache", "maker = self\n            self.cache", "profile/test_task_inputs.py::test_probabilities_and_indices_lie_where_operators_want_them"),
    ("auto/rehearsal/fake.py", "set_detect_anomaly(False)", "set_detect_anomaly(torch.is_anomaly_enabled())", "auto/test_fake_rehearsal.py::test_anomaly_detection_asks_no_fake_for_its_values"),
    ("auto/rehearsal/fake.py", "KnownValues(inputs) if", "KnownValues() if", "auto/test_fake_rehearsal.py::test_fakes_count_what_real_tensors_take[asks]"),
    ("auto/rehearsal/plain.py", "resident += measured_bytes(device)", "pass", "without_gpu/test_fake_gpu.py::test_the_allocator_sees_what_is_predicted"),
    ("auto/rehearsal/plain.py", " or captured.on_several_devices", "", "without_gpu/test_fake_gpu.py::test_a_model_on_two_devices_is_planned_by_the_memory_of_both[cpu]"),
    ("variants/__init__.py", "{} if captured.on_several_devices else in_order()", "in_order()", "without_gpu/test_fake_gpu.py::test_a_model_on_two_devices_is_planned_by_the_memory_of_both[cpu]"),
    ("auto/offloaded.py", " - {moment.task.overwrites}", "", "without_gpu/test_fake_gpu.py::test_a_model_offloads_of_its_own_accord_where_that_is_faster"),
    ("runtime/offload.py", "    _catch_up(device)\n", "", "without_gpu/test_fake_gpu.py::test_a_model_offloads_of_its_own_accord_where_that_is_faster"),
    ("auto/rehearsal/fake.py", "if any(left() is not None for left in _Counting.left):", "if False:", "auto/test_kept_state.py::test_caches_of_packages_keep_no_fake_tensors"),
    ("auto/block.py", "kept = self._own_step(key, args, kwargs, known)", "kept = self._own_step(key, args, kwargs, ())", "auto/test_block_branches.py::test_each_branch_of_a_block_is_planned"),
    ("replay/stepping.py", "if known and not isinstance(error, InfeasibleError):", "if known:", "auto/test_block_branches.py::test_a_branch_without_a_plan_leaves_the_others_theirs"),
    ("auto/block.py", "not torch.is_grad_enabled() or is_observed():", "not torch.is_grad_enabled():", "auto/test_schedules_within.py::test_a_capture_is_that_of_the_plain_model[blocks that wait]"),
    ("auto/block_calls.py", "not self.plans or is_observed():", "not self.plans:", "auto/test_schedules_within.py::test_a_capture_is_that_of_the_plain_model[blocks]"),
    ("auto/blocks.py", " and not is_observed()", "", "auto/test_schedules_within.py::test_a_capture_is_that_of_the_plain_model[blocks that wait]"),
    ("capture/held_tensors.py", "            for holder, name in _UNSEEN:\n", "            for holder, name in ():\n", "capture/test_own_tensors.py::test_parameters_are_what_they_are_in_plain_pytorch"),
    ("capture/trace/flat_module.py", "            held[name] = other\n", "            pass\n", "capture/test_own_tensors.py::test_parameters_are_what_they_are_in_plain_pytorch"),
    ("capture/guards/objects.py", "return [Attributes(tensor, vars(tensor)), *class_holders(type(tensor), names)]", "return []", "capture/test_own_tensors.py::test_attributes_that_change_are_followed"),
    ("capture/held_tensors.py", "if kind is not None and getattr(", "if False and getattr(", "capture/test_own_tensors.py::test_parameters_are_what_they_are_in_plain_pytorch"),
    ("capture/guards/side_effects.py", "            holder.put_back(copy)\n", "            pass\n", "capture/test_corners.py::test_what_a_schedule_would_not_do_is_refused"),
    ("capture/guards/side_effects.py", "                each.put_back(state)\n", "                pass\n", "replay/test_branches.py::test_a_plain_forward_that_is_asked_leaves_no_trace"),
    ("capture/guards/side_effects.py", "return type(own) is type(now) and is_outside(now) and memory_of(own) == memory_of(now)", "return True", "capture/test_own_tensors.py::test_another_parameter_is_refused"),
    ("replay/kept_steps.py", "if not self.captured.constants.hold()", "if False", "capture/test_constants.py::test_unregistered_parameters_that_change_are_followed"),
    ("replay/kept_steps.py", "self.reads.change() if self.reads is not None else None", "None", _VALUE.format("attribute")),
    ("replay/training_step.py", "if self.plain is None and reason is not None:", "if False:", "capture/test_effects.py::test_many_gradients_at_once_are_refused"),
    ("replay/training_step.py", "check_backward(self.step.captured, grads)", "pass", "capture/test_precision.py::test_a_backward_inside_autocast_is_warned_of"),
    ("replay/training_step.py", "change := reads.late_change()", "change := None", _LATE.format("hook, attribute")),
    ("replay/training_step.py", "call.step.for_gradients(grads)", "call.step", "replay/test_layouts_of_gradients.py"),
    ("replay/training_step.py", "if torch._C._len_torch_dispatch_stack()", "if False", _DIFFERS.format("test_a_backward_where_saved_tensors_may_be_changed")),
    ("replay/training_step.py", "torch._C._autograd._get_current_graph_task_keep_graph()", "False", _WRAPPED.format("test_a_second_backward_reads_what_the_first_one_writes_over")),
    ("replay/training_step.py", "tensor._version != version", "False", _KEY.format("test_a_weight_that_a_hook_changes_in_the_backward_is_pytorchs_error")),
    ("replay/training_step.py", "if grads[position] is None)", "if False)", "replay/test_trainers.py::test_what_the_loss_does_not_use_has_no_part_in_the_gradients"),
    ("replay/training_step.py", "grad.resolve_conj().resolve_neg()", "grad", "capture/test_corners.py::test_a_conjugated_gradient_is_taken"),
    ("replay/training_step.py", "grad.dtype != meta.dtype or not meta.lies_as(grad)", "not meta.lies_as(grad)", "replay/test_gradients_of_results.py"),
    ("replay/training_step.py", "grad.dtype != meta.dtype or not meta.lies_as(grad)", "grad.dtype != meta.dtype", "replay/test_gradients_of_results.py"),
    ("replay/training_step.py", "watch_results(step.inner_results, outputs, call.asked if plain else None)", "pass", _INNER),
    ("replay/training_step.py", "inputs[position].copy_(output)", "pass", _IN_PLACE.format("test_inputs_change_as_in_plain_pytorch")),
    ("replay/branches.py", "except (OtherAnswer, NotRepeated):", "except OtherAnswer:", "replay/test_effects_that_fail.py::test_what_a_call_cannot_set_again_is_plain_pytorchs_to_do"),
    ("replay/stepping.py", "self._kept.drop(key)  # or each call would begin by it", "raise", "replay/test_effects_that_fail.py::test_what_a_call_cannot_set_again_is_plain_pytorchs_to_do"),
    ("capture/trace/answers.py", "self._ask(results)", "self.asked.append(results[0].new_empty(0))", _SIZES.format("equal_plain_pytorch[counted_alone]")),
    ("capture/trace/sizes.py", "if not any(map(self.has, read)):", "if True:", _SIZES.format("that_depend_on_what_is_learned_are_refused[learned_mask]")),
    ("capture/trace/sizes.py", "leaves((written, list", "leaves(([], list", _SIZES.format("that_depend_on_what_is_learned_are_refused[learned_statistics]")),
    ("replay/training_step.py", "if call.other is not None:", "if False:", _SIZES.format("equal_plain_pytorch[masked]")),
    ("replay/branches.py", "(10 if last.is_size else 2)", "1", _SIZES.format("that_are_new_in_every_call")),
    ("capture/guards/effects.py", "_load(_dump(value, alone.number), alone.kept.__getitem__)", "_dump(value, alone.number)", "replay/test_effects_that_fail.py::test_what_no_call_can_set_again_is_refused_by_name"),
    ("capture/guards/effects.py", "            self._check_function(value)", "            pass", "replay/test_effects_that_fail.py::test_what_no_call_can_set_again_is_refused_by_name"),
    ("capture/guards/effects.py", "                    holder.put_back(then)", "                    pass", "replay/test_effects_that_fail.py::test_what_a_call_cannot_set_again_is_plain_pytorchs_to_do"),
    ("capture/guards/reads.py", "_unowned(place.holder) for", "place.holder for", "replay/test_trainers.py::test_replaced_parts_are_never_taken_for_what_they_replaced[Linear]"),
    ("capture/guards/recorder.py", "effects.found_in(roots.walk(self.model))", "effects", "replay/test_effects_that_fail.py::test_what_the_backward_reads_moves_no_place"),
    ("capture/guards/recorder.py", "set_again=effects.paths", "set_again=()", "replay/test_effects_that_fail.py::test_what_the_backward_reads_moves_no_place"),
    ("capture/guards/recorder.py", "self._read_absent(module, before, attribute)", "pass", "capture/test_effects.py::test_noise_that_the_first_call_keeps_is_drawn_once[by_property]"),
    ("capture/guards/recorder.py", "in self.names - attributes.keys():", "in ():", "capture/test_effects.py::test_noise_that_the_first_call_keeps_is_drawn_once[by_dict]"),
    ("capture/guards/recorder.py", "            check_cached(place.holder, copy, who)\n", "", "capture/test_effects.py::test_what_cannot_be_set_again_is_named[cached noise]"),
    ("capture/guards/traversal.py", "if isinstance(holder.held, deque):", "if False:", "replay/test_effects_that_fail.py::test_a_deque_of_another_length_is_another_one"),
    ("replay/training_step.py", "if grad.layout is not torch.strided:", "if False:", "replay/test_gradients_of_results.py::test_a_sparse_gradient_of_a_result_is_taken"),
    ("capture/trace/flat_module.py", "            pytree.tree_unflatten(flat, self.out_spec)\n", "            pass\n", "replay/test_objects.py::test_a_result_that_cannot_be_made_anew_is_refused"),
    ("replay/training_step.py", "if t is None)", "if False)", _KEY.format("test_a_result_without_gradient_has_none")),
]  # fmt: skip

_C = "replay/checks/compatibility.py"
_NOT_SOLVED = "capture/test_precision.py::test_what_a_schedule_was_not_solved_for_is_refused"
_LARGER = _WRAPPED.format("test_a_larger_batch_another_size_or_another_model_is_refused")
#: From a call to its schedule.
_SCHEDULES = [
    (_C, "if not fits_within(found, record.inputs):", "if False:", _LARGER),
    (_C, "if autocast != record.autocast:", "if False:", _NOT_SOLVED),
    (_C, "if layout != record.layout:", "if False:", _NOT_SOLVED),
    (_C, "replace(mine, shape=other.shape) == other", "True", _NOT_SOLVED),
    (_C, "extent <= most for", "True for", _LARGER),
    (_C, "if program.fingerprint != record.fingerprint:\n", "if False:\n", "replay/test_matching.py::test_equal_parameters_and_another_program"),
    (_C, "if reason := exceeds(record, captured, name, device):", 'if reason := "":', "replay/test_matching.py::test_a_literal_that_makes_results_larger_is_refused"),
    (_C, "if needed <= promised + rounded:", "if True:", "replay/test_matching.py::test_a_literal_that_makes_results_larger_is_refused"),
    (_C, "if needed <= max(promised, budget):", "if True:", "ops/test_twins.py"),
    ("profile/observing.py", "if not held[0].expired()}", "}", "ops/test_twins.py::test_what_is_counted_is_what_twins_take"),
]  # fmt: skip

_PIECES = "auto/test_kept_pieces.py::{}"
_UNFIT = "auto/test_kept_plans.py::test_a_file_that_does_not_fit_is_planned_anew[{}]"
_ANEW = "auto/test_kept_plans.py::test_what_changes_the_plan_plans_anew[{}]"
_P = "auto/block_plan.py"
#: From a model with blocks to its kept plan.
_KEPT = [
    ("auto/kept_plans.py", 'if content["sha256"] != digest_of_fields(', "if False and digest_of_fields(", "auto/test_kept_plans.py::test_no_changed_byte_is_read"),
    ("ir/json_fields.py", 'if content.pop("sha256", None) != digest_of_fields(', "if digest_of_fields({}) == digest_of_fields(", _PIECES.format("test_damaged_files_are_found_out_anew_with_a_warning")),
    ("auto/block_menus.py", "if deadline.left():", "if True:", _PIECES.format("test_a_search_that_was_cut_short_and_scaled_costs_are_not_kept")),
    ("auto/block_menus.py", "if settings.quick and earlier is None:", "if settings.quick:", _PIECES.format("test_a_search_that_was_cut_short_and_scaled_costs_are_not_kept")),
    ("auto/kept_plans.py", "if isinstance(error.smallest, KeptPlan):", "if False:", "auto/test_kept_plans.py::test_the_budget_that_an_error_of_blocks_names_has_its_plan[quick]"),
    ("auto/kept_plans.py", 'replace(settings, effort="quick"))\n', "settings)\n", "auto/test_kept_plans.py::test_the_budget_that_an_error_of_blocks_names_has_its_plan[auto]"),
    ("auto/kept_plans.py", 'if plan.promise.status == "searched" or', "if", "auto/test_kept_plans.py::test_a_choice_without_the_solver_is_told_and_not_kept"),
    ("auto/agreement.py", 'msgspec.convert(content["result"], kind)', 'content["result"]', "auto/test_kept_plans.py::test_plans_travel_as_plain_data"),
    (_P, "if len(kept.records) != len(of.blocks):", "if False:", _UNFIT.format("fewer blocks")),
    (_P, "if (call is None) != (record is None):", "if False:", _UNFIT.format("no schedule")),
    (_P, "if not is_of(record, captured, device_of(of.model)):", "if False:", _UNFIT.format("another program")),
    (_P, "if not {*point.shared, *point.offloaded} <= set(range(len(captured.program.values))):", "if False:", _UNFIT.format("wrong value")),
    ("auto/planning.py", "self.budget.bytes or self.budget.share, self.mode", "0, self.mode", _ANEW.format("budget")),
]  # fmt: skip

#: Values that a step reads.
_R, _H, _O, _T, _S = (f"capture/guards/{name}.py" for name in ("reads", "holders", "objects", "traversal", "settings"))
_EACH_SETTING = "capture/test_settings_followed.py::test_each_setting_is_compared"
_GUARDS = [
    (
        "capture/trace/autograd_kernels.py", "            if wanted and not _has_kernel(func):\n", "            if False:\n",
        "capture/test_autograd_kernels.py::test_a_gradient_through_it_is_refused",
    ),
    *((_S, f"torch._C._get_{name}", "bool", _EACH_SETTING) for name in (
        "cudnn_enabled", "mkldnn_enabled", "flash_sdp_enabled", "mem_efficient_sdp_enabled", "cudnn_sdp_enabled", "math_sdp_enabled",
        "sdp_priority_order", "deterministic_algorithms",
    )),
    (_S, "lambda: (opt_einsum.enabled, opt_einsum.strategy)", "bool", _EACH_SETTING),
    (_S, "torch.get_default_dtype,", "bool,", _SETTING.format("default dtype")),
    (_S, 'TorchFunctionMode": _function_modes', 'TorchFunctionMode": bool', _DIFFERS.format("test_modes_of_functions_are_followed")),
    (_S, "parametrize._cache_enabled > 0", "False", _DIFFERS.format("test_cached_parametrizations_are_refused[False]")),
    (_S, '"hooks on all modules": hooks_on_all_modules', '"hooks on all modules": bool', _DIFFERS.format("test_hooks_on_all_modules_are_refused[False]")),
    (_S, "(type(mode), [(name, form_of_plain(value)) for name, value in vars(mode).items()])", "(type(mode),)", _DIFFERS.format("test_modes_of_functions_are_followed")),
    (_R, "walk.add(Attributes(module, module.__dict__, only=self.attributes.get(name, frozenset())), path)", "pass", _VALUE.format("attribute")),
    (_R, "class_holders(type(module), self.names)", "()", _VALUE.format("class attribute")),
    (_R, "marked or holder.contents(self.names)", "False", _DIFFERS.format("test_what_a_forward_reads_of_parameters")),
    (_R, "any(attribute in found for found in members)", "0", _VALUE.format("default of getattr")),
    (_R, "walk.add(Variables(mapping, mapping, python_module, names), python_module)", "pass", _VALUE.format("global")),
    (_R, 'walk.form(argument, f"argument {position}")', "0", _READS.format("test_an_object_that_is_an_argument_is_followed")),
    (_R, 'if "grad" in self.names and', "if False and", _GRADIENTS.format("test_a_grad_that_is_gathered_between_calls_is_seen")),
    ("replay/training_step.py", "in captured.buffers_made_to_require", "in ()", _GRADIENTS.format("test_a_copy_trains_by_the_step_of_the_first")),
    ("capture/trace/answers.py", "[*inputs, *model.parameters(), *model.buffers()]", "inputs", _GRADIENTS.format("test_buffers_that_require_gradients_get_them")),
    (_R, "if (settings := settings_now()) != self._settings:", "if False:", _EACH_SETTING),
    (_R, "return label in self.late_attributes.get(", "return label in {}.get(", _LATE.format("hook, attribute")),
    (_R, "            return label in self.late_names", "            return False", _LATE.format("hook, object")),
    (_R, "Reads(self.roots, model, self.forms)", "Reads(self.roots, model)", "auto/test_shared_captures.py::test_blocks_that_differ"),
    (_R, "if any(self._empty):", "if False:", _READS.format("test_a_list_that_was_empty_is_followed")),
    (_R, "not all(map(operator.is_, values, self._values))", "False", _VALUE.format("attribute")),
    (_R, "not all(map(operator.eq, map(list, self._mappings), self._names))", "False", _VALUE.format("default of getattr, object")),
    (_R, "any(mapping.get(name) is not same.of() for mapping, name, same in self._weak)", "False", _READS.format("test_another_module_in_an_attribute_is_followed")),
    (_R, "return all(map(_as_before, self._others))", "return True", _VALUE.format("list")),
    (_R, "if was != now:", "if False:", _VALUE.format("attribute")),
    (_T, "return kind, value\n", "return value\n", _VALUE.format("int, then bool")),
    (_T, "return kind, repr(value)", "return kind, value", _VALUE.format("-0.0")),
    (_T, 'tuple([self.form(item, f"{path}[{i}]") for i, item in enumerate(value)])', "len(value)", _VALUE.format("size")),
    (_T, 'return "function", value.__code__, paths', 'return "function", paths', _VALUE.format("lambda")),
    (_T, "tuple([self.form(key, path) for key in holder.own_keys()])", "0", _VALUE.format("ordered dict")),
    (_T, "int, len(holder.held)", "0", _READS.format("test_how_long_a_list_is_that_a_hook_reads_may_not_change_before_the_backward")),
    (_T, "self.form(value, part, hooks=of_module", "0 and self.form(value, part, hooks=of_module", _VALUE.format("list")),
    (_T, "mine is other.of()", "True", _VALUE.format("function")),
    (_T, "self.add(Attributes(value, value.__dict__, only=read), path)", "pass", _VALUE.format("unregistered module in eval mode")),
    (_H, "every or name in names", "name in names", _VALUE.format("vars")),
    (_H, "every or name in names", "every", _VALUE.format("dataclass")),
    (_H, "return (*self.kind.keys(self.held), *self.kind.values(self.held))", "return (*self.kind.keys(self.held),)", _VALUE.format("dict")),
    (_H, "return (*self.kind.keys(self.held), *self.kind.values(self.held))", "return (*self.kind.values(self.held),)", _READS.format("test_a_key_that_changes_is_followed")),
    (_H, "return (*self.held.keys(), *self.held.values())", "return ()", _VALUE.format("mapping proxy")),
    (_H, "tuple(self.kind.__iter__(self.held))", "()", _VALUE.format("list")),
    (_H, "return tuple(self.held)\n", "return ()\n", _VALUE.format("set")),
    (_H, "return (self.held.cell_contents,)", "return ()", _READS.format("test_a_variable_of_the_function_around_is_followed")),
    (_H, "return (self.held.get(None),)", "return ()", _VALUE.format("context variable")),
    (_H, "self.held.__code__, self.held.__defaults__, *", "self.held.__defaults__, *", _READS.format("test_other_code_of_a_function_is_followed")),
    (_H, "self.held.__code__, self.held.__defaults__, *", "self.held.__code__, *", _VALUE.format("default")),
    (_H, "setattr(self.held, name, value)\n\n\nclass Slots", "pass\n\n\nclass Slots", _READS.format("test_what_a_forward_sets_is_put_back_after_the_capture")),
    (_H, "return self.parts", "return ()", _VALUE.format("bound method")),
    (_H, "self.held.cache_clear()", "pass", _READS.format("test_a_function_with_a_cache_keeps_no_tensor_of_the_trace")),
    (_H, "(str(held.dtype), held.shape, held.tobytes())", "(str(held.dtype), held.shape)", _VALUE.format("numpy array")),
    (_H, "return tuple(getattr(self.held, name, ABSENT) for name in self.slots)", "return ()", _VALUE.format("slots")),
    (_H, "return [] if self.state() == then else [path]", "return []", _READS.format("test_what_a_backward_sets_or_draws_is_refused[own generator]")),
    (_H, 'return [] if self.held.grad is then[0] else [f"{path}.grad"]', "return []", "capture/test_effects.py::test_what_cannot_be_set_again_is_named[grad in the backward]"),
    (_O, "yield from class_holders(type(value), names)", "pass", _VALUE.format("class attribute of an object")),
    (_O, "yield Members(value)", "return", _VALUE.format("set")),
    (_H, "    drawn = True\n\n\nclass Members", "\n\nclass Members", _READS.format("test_a_queue_that_a_forward_fills_is_refused")),
    (_O, "yield Items(value)", "return", _VALUE.format("list")),
    (_O, "yield Entries(value, hooks=hooks)", "return", _VALUE.format("dict")),
    (_O, "yield Elements(value)", "return", _VALUE.format("numpy array")),
    (_O, "yield Slots(value, slots)", "pass", _VALUE.format("slots")),
    (_O, "*([Attributes(value, value.__dict__)] if value.__dict__ else [])", "", _VALUE.format("function attribute")),
    (_O, "or isinstance(value, _OPEN)", "", _VALUE.format("namespace")),
    (_O, "lambda it: Parts(it, it.__func__, it.__self__)", "lambda it: Parts(it)", _VALUE.format("bound method")),
    (_O, "lambda it: Parts(it, it.func, it.args, it.keywords)", "lambda it: Parts(it, it.func)", _VALUE.format("partial")),
    (_O, "lambda it: Cache(it, it.__wrapped__)", "lambda it: Parts(it)", _READS.format("test_a_function_with_a_cache_keeps_no_tensor_of_the_trace")),
    (_O, "(types.CellType, Variable),", "", _READS.format("test_a_variable_of_the_function_around_is_followed")),
    (_O, "(types.MappingProxyType, ReadOnlyEntries),", "", _VALUE.format("mapping proxy")),
    (_O, "(contextvars.ContextVar, Context),", "", _VALUE.format("context variable")),
    (_O, "(itertools.count, lambda it: Drawn(it, lambda: repr(it))),", "", _READS.format("test_what_a_forward_draws_is_refused")),
    (_O, "(types.GeneratorType, lambda it: Drawn(it, lambda: _generator_state(it))),", "", _READS.format("test_what_a_forward_draws_is_refused")),
]  # fmt: skip

_OUTLINE = "auto/test_shared_captures.py::test_an_outline_tells_blocks_apart_that_differ_in_one_part[{}]"
_BLOCKS_DIFFER = "auto/test_shared_captures.py::test_blocks_that_differ"
#: What equal blocks are.
_SHARED = [
    ("(modules.setdefault(id(module), len(modules)), type(module), module.training)", "(type(module), module.training)", _OUTLINE.format("module")),
    ("(modules.setdefault(id(module), len(modules)), type(module), module.training)", "(modules.setdefault(id(module), len(modules)), module.training)", _OUTLINE.format("class")),
    ("(modules.setdefault(id(module), len(modules)), type(module), module.training)", "(modules.setdefault(id(module), len(modules)), type(module))", _OUTLINE.format("training")),
    ("hook in some for hook in hooks", "hook in () for hook in hooks", _OUTLINE.format("note on hooks")),
    ('(bool(getattr(module, "no_dropit", False)), tuple(notes["_modules"]))', '(tuple(notes["_modules"]),)', _OUTLINE.format("no_dropit")),
    ('(bool(getattr(module, "no_dropit", False)), tuple(notes["_modules"]))', '(bool(getattr(module, "no_dropit", False)),)', _OUTLINE.format("name")),
    ("or tensor.layout != torch.strided", "", "auto/test_shared_captures.py::test_blocks_with_sparse_tensors_have_no_outline"),
    ("found.append((member, None))", "pass", _OUTLINE.format("absent parameter")),
    ("(member, number, memory, look)", "(number, memory, look)", _OUTLINE.format("name of a tensor")),
    ("(member, number, memory, look)", "(member, memory, look)", _OUTLINE.format("tied")),
    ("(member, number, memory, look)", "(member, number, look)", _OUTLINE.format("memory")),
    ("(member, number, memory, look)", "(member, number, memory)", _OUTLINE.format("dtype")),
    ("return type(tensor), *looks, *storage, *flags, tuple(own)", "return *looks, *storage, *flags, tuple(own)", _OUTLINE.format("class of a tensor")),
    ("tensor.dtype, tensor.device, ", "tensor.device, ", _OUTLINE.format("dtype")),
    ("tensor.dtype, tensor.device, ", "tensor.dtype, ", _OUTLINE.format("device")),
    ("tuple(tensor.shape), tensor.stride()\n", "tensor.stride()\n", _OUTLINE.format("shape")),
    ("tuple(tensor.shape), tensor.stride()\n", "tuple(tensor.shape)\n", _OUTLINE.format("stride")),
    ("tensor.untyped_storage().nbytes(), tensor.storage_offset()", "0, tensor.storage_offset()", _OUTLINE.format("storage")),
    ("tensor.untyped_storage().nbytes(), tensor.storage_offset()", "tensor.untyped_storage().nbytes(), 0", _OUTLINE.format("offset")),
    ("tensor.requires_grad, tensor.is_leaf", "tensor.is_leaf", _OUTLINE.format("gradient")),
    ("tensor.requires_grad, tensor.is_leaf", "tensor.requires_grad", _OUTLINE.format("leaf")),
    ("tensor.is_conj(), tensor.is_neg()", "tensor.is_neg()", _OUTLINE.format("conjugated")),
    ("tensor.is_conj(), tensor.is_neg()", "tensor.is_conj()", _OUTLINE.format("negated")),
    ("bool(tensor._backward_hooks)", "0", _OUTLINE.format("hook")),
    ("*flags, tuple(own)", "*flags", _OUTLINE.format("attribute")),
    ("_reads_alike(found.captured, block)", "True", _BLOCKS_DIFFER),
    ("found.outline == outline", "True", _BLOCKS_DIFFER),
]  # fmt: skip


_CALLS = "runtime/offloaded_calls.py"
_OWN_VALUES = "auto/test_offloading_blocks.py::test_each_backward_gets_its_own_values[0]"
_SEARCH_OFFLOADS = "plan/test_offloading.py::test_without_a_solver_a_search_offloads_what_the_host_has_room_for"
_COLLECTIVES = "inductor/test_collectives.py::test_{}"
_LEDGER = "plan/test_offloading.py::test_every_choice_has_the_bytes_of_a_ledger[1-2]"
_CHANGED = "auto/test_changed_in_place.py::test_steps_are_exact_and_need_what_is_predicted[-Leaky-in_the_result-100%]"
#: What blocks offload, and what they have copies of.
_OFFLOADING = [
    (_CALLS, "last.sent()", "pass", _OWN_VALUES),
    (_CALLS, "self._there.clear()\n", "pass\n", _OWN_VALUES),
    (_CALLS, "self.changed = self.changed or self._here[place]._version != version", "pass", "auto/test_offloading_blocks.py::test_a_value_that_is_changed_while_it_leaves_is_an_error_as_in_plain_pytorch"),
    (_CALLS, "before.come()", "pass", "auto/test_offloading_blocks.py::test_values_come_back_while_the_backward_after_them_runs"),
    ("ir/step.py", "there += 0 if self.moving is None else choice[self.moving].offloaded_bytes", "pass", _LEDGER),
    ("ir/step.py", "moving = waiting[-1] if waiting else None", "moving = None", _LEDGER),
    ("ir/step.py", "if not waiting or waiting.pop() != moment.running:", "if not waiting or not waiting.pop() + 1:", "plan/test_offloading.py::test_another_order_says_nothing_of_what_comes_next[0f 1f 0b 1b]"),
    ("plan/step/choice.py", "steps = (step, without_offloads(step))", "steps = (without_offloads(step),)", _SEARCH_OFFLOADS),
    ("plan/step/choice.py", "if bytes_on_host(step, every) <= step.host_bytes:", "if every:", _SEARCH_OFFLOADS),
    ("plan/step/choice.py", "builder.fits(there, step.host_bytes)", "pass", "auto/test_offloading_blocks.py::test_no_more_is_offloaded_than_the_host_has_room_for"),
    ("plan/step/menus.py", "apart = sum(program.values[v].bytes for v in some if v in point.shared)", "apart = 0", "plan/test_offloading.py::test_points_of_a_chain_by_hand"),
    (_CALLS, "_copy(own) if value in self._copied else own", "own", _CHANGED),
    ("auto/rehearsal/stand_ins.py", "if version_of(tensor) != version", "if False", _CHANGED),
    ("plan/step/menus.py", "if v in lone or v in copied]", "if v in lone]", _CHANGED),
    ("inductor/partitioner.py", "(settings, compares, self._held_bytes(part), self._least_bytes(part))", "(settings, compares)", "inductor/test_second_start.py::test_a_second_start_plans_nothing"),
    ("inductor/kernels.py", "draws(root) or communicates(root.target) or touched", "draws(root) or touched", _COLLECTIVES.format("collectives_of_a_plan_run_once_in_the_order_of_the_graph[60%]")),
    ("inductor/kernels.py", " or (kernel.root and communicates(kernel.root.target))", "", _COLLECTIVES.format("no_collective_is_left_out_or_changes_sides[Scaled-2-2]")),
    ("inductor/joint.py", "backward |= _closure(", "_closure(", _COLLECTIVES.format("no_collective_is_left_out_or_changes_sides[Sharded-1-2]")),
    ("inductor/joint.py", "_is_effect(node) or node in unread)", "_is_effect(node))", _COLLECTIVES.format("no_collective_is_left_out_or_changes_sides[Unread-1-0]")),
    ("inductor/prices.py", "if small and not communicates(root.target) else", "if small else", _COLLECTIVES.format("no_collective_runs_for_measuring")),
    ("inductor/rewrites.py", 'gradient.meta.get("val")', 'gradient.meta["val"]', _COLLECTIVES.format("a_gradient_that_does_not_lie_as_its_parameter_stays_as_it_is[a mesh]")),
    ("inductor/rewrites.py", " or found.shape != parameter.shape:", ":", _COLLECTIVES.format("a_gradient_that_does_not_lie_as_its_parameter_stays_as_it_is[sharded otherwise]")),
    ("inductor/handed.py", 'inputs_of(gm.graph, options.get("static_lifetime_input_indices") or ())', 'options.get("static_lifetime_input_indices") or ()', _COLLECTIVES.format("parameters_of_dtensor_are_told_apart_from_inputs[words]")),
    ("inductor/arguments.py", 'getattr(described, "grad_of", described)', "described", "inductor/test_layouts.py::test_a_step_with_permuted_images_needs_what_its_plan_says[layout0]"),
    ("inductor/joint.py", "if any(reader in backward for reader in readers(given)):", "if False:", "inductor/test_changed_inputs.py::test_gradients_are_those_without_a_compiler[queue]"),
    ("inductor/rewrites.py", "graph.call_function(copied_operator(), (given,))", "graph.call_function(torch.ops.aten.clone.default, (given,))", "inductor/test_changed_inputs.py::test_the_peak_with_a_copy_is_the_predicted_one"),
    ("inductor/portfolio.py", " and overwritten.isdisjoint(read):", ":", "inductor/test_changed_inputs.py::test_pytorchs_own_partition_is_left_out_where_it_saves_what_the_forward_overwrites[queue-0]"),
    ("inductor/arguments.py", "enumerate(_inputs(graph)) if not _is_token(tensor)]", "enumerate(_inputs(graph))]", "inductor/test_changed_inputs.py::test_a_check_in_the_forward_is_made_and_its_token_is_no_argument"),
    ("inductor/joint.py", "(node.target is _IN_ORDER and len(tensors_of", "(False and len(tensors_of", "inductor/test_changed_inputs.py::test_gradients_are_those_without_a_compiler[inverse]"),
    ("capture/trace/reasons.py", '"/torch/_higher_order_ops/": (', '"/nowhere/": (', "capture/test_corners.py::test_what_depends_on_values_is_said_in_the_models_words[<lambda>-shape3-given functions, such as torch.cond.*torch.where]"),
    ("inductor/emission.py", "key=_place_of)", "key=is_unchecked)", _COLLECTIVES.format("collectives_of_a_plan_run_once_in_the_order_of_the_graph[60%]")),
    ("capture/lower/lowering.py", "communicates(node.target) or ", "", _COLLECTIVES.format("a_schedule_of_operators_is_refused[shard_dim_alltoall-_turned]")),
    ("runtime/operators.py", '"group", "process_group")', '"group")', _COLLECTIVES.format("who_is_given_a_group_of_processes_communicates")),
    ("runtime/operators.py", " and not isinstance(a.type, torch.IntType)", "", _COLLECTIVES.format("who_is_given_a_group_of_processes_communicates")),
    ("capture/lower/lowering.py", " or waits(node.target)", "", _COLLECTIVES.format("a_schedule_of_operators_is_refused[wait_tensor-<lambda>]")),
    ("capture/lower/lowering.py", " and str(node.target) not in COMMUNICATING", "", "ops/test_sync_batch_norm.py::test_what_communicates_is_done_once_whatever_the_schedule"),
    ("inductor/in_place.py", "or begins_as_copy(kernel.root)", "", _COLLECTIVES.format("a_collective_takes_the_bytes_that_its_plan_counts[all_reduce]")),
    ("inductor/emission.py", 'f"{node.name}_of_group_{group}"', "node.name", "inductor/test_second_start.py::test_a_second_process_lowers_only_graphs_in_other_groups"),
    ("inductor/partitioner.py", "if context is None or context.fw_metadata is None:", "if context is None:", "inductor/test_second_start.py::test_a_second_process_lowers_only_graphs_in_other_groups"),
    (_CALLS, "if storage not in others and times[storage] == 1 and may_be_sent(tensor)", "if may_be_sent(tensor)", "auto/test_offloading_compiled.py::test_only_what_nobody_else_holds_leaves"),
    (_CALLS, "self._here = [None if place in leave else own for place, own in enumerate(self._here)]", "pass", "auto/test_offloading_compiled.py::test_a_step_needs_what_is_predicted"),
    (_CALLS, "if tensor._version != version:", "if False:", "auto/test_offloading_compiled.py::test_what_is_changed_after_it_was_saved_is_an_error_as_in_plain_pytorch"),
    ("inductor/menu.py", "carried - sum(graph.copies(limits.offloaded_bytes, limits.lone)), *others", "carried, *others", "auto/test_offloading_compiled.py::test_a_step_has_plain_gradients_and_as_much_on_the_host_as_predicted"),
    ("inductor/compiled_call.py", "if calls is None or not hooks_are_free():", "if calls is None:", "auto/test_offloading_compiled.py::test_within_hooks_of_others_everything_goes_through_these"),
    ("auto/rehearsal/counted.py", "if v not in call.held and given[storage] == 1", "if True", "auto/test_offloading_blocks.py::test_an_input_that_others_hold_is_not_offloaded"),
]  # fmt: skip

_STREAM, _STREAMED = "runtime/streamed_weights.py", "auto/test_streamed_weights.py::{}"
#: Slots for weights of blocks.
_STREAMING = [
    (_STREAM, "place.whole.copy_(host.whole, non_blocking=True)", "pass", _STREAMED.format("test_fifty_steps_are_equal_to_the_bit")),
    (_STREAM, "[slot for slot in self._slots if slot.block not in self.running]", "[*self._slots]", _STREAMED.format("test_nothing_reads_a_slot_after_its_block[1-1-None]")),
]  # fmt: skip

_ON_HOST, _OF_MODELS = "compiler/offloading.py", "auto/test_offloading_models.py::{}"
_WITHOUT = "compiler/test_copies_that_are_added.py::test_it_is_planned_without[{}]"
#: Where whole models have copies on the host of their own accord.
_OFFLOADING_MODELS = [
    (_ON_HOST, "report.seconds < WORTH * _seconds(without) and ", "", _WITHOUT.format("no gain")),
    (_ON_HOST, '"host_bytes": host.room_bytes', '"host_bytes": 2**60', "compiler/test_copies_that_are_added.py::test_no_more_is_on_the_host_than_it_has_room_for[67108864]"),
    (_ON_HOST, "if host.pins(found.ready.captured, found.compiled.plan.schedule)", "if found", _WITHOUT.format("pinned")),
    (_ON_HOST, "return min(best.unlimited.seconds, best.ready.plain.seconds) < WORTH * _seconds(best)", "return True", _WITHOUT.format("no pressure")),
    (_ON_HOST, "return simulate(program, found, costs).seconds < WORTH * _seconds(best)", "return True", "compiler/test_copies_that_are_added.py::test_what_a_slow_link_can_carry_is_told_without_a_plan"),
    (_ON_HOST, "return least <= budget_bytes", "return True", "compiler/test_copies_that_are_added.py::test_where_one_task_is_too_large_copies_are_not_tried"),
    ("auto/offloaded.py", 'record.counts.get("host_bytes", 0) <= _room_alone()', "True", _OF_MODELS.format("test_a_plan_that_finds_no_room_at_the_next_start_is_made_anew")),
    ("auto/offloaded.py", '(device.type == "cuda" and settings.offloads)', 'device.type == "cuda"', _OF_MODELS.format("test_on_a_gpu_copies_are_added_unless_a_mode_is_given_without_them")),
    ("auto/whole_plan.py", " and not plain_fits else None", " else None", _OF_MODELS.format("test_where_plain_pytorch_fits_the_link_is_not_measured")),
    ("auto/whole_plan.py", "captured if asked is request else readmitted(asked, captured)", "captured", _OF_MODELS.format("test_a_model_offloads_and_the_next_start_has_its_plan")),
]  # fmt: skip

_LAYOUTS, _LAST = "compiler/layouts.py", "capture/trace/channels_last.py"
_CHECK, _WHOLE = "capture/lower/layouts.py", "auto/whole_plan.py"
_AS_IT_IS = "compiler/test_faster_layout.py::test_it_is_left_as_it_is[{}]"
_REFUSED = "capture/test_channels_last.py::test_what_depends_on_the_layout_is_refused[{}]"
_AGREE = "capture/test_channels_last.py::test_results_gradients_and_buffers_agree_and_lie_as_plain_pytorchs"
#: Where convolutions compute in channels-last.
_CHANNELS_LAST = [
    (_LAYOUTS, "if _results(captured) != _results(ready.captured):", "if False:", _AS_IT_IS.format("result")),
    (_LAYOUTS, "except (CaptureError, ", "except (", _AS_IT_IS.format("view")),
    (_LAYOUTS, "if any(map(layout_of, (*request.model.parameters(), *tensors_of(request.example)))):", "if False:", _AS_IT_IS.format("images")),
    (_LAYOUTS, "meta.dtype in HALF and ", "", _AS_IT_IS.format("float32")),
    (_CHECK, "all(map(_lies_as_ever, tensors))", "True", _REFUSED.format("dropout")),
    (_CHECK, " and all(extent == 1 for extent in tensor.shape[2:])", "", _REFUSED.format("tokens")),
    (_CHECK, "node.target is torch.ops.aten.as_strided.default or ", "", _REFUSED.format("as_strided")),
    (_WHOLE, "suppress(InfeasibleError, SolverError, ProfileError)", "suppress(InfeasibleError, SolverError)", "auto/test_faster_layouts.py::test_what_cannot_be_measured_in_the_layout_is_planned_as_it_is"),
    (_LAYOUTS, 'if any(call.op == "monet_like.get_rng_state" for call in calls):', "if False:", _AS_IT_IS.format("matrix")),
    (_LAST, "tensor.contiguous() if layout_of(tensor) else tensor", "tensor", _AGREE),
    (_LAST, '    torch.conv_transpose3d: "channels_last_3d",\n', "", "capture/test_channels_last.py::test_every_convolution_takes_it"),
]  # fmt: skip

_TURNS = "ir/test_simulate.py::test_a_run_takes_place_when_it_is_launched_and_its_turn_has_come[0.0-1.5-spent2]"
_TOLD = "profile/test_launches.py::test_a_record_tells_the_time_by_two_clocks_on_a_gpu_alone"
#: The CPU's clock of steps on a GPU.
_CLOCKS = [
    ("ir/simulate.py", ", self.launched - self.now)", ")", _TURNS),
    ("ir/simulate.py", " * len(task.calls)", "", _TURNS),
    ("profile/launches.py", 'if device.startswith("cuda:") else None', "", "profile/test_launches.py::test_only_a_measured_gpu_has_the_second_clock"),
    ("compiler/pipeline.py", "bound += clock.start_seconds", "pass", _TOLD),
    ("compiler/prepared.py", "launches=clock", "launches=None", _TOLD),
    ("compiler/prepared.py", " if ready.plain.seconds else None", "", "profile/test_launches.py::test_without_times_there_is_no_clock"),
]  # fmt: skip

_STEP_GRAPHS, _MODEL_GRAPHS = "replay/graphs/step.py", "replay/graphs/model.py"
_TRAINER = "replay/test_cuda_graphs.py::test_whatever_the_trainer_does[{}-always]"
_GRAPHED = "replay/test_cuda_graphs.py::{}"
_TRIED = "replay/test_graph_trials.py::test_{}"
#: Steps that are replayed as CUDA graphs.
_GRAPHS = [
    (_STEP_GRAPHS, "outputs = graphs.out(0, found[:count])", "outputs = [each.detach() for each in found[:count]]", _TRAINER.format("everything_kept")),
    (_STEP_GRAPHS, "yield graphs.out(number, found)", "yield [*found]", _TRAINER.format("some_gradients")),
    (_STEP_GRAPHS, "if _addresses(residents[: self.first_input]) != self._addresses:", "if False:", _TRAINER.format("parameters_moved")),
    (_STEP_GRAPHS, "            at.copy_(now)", "            pass", _TRAINER.format("moved_by_a_hook")),
    (_STEP_GRAPHS, "            at.copy_(before)", "            pass", _TRAINER.format("moved_by_a_hook")),
    (_STEP_GRAPHS, "            contents.restore()", "            pass", _TRAINER.format("with_an_optimizer")),
    (_STEP_GRAPHS, "        copy_in(graphs.inputs, residents[graphs.first_input :])", "        pass", _TRAINER.format("with_an_optimizer")),
    (_STEP_GRAPHS, "        copy_in(graphs.tangents, gradients)", "        pass", _TRAINER.format("with_an_optimizer")),
    (_STEP_GRAPHS, 'kernel_settings() != self._settings else ""', 'False else ""', _GRAPHED.format("test_a_setting_for_kernels_that_changes_has_graphs_of_its_own")),
    (_STEP_GRAPHS, "self.recorder.stream() == self.stream", "True", _GRAPHED.format("test_the_backward_on_another_stream_runs_without")),
    (_MODEL_GRAPHS, "if self._call is not None and self._call() is not None:", "if False:", _TRAINER.format("two_forwards")),
    ("replay/graphs/model.py", "if not (self.always or recorder.fails_safely):", "if False:", _TRIED.format("none_are_tried_where_a_capture_that_fails_would_end_the_process")),
    ("replay/graphs/trial.py", "if seconds >= FASTER * self._without:", "if False:", _TRIED.format("graphs_that_are_hardly_faster_are_not_used[0.971-False]")),
    ("replay/graphs/trial.py", '("budget", pool_bytes(step) + copies, left)', '("budget", pool_bytes(step), left)', _TRIED.format("graphs_fit_where_the_budget_and_the_device_have_room_for_the_pool_beside_a_step")),
    ("replay/graphs/trial.py", ") > record.device_seconds:", ") > 0.0:", _TRIED.format("by_a_plan_that_knows_the_times_graphs_are_tried_only_where_the_host_is_waited_for")),
    (_STEP_GRAPHS, "trial.compare(chain(replayed(), self._changed(residents)))", "trial.compare(replayed())", _TRIED.format("graphs_that_change_something_else_are_not_used[a buffer]")),
    (_MODEL_GRAPHS, "if not self.always and step.captured.device.type not in self._recorders:", "if False:", _TRIED.format("a_model_on_a_cpu_is_not_touched")),
    ("replay/graphs/copies.py", "if shared else 0", "", _GRAPHED.format("test_copies_lie_as_their_originals")),
    ("replay/training_step.py", "call.graphs if again else None", "None", _TRAINER.format("graph_retained")),
    ("replay/training_step.py", "not again and not missing and graphs", "not missing and graphs", _TRAINER.format("graph_retained")),
    ("replay/graphs/refusals.py", '    "monet_like.set_rng_state": "draws random numbers again, from an earlier state of the generator",\n', "", _GRAPHED.format("test_a_warning_says_once_which_steps_graphs_cannot_have")),
]  # fmt: skip

_UNCOMPILED = "plan/local_search/test_searcher.py::test_without_the_library_{}"
_SEARCH = [
    ("plan/local_search/uncompiled.py", "present[v] or bool(policy.hold[v])", "present[v]", _UNCOMPILED.format("simple_policies_of_a_chain_cost_the_same")),
    ("plan/local_search/uncompiled.py", "(options[policy.option[slot]], *options)", "(options[policy.option[slot]],)", _UNCOMPILED.format("a_way_that_reads_what_is_there_is_taken")),
    ("zoo/registry.py", 'content.get("format") == SCHEDULE_FORMAT', 'content.get("format") != SCHEDULE_FORMAT', "zoo/test_zoo.py::test_every_file_is_whole_and_promises_what_the_registry_says"),
]  # fmt: skip

_COMPILED = "replay/test_compiled_calls.py::test_{}"
_TIMED = "inductor/test_trial.py::test_{}"
_FORMS = "inductor/test_forms.py::test_{}"
_GRAPHS_OF_INDUCTOR = "without_gpu/test_lowered.py::test_copies_for_cuda_graphs_are_within_the_budget"
_BLOCKS_SHARDED = "inductor/test_sharded.py::test_sharded_blocks_of_a_plan_are_compiled[inplace_multiway_newnode]"

#: Calls that Inductor compiles: (file, text, in its place, test).
_COMPILING = [
    ("auto/block_shares.py", "Limits(self.carried_bytes, self.forward_bytes + room, backward + room, self.offloaded_bytes, lone)", "Limits(2**50, 2**50, 2**50)", _COMPILED.format("the_peak_of_blocks_is_within_their_plan[60%]")),
    ("auto/compiled_menus.py", "backward = needs.carried_bytes - size, needs.backward_bytes - size + kept_on", "backward = needs.carried_bytes, 0", _COMPILED.format("the_peak_of_blocks_is_within_their_plan[90%]")),
    ("auto/compiled_menus.py", "whole_weights(block._model, ready.captured) if is_sharded(block) else contextlib.nullcontext()", "contextlib.nullcontext()", _BLOCKS_SHARDED),
    ("auto/compiled_menus.py", "        for there, name, tensor in changed:\n            there[name] = tensor", "        pass", _BLOCKS_SHARDED),
    ("inductor/compiled_call.py", '"fallback_random": True', '"fallback_random": False', _COMPILED.format("a_compiled_step_has_plain_pytorchs_gradients_and_masks[None]")),
    ("inductor/forms.py", "self.parameters == other.parameters or not self.parameters.isdisjoint(other.parameters)", "False", _FORMS.format("every_form_has_the_whole_budget[2]")),
    ("inductor/forms.py", "self.parameters == other.parameters or not self.parameters.isdisjoint(other.parameters)", "True", _FORMS.format("equal_parts_are_no_forms_of_each_other")),
    ("inductor/forms.py", "self._parts[place : place + 1] = [(part, graph)]", "self._parts.append((part, graph))", _FORMS.format("every_form_has_the_whole_budget[2]")),
    ("inductor/partitioner.py", "budget = max(budget, self._least_bytes(part))", "pass", _FORMS.format("of_a_percentage_a_smaller_form_has_what_the_first_has")),
    ("inductor/partitioner.py", "options, takes_more=True", "options", _FORMS.format("a_form_that_does_not_fit_runs_with_the_least_memory")),
    ("inductor/options.py", '.goes_on = True', '.goes_on = False', _FORMS.format("a_graph_whose_sizes_change_runs_by_pytorchs_own_partition")),
    ("inductor/rehearsal.py", '"compile_threads": 1, "triton.cudagraphs": False', '"compile_threads": 1', _GRAPHS_OF_INDUCTOR),
    ("inductor/partitioner.py", "[plain])[0] + copied)\n        budget = whole - copied", "[plain])[0])\n        budget = whole", _GRAPHS_OF_INDUCTOR),
    ("inductor/compiled_call.py", "context.fw_metadata.bw_donated_idxs = []", "pass", _COMPILED.format("inductors_code_has_a_second_backward")),
    ("inductor/compiled_call.py", "config.patch(optimize_ddp=False)", "config.patch({})", "inductor/test_sharded.py::test_one_graph_serves_all_buckets_of_ddp"),
    ("inductor/menu.py", "if kept := find(path, handed.program):", "if kept := ():", _COMPILED.format("a_menu_is_found_without_running_anything_and_kept")),
    ("inductor/menu.py", "if lacks(graph) <= 0]", "if graph]", _COMPILED.format("a_graph_that_lacks_room_follows_its_schedule")),
    ("inductor/trial.py", "if not 0 <= least <= most < size:", "if not least <= most < size:", _TIMED.format("graphs_that_made_up_values_may_break_are_not[positions-an index of aten::embedding is not known, or might be out of range]")),
    ("inductor/trial.py", "if not 0 <= least <= most < size:", "if not 0 <= least <= most:", _TIMED.format("indices_beyond_the_end_are_seen")),
    ("inductor/trial.py", "with settings_kept():", "if True:", _TIMED.format("the_code_of_inductor_is_timed_and_its_settings_stay")),
    ("inductor/trial.py", "if communicates(node.target):", "if False:", _TIMED.format("graphs_of_several_processes_are_not")),
    ("inductor/trial.py", "if way.seconds <= NEAR * best.seconds]", "if way]", _TIMED.format("what_is_priced_alike_is_timed_and_the_fastest_taken")),
    ("inductor/trial.py", "if name and not (is_generated(node) or known_call):", "if False:", _TIMED.format("graphs_that_made_up_values_may_break_are_not[chances-aten::multinomial may do more than to compute]")),
    ("replay/compiling.py", "results > 1,", "False,", _COMPILED.format("what_cannot_be_compiled_follows_its_schedule_with_one_warning[Several-takes zeros for the others]")),
    ("replay/checks/draws.py", "if is_update or not needed.isdisjoint((*task.writes, *into)):", "if True:", _COMPILED.format("what_cannot_be_compiled_follows_its_schedule_with_one_warning[Unused-random numbers that nothing uses]")),
    ("replay/checks/draws.py", "and not _in_rows(captured, task)", "and False", _COMPILED.format("what_cannot_be_compiled_follows_its_schedule_with_one_warning[InColumns-do not lie row by row]")),
    ("inductor/draws.py", "len(found) != expected or not all(", "not all(not ", _COMPILED.format("what_cannot_be_compiled_follows_its_schedule_with_one_warning[Noisy-draws other random numbers in Inductor's graph]")),
]  # fmt: skip


def _listed() -> Iterator[Mutant]:
    for text, instead, test in _CALL_KEYS:
        yield Mutant("replay/checks/call_keys.py", text, instead, test)
    for text, instead, test in _STEPPING:
        yield Mutant("replay/stepping.py", text, instead, test)
    for text, instead, test in _WRAPPER:
        yield Mutant("replay/wrapper.py", text, instead, test)
    for file, text, instead, test in (
        *_CHECKS,
        *_SCHEDULES,
        *_KEPT,
        *_GUARDS,
        *_OFFLOADING,
        *_STREAMING,
        *_OFFLOADING_MODELS,
        *_CHANNELS_LAST,
        *_CLOCKS,
        *_GRAPHS,
        *_SEARCH,
        *_COMPILING,
    ):
        yield Mutant(file, text, instead, test)
    for text, instead, test in _SHARED:
        yield Mutant("auto/shared_captures.py", text, instead, test)


MUTANTS = tuple(_listed())
