"""Lowers a joint graph: every call of PyTorch's trace becomes a task of the forward or a slot of the backward."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ...errors import CaptureError
from ...ir.program import Call, Program, Ref, Task
from ...ops.sync_batch_norm import COMMUNICATING
from ...runtime.operators import communicates, waits
from ..annotations import called_in_place, is_held, layer_of, mark_of
from ..captured import Captured, Tensor, TensorMeta
from ..constants import Constants
from ..trace.answers import QUESTION
from ..trace.flat_module import FlatModule
from ..trace.sizes import SIZED
from .delayed_gradients import delay, find_delayed_gradients
from .eager_results import can_view, eager_result
from .gradients import collect_gradients, delayable_slots, in_slot_order
from .in_place import accumulate_in_place, with_held, with_in_place_calls
from .inputs import add_attribute, add_placeholder, lay_out_tangent
from .released_gradients import with_releases
from .rules import (
    add_question,
    add_reserve,
    add_sized,
    as_cudnn_call,
    has_effect,
    is_dropout,
    is_random,
    lower_batch_norm,
    lower_dropout,
    lower_dropout_backward,
    rule_of,
    with_own_memory,
)
from .updates import add_update, forbid_rereading_changed, forbid_strides_over_changed, in_its_place
from .values import NodeResult, Values, args_of, map_nodes, storage_of, tensors_in

_CUDNN_LAYERS = torch.ops.aten._cudnn_rnn.default
#: Losses whose kernels, for a mean or a sum, leave the number in a storage as large as their input.
_IN_LARGE_STORAGE = frozenset(
    f"aten.{name}.default" for name in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
)
#: Of a ``CopySlices`` whose call's gradient computes nothing: a new tensor, a copy into it, a clone of the view, a copy
#: back.
_COPIES = 4


class Lowering(Values):
    """Lowers the joint graph to values and tasks, node by node in the order of execution.

    Args:
        made_last, optimizer_in_backward: as of `capture`.
        moved: the graph was traced on another device than it is lowered for.
    """

    def __init__(
        self,
        flat: FlatModule,
        graph: fx.Graph,
        made_last: Collection[str] | None,
        optimizer_in_backward: bool,
        *,
        moved: bool,
    ) -> None:
        super().__init__(flat, graph, moved=moved)
        self.made_last, self.optimizer_in_backward = made_last, optimizer_in_backward

    def lower(self, mode: FakeTensorMode) -> Captured:
        """The program of the graph, whose fake tensors belong to ``mode``.

        Raises:
            CaptureError: an operator or an input that no schedule can have.
        """
        # The graph holds the casts that autocast made: it must not act on them again.
        with mode, torch.no_grad(), torch._C._DisableAutocast():
            for node in self.graph.nodes:
                if node.op == "placeholder":
                    add_placeholder(self, node)
                elif node.op == "call_function":
                    self._annotated_call(node)
                elif node.op == "output":
                    return self._finish(node)
                else:
                    add_attribute(self, node)
        raise AssertionError("the traced graph has no output")

    def _annotated_call(self, node: fx.Node) -> None:
        """Lower a call; its new values get the layer, the mark and the in-place call that the node carries."""
        known, slots = len(self.values), len(self.slots)
        self._call(node)
        self._note_autograd_node(node, self.slots[slots:])
        layer = layer_of(node)
        if layer is not None:
            self.layers.update((value, layer) for value in range(known, len(self.values)))
        if called_in_place(node):
            self.in_place.update(range(known, len(self.values)))
            if self.is_needless_clone(node):
                self.saved.add(self.storages[storage_of(self.nodes[node].result)])
        if is_held(node) and isinstance(self.nodes[node].result, torch.Tensor):
            self.held.add(self.storages[storage_of(self.nodes[node].result)])
        mark = mark_of(node)
        if mark is not None and not self.in_backward:
            self.marks.update((value, mark) for value in range(known, len(self.values)))

    def _note_autograd_node(self, node: fx.Node, slots: Sequence[Task]) -> None:
        """Remember which node of autograd's graph makes ``slots``, by the number that its forward operator has, too."""
        number = node.meta.get("seq_nr")
        if number is None or node.target is operator.getitem:
            return
        if _of_the_backward(node):
            self.autograd_nodes.update((slot.name, number) for slot in slots)
            if node.target is torch.ops.aten.new_empty_strided.default:
                self.copy_slices.add(number)
        else:
            self.forward_calls[number] += 1

    def _is_autograds_own(self, number: int) -> bool:
        """Whether a node of autograd's graph is no custom function's: that holds what its Python code holds, which no
        trace shows.

        The forward of a node calls one operator. ``CopySlices``, the node of a call in place of a view, has a number
        that no operator of the forward has: the call's has that of the gradient inside. Where that gradient is the one
        that comes in, as an addition's is, the node has its copies alone, and was measured not to hold what comes in.
        """
        if number in self.copy_slices:
            slots = sum(node == number for node in self.autograd_nodes.values())
            return not self.forward_calls[number] and slots > _COPIES
        return self.forward_calls[number] == 1

    def _call(self, node: fx.Node) -> None:
        """Lower a call: to a task if it makes new storages; views are emitted again by each task that reads them."""
        for parent in node.all_input_nodes:
            if parent in self.unread_tangents:
                lay_out_tangent(self, parent, self.unread_tangents.pop(parent))
        parents = [self.nodes[n] for n in node.all_input_nodes]
        # Noise that the backward draws is drawn once, in its place among the slots, whatever it depends on.
        backward = any(p.backward for p in parents) or (_of_the_backward(node) and is_random(node))
        self.in_backward |= backward
        if node.target is QUESTION:
            add_question(self, node)
            return
        if node.target is SIZED:
            add_sized(self, node)
            return
        if node.target is operator.getitem:
            source, index = args_of(node)
            self._getitem(node, self.nodes[source], index, backward)
            return
        if not isinstance(node.target, torch._ops.OpOverload):
            raise CaptureError(f"{node.target} at {_user_line(node)} is not an ATen operator and cannot be scheduled")
        if (communicates(node.target) or waits(node.target)) and str(node.target) not in COMMUNICATING:
            raise CaptureError(
                f"{node.target} at {_user_line(node)} communicates with other processes, which a schedule would do "
                "again where it recomputes; plan the parts between such calls, or all by monet_like.compile_options, "
                "which runs each collective that makes new tensors once"
            )
        if node.target is _CUDNN_LAYERS:
            raise CaptureError(
                "cuDNN computes a recurrent layer, and only cuDNN knows how large its workspace in the backward is; "
                "plan and train inside `with torch.backends.cudnn.flags(enabled=False):`, where PyTorch's own "
                "operators do the same"
            )
        if is_dropout(node, self.nodes):
            lower_dropout(self, node, backward)
            return
        if node.target is torch.ops.aten.native_dropout_backward.default and args_of(node)[1] in self.noises:
            lower_dropout_backward(self, node)
            return
        args, kwargs = map_nodes((args_of(node), node.kwargs), lambda n: self.nodes[n].result)
        if node.target is torch.ops.aten.view.default and not (self.reads_as_traced(node) or can_view(*args)):
            # Dropout's result has its input's layout here; the trace took it to be contiguous. Eager mode's reshape
            # copies.
            node.target = torch.ops.aten.reshape.default
        result = eager_result(self, node, args, kwargs)
        self.nodes[node] = info = NodeResult(result, backward)
        if self.is_made_in_part(node):
            self.made_in_part.add(node)
        if node in self.made_in_part or self.is_scaled_in_place(node):  # made by the task that writes, or scales it
            self.storages[storage_of(result)] = self.storages[storage_of(args[0])]
            self.owners.append(result)
        if has_effect(node) or any(storage_of(t) not in self.storages for t in tensors_in(result)):
            self._task(node, info)

    def _getitem(self, node: fx.Node, source: NodeResult, index: Any, backward: bool) -> None:
        """One of several results of a node."""
        result = source.result[index]
        info = self.nodes[node] = NodeResult(result, backward)
        value = self.storages.get(storage_of(result)) if isinstance(result, torch.Tensor) else None
        if value is not None and TensorMeta.of(result) == self.metas[value]:
            info.value = value

    def _task(self, node: fx.Node, info: NodeResult) -> None:
        """The task of a node that makes new storages."""
        kind = "backward" if info.backward else "forward"
        calls, args, kwargs = self.emit_args(node)
        args = self.in_eager_layouts(node, calls, args)
        unpack = isinstance(info.result, tuple | list)
        outs: list[Ref | None] = []
        writes: list[int] = []
        used = {args_of(n)[1] for n in node.users if n.target is operator.getitem} if unpack else {0}
        for index, tensor in enumerate(info.result if unpack else (info.result,)):
            if index not in used or not isinstance(tensor, torch.Tensor) or storage_of(tensor) in self.storages:
                outs.append(None)
                continue
            value = self.new_value(node.name if not unpack else f"{node.name}.{index}", kind, tensor)
            outs.append(Ref(value))
            writes.append(value)
        if writes and not unpack:
            info.value = writes[0]
        op = str(node.target)
        if node in self.by_cudnn:
            add_reserve(self, node, kind, read=1 in used)
        if op == "aten._native_batch_norm_legit_functional.default" and len(tensors_in(info.result)) == 5:
            lower_batch_norm(self, node, calls, args, outs, writes)
            return
        call = as_cudnn_call(self, node, Call(op, args, kwargs, tuple(outs), unpack), writes)
        if call.op in _IN_LARGE_STORAGE and not info.result.dim():
            whole = Ref(f"{node.name}_whole")
            calls.append(replace(call, outs=(whole,)))
            call = Call("aten.clone.default", (whole,), (), call.outs)
        calls, call = with_own_memory(self, node, calls, call)
        if (rule := rule_of(self, node, call)) is not None:
            rule(self, node, (*calls, call), writes)
        elif info.backward:
            self.slots.append(self.make_task(node.name, (*calls, call), writes))
            if is_random(node):
                self.drawn.update(writes)
        else:
            self.add_forward_task(node, (*calls, call), writes)

    def _finish(self, node: fx.Node) -> Captured:
        """The captured step, from the output ``node`` of the graph."""
        outputs: list[Tensor] = []
        written: dict[int, Tensor] = {}
        gradients: list[tuple[Any, fx.Node]] = []
        for target, desc in zip(args_of(node)[0], node.meta["desc"], strict=True):
            kind = type(desc).__name__
            if target is None:
                continue  # no gradient is wanted there
            if kind == "InputMutationAOTOutput" and getattr(desc.mutated_input, "idx", None) in self.written:
                written[self.written[desc.mutated_input.idx]] = self.tensor(target)
                self.changed.add(self.inputs[desc.mutated_input.idx])
            elif kind == "InputMutationAOTOutput":
                add_update(self, desc.mutated_input, target)
            elif kind == "PlainAOTOutput" and target.target is QUESTION:
                continue  # its task has asked
            elif kind == "PlainAOTOutput":
                outputs.append(self.tensor(target))
            elif kind == "GradAOTOutput":
                gradients.append((desc.grad_of, target))
            else:
                raise CaptureError(f"the traced graph has an output of a kind that is not supported: {desc}")
        for position, result in enumerate(outputs):
            if position not in self.tangent_of:
                outputs[position] = in_its_place(self, result)
        outputs += (written[position] for position in sorted(written))
        parameter_gradients, input_gradients = collect_gradients(self, gradients)
        forbid_rereading_changed(self)
        forbid_strides_over_changed(self, node.graph)
        plain = self._program(outputs, parameter_gradients, input_gradients)
        delayable = {} if self.optimizer_in_backward else delayable_slots(self, parameter_gradients)
        if self.made_last is None:
            delayed = find_delayed_gradients(plain, delayable)
        else:
            delayed = tuple(slot for slot, name in delayable.items() if name in self.made_last)
        as_called = with_held(with_in_place_calls(self, plain) or plain, self.held)
        undelayed = Captured(
            program=plain,
            metas=tuple(self.metas),
            parameters=tuple(self.parameters),
            buffers=tuple(self.buffers),
            inputs=self._every_input(),
            outputs=tuple(outputs),
            output_spec=self.flat.out_spec,
            output_leaves=tuple(self.flat.out_leaves),
            output_positions=tuple(self.flat.out_positions),
            tangents=tuple(self.tangent_of.get(i) for i in range(len(outputs))),
            parameter_gradients=tuple(parameter_gradients),
            input_gradients=tuple(input_gradients),
            device=self._device(),
            marks=self.marks,
            layers=self.layers,
            as_called=None if as_called == plain else as_called,
            autograd_nodes={name: n for name, n in self.autograd_nodes.items() if self._is_autograds_own(n)},
            optimizer_in_backward=self.optimizer_in_backward,
            reads=self.flat.reads,
            constants=Constants.of(self.constants, self.flat.model, self.flat.leaves, self.flat.aliases),
            written=tuple(sorted(self.written, key=self.written.__getitem__)),
            changed=frozenset(self.changed),
            effects=self.flat.effects,
            made_to_require=tuple(sorted(self.flat.made_to_require)),
            buffers_made_to_require=tuple(
                index for index, (name, _) in enumerate(self.parameters) if name in self.flat.buffers_made_to_require
            ),
            answers=self.flat.answers or (),
            examples=self.examples,
        )
        if not delayed:
            return undelayed
        self.slots = delay(self.slots, delayed)
        parameter_gradients = in_slot_order(self, parameter_gradients)
        input_gradients = in_slot_order(self, input_gradients)
        return replace(
            undelayed,
            program=self._program(outputs, parameter_gradients, input_gradients),
            parameter_gradients=tuple(parameter_gradients),
            input_gradients=tuple(input_gradients),
            as_called=as_called,
            made_last=tuple(delayable[slot] for slot in delayed),
            undelayed=undelayed,
        )

    def _every_input(self) -> tuple[int, ...]:
        """The values of all inputs. One that is given several times, or lives in the model, too, is one value where the
        forward changes inputs.
        """
        tensors = [leaf for leaf in self.flat.leaves if isinstance(leaf, torch.Tensor)]
        first = {tensor: known.value for tensor, (_, known) in self.named.items() if known.value is not None}
        for place, value in self.inputs.items():
            first.setdefault(id(tensors[place]), value)
        return tuple(self.inputs.get(place, first[id(tensor)]) for place, tensor in enumerate(tensors))

    def _device(self) -> torch.device:
        """Where the program runs."""
        values = (*(value for _, value in (*self.parameters, *self.buffers)), *self.inputs.values())
        return next((self.metas[value].device for value in values), torch.device("cpu"))

    def _program(
        self,
        outputs: Sequence[Tensor],
        parameter_gradients: Sequence[tuple[int, Tensor]],
        input_gradients: Sequence[tuple[int, Tensor]],
    ) -> Program:
        """The program, with the slots in their present order."""
        gradients = [tensor.value for _, tensor in (*parameter_gradients, *input_gradients)]
        slots = accumulate_in_place(self, {*gradients})
        if self.optimizer_in_backward:
            slots = with_releases(self, slots, parameter_gradients)
            gradients = [tensor.value for _, tensor in input_gradients]
        read = {value for slot in slots for value in slot.reads}
        held = {t.value for t in outputs if self.values[t.value].kind == "forward"}
        program = Program(
            values=tuple(self.values),
            tasks=(*self.tasks, *self.again),
            slots=tuple((slot,) for slot in slots),
            outputs=tuple(sorted({*held, *self.effects})),
            tangents=tuple(v for v in self.tangent_of.values() if v in read),
            gradients=tuple(dict.fromkeys(gradients)),
        )
        program.check()
        return program


def _of_the_backward(node: fx.Node) -> bool:
    """Whether a node was traced while the backward ran, whatever it depends on."""
    return bool(node.meta.get("partitioner_tag") == "is_backward")


def _user_line(node: fx.Node) -> str:
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    return " ".join(lines[-2:]) if lines else "an unknown line"
