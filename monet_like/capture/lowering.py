"""Capture: an unmodified ``nn.Module`` and example inputs become a `Program`.

PyTorch traces the joint forward and backward graph under fake tensors, so nothing is allocated or computed.
The graph is functional: no operator writes into its inputs. This module folds views onto the storage they
alias, separates the forward from the backward, and gives back the few places where eager PyTorch does write
in place: batch-norm statistics, and gradients that meet.

Interpreting the captured calls one by one is bit-equal to running the model eagerly.
"""

from __future__ import annotations

import operator
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy

from ..errors import CaptureError, UsageError
from ..ir.program import Call, Program, Ref, Runs, Task, Value
from ..ops.meta_functions import (
    bags,
    batch_norm_gradient,
    batch_norm_result,
    convolved,
    elementwise_result,
    product,
    rolled,
    unfolded,
)
from ..ops.recurrent import ONEDNN_LAYER, with_workspace
from ..runtime.batch_norm import CUDNN, CUDNN_BACKWARD, NATIVE, NATIVE_BACKWARD, backward_of, by_cudnn, reserve_bytes
from .absent_gpu import convolutions
from .annotations import Mark, called_in_place, eager_layouts, fills_with_noise, layer_of, mark_of
from .captured import Captured, Tensor, TensorMeta, contiguous_strides, make_task
from .constants import Constants, constant_name
from .delayed_gradients import in_order, worth_moving
from .flat_module import HELD, FlatModule
from .graph_edits import reaches_output
from .in_place import in_place_form
from .tracing import trace_joint

_FAKE_QUANTIZE = torch.ops.aten._fused_moving_avg_obs_fq_helper_functional.default
_NORMALISATIONS = (
    torch.ops.aten.native_layer_norm.default,
    torch.ops.aten.native_group_norm.default,
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten._native_batch_norm_legit.no_stats,
    torch.ops.aten._native_batch_norm_legit_no_training.default,
)
_BATCH_NORM_OPERATORS = (torch.ops.aten._native_batch_norm_legit_functional.default, *_NORMALISATIONS[2:])
#: Of batch norms' nodes: where the arguments of ``torch.batch_norm`` are among theirs (None: they have no running statistics),
#: and whether they are of training.
_BATCH_NORM_NODES = {
    torch.ops.aten._native_batch_norm_legit_functional.default: ((0, 1, 2, 3, 4, 6, 7), True),
    torch.ops.aten._native_batch_norm_legit.no_stats: ((0, 1, 2, None, None, 4, 5), True),
    torch.ops.aten._native_batch_norm_legit_no_training.default: ((0, 1, 2, 3, 4, 5, 6), False),
}
_SYNC_BATCH_NORM_GATHER = "monet_like.sync_batch_norm_gather_functional.default"
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CUDNN_LAYERS = torch.ops.aten._cudnn_rnn.default
#: Losses whose kernels, for a mean or a sum, leave the number in a storage as large as their input.
_IN_LARGE_STORAGE = frozenset(
    f"aten.{name}.default" for name in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
)
#: What begins with memory of its input's size, whatever its result's.
_UNFOLDING = (torch.ops.aten.im2col.default, torch.ops.aten.col2im.default)
_SKIPPED_VIEWS = frozenset({"aten.detach.default", "aten.alias.default", "aten.lift_fresh.default"})


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: torch.device | None = None,
    processes: int | None = None,
    made_last: Collection[str] | None = (),
    row_major_gradients: bool = False,
) -> Captured:
    """Trace one training step of ``model(*args, **kwargs)`` into a `Captured` program.

    The model's train/eval flags, frozen parameters and the caller's autocast state are taken as they are, and so is an
    attribute ``no_dropit`` of its modules, whose layers' inputs are then never dropped.

    Args:
        model: any module whose training step PyTorch can trace without data-dependent control flow.
        args, kwargs: example inputs, real or fake; only shapes, dtypes and ``requires_grad`` matter.
        target: capture as on this device, which need not be here; default: where the model is.
        processes: capture as where so many share SyncBatchNorm's statistics, to plan without them; default: those of
            its process group, and without one SyncBatchNorm is batch norm.
        made_last: names of the parameters whose gradients the program makes after all others, where that can be; None:
            those with which it needs less memory.
        row_major_gradients: the gradients that come in lie so, as most losses make them, and not as the results do.

    Raises:
        CaptureError: what cannot be captured, with the operator or line that is the reason.
    """
    _check_distributed(model)
    check_initialized(model)
    _check_averages(model)
    leaves, spec = pytree.tree_flatten((args, dict(kwargs or {})))
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    flat = FlatModule(model, leaves, spec)
    graph, mode = trace_joint(flat, tensors, target, processes, row_major_gradients=row_major_gradients)
    if _adds_under_names(graph, flat):
        flat = FlatModule(model, leaves, spec, tied_as_one=True)
        graph, mode = trace_joint(flat, tensors, target, processes, row_major_gradients=row_major_gradients)
    if flat.told:
        warnings.warn(
            f"{type(model).__name__}.forward sets {', '.join(flat.told)}, and a schedule does not: they stay as they are; "
            "return such tensors as results, and count outside the model",
            stacklevel=3,
        )
    if target is not None:
        _move(graph, mode, target)
    with convolutions(target or torch.device("cpu")):
        return _without_dropit(_Builder(flat, graph, mode, made_last).build(), model)


def _adds_under_names(graph: fx.Graph, flat: FlatModule) -> bool:
    """Whether a parameter with several names has gradients that are added up, or cast, under each name apart.

    Plain PyTorch adds up the gradients of all uses in the order in which they come. Under the names apart that is another
    order, unless each is of one use; and where autocast casts the parameter once, they are added before the cast back.
    """
    output = next(iter(reversed(graph.nodes)))
    found: dict[int, list[fx.Node]] = {}
    for node, desc in zip(_args(output)[0], output.meta["desc"], strict=True):
        if node is not None and type(desc).__name__ == "GradAOTOutput" and hasattr(desc.grad_of, "target"):
            _, parameter = flat.tensor(desc.grad_of.target)
            found.setdefault(id(parameter), []).append(_viewed(node))
    apart = (torch.ops.aten.add.Tensor, torch.ops.aten._to_copy.default)
    return any(len(nodes) > 1 and any(node.target in apart for node in nodes) for nodes in found.values())


def _viewed(node: fx.Node) -> fx.Node:
    """The node that a chain of views begins with."""
    while getattr(node.target, "is_view", False):
        node = node.all_input_nodes[0]
    return node


def _move(graph: fx.Graph, mode: FakeTensorMode, target: torch.device) -> None:
    """Have a graph that was traced elsewhere run on ``target``: its inputs, and the tensors that it makes."""

    def there(leaf: Any) -> Any:
        return target if isinstance(leaf, torch.device) else leaf

    with mode:
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr") and isinstance(fake := node.meta["val"], torch.Tensor):
                elements = fake.untyped_storage().nbytes() // fake.dtype.itemsize
                storage = torch.empty(elements, dtype=fake.dtype, device=target)
                node.meta["val"] = storage.as_strided(fake.shape, fake.stride(), fake.storage_offset())
            elif node.op == "call_function":
                if "for_cpu" in str(node.target) or "mkldnn" in str(node.target):
                    raise CaptureError(f"{node.target} is an operator of the CPU; capture this model on {target}")
                node.args = fx.node.map_aggregate(node.args, there)
                node.kwargs = fx.node.map_aggregate(node.kwargs, there)


def _without_dropit(captured: Captured, model: nn.Module) -> Captured:
    """``captured`` with the parameters whose layers opted out."""
    exact = {id(p) for m in model.modules() if getattr(m, "no_dropit", False) for p in m.parameters()}
    if not exact:
        return captured
    registered = (p for p in captured.parameters if p[0] not in captured.constants.tensors)
    values = frozenset(v for name, v in registered if id(model.get_parameter(name)) in exact)
    return replace(captured, no_dropit=values)


def check_initialized(model: nn.Module) -> None:
    """Whether all parameters and buffers have shapes.

    Raises:
        UsageError: a lazy module has not seen an input yet.
    """
    for name, module in model.named_modules():
        if any(map(is_lazy, (*module._parameters.values(), *module._buffers.values()))):
            raise UsageError(
                f"{name or type(model).__name__} is a lazy module whose parameters have no shapes yet; call the model once on "
                "an example first"
            )


def _check_distributed(model: nn.Module) -> None:
    """A schedule is of one process's own operators."""
    for name, module in model.named_modules():
        if any(hasattr(parameter, "device_mesh") for parameter in module._parameters.values()):
            raise CaptureError(
                f"{name or type(model).__name__} has sharded parameters, which are gathered while the step runs; shard "
                "around it: fully_shard(ScheduleWrapper(model, ...))"
            )


def _check_averages(model: nn.Module) -> None:
    """Batch norms average their statistics with a factor that is known before a step."""
    for name, module in model.named_modules():
        averaging = isinstance(module, _BATCH_NORMS) and module.training and module.track_running_stats
        if averaging and module.momentum is None:
            raise CaptureError(
                f"{name or type(model).__name__} has momentum=None, so its average depends on how many steps there were; give "
                "it a number, such as momentum=0.1"
            )


@dataclass(slots=True)
class _Node:
    """What is known of a graph node: its fake result, and the value it is the own tensor of."""

    result: Any
    backward: bool
    value: int | None = None  # set for the tensor that owns a storage; None for views and tuples


def _as_computed(op: Any, args: Sequence[Any], result: tuple[Any, ...]) -> tuple[Any, ...]:
    """Results of a normalisation as its kernels make them on a CPU: statistics with the dtype of the parameters.

    Tensors without storage claim the input's, which differs where 16-bit inputs meet float32 parameters; and of batch norm
    the input's layout, which the kernels give up where it is neither in rows nor channels-last.
    """
    x, parameters = args[0], [t for t in args[1:5] if isinstance(t, torch.Tensor)]
    if x.device.type != "cpu":
        return result
    if op in _BATCH_NORM_OPERATORS:
        result = (batch_norm_result(x).to(result[0].dtype), *result[1:])
    wide = parameters and parameters[0].dtype != x.dtype
    return (result[0], *(t.to(parameters[0].dtype) for t in result[1:3]), *result[3:]) if wide else result


def _as_cudnn_makes(x: torch.Tensor) -> torch.Tensor:
    """A tensor laid out as cuDNN's batch norm of ``x``, and as its gradient."""
    return torch.empty_like(x, memory_format=suggest_memory_format(x))


class _Builder:
    """Turns the joint graph into values and tasks, node by node in execution order."""

    def __init__(
        self, flat: FlatModule, graph: fx.Graph, mode: FakeTensorMode, made_last: Collection[str] | None
    ) -> None:
        self.flat, self.graph, self.mode, self.made_last = flat, graph, mode, made_last
        self.values: list[Value] = []
        self.metas: list[TensorMeta] = []
        self.storages: dict[int, int] = {}  # storage identity -> value
        self.owners: list[torch.Tensor] = []  # kept alive: an identity is only unique among the living
        self.nodes: dict[fx.Node, _Node] = {}
        self.tasks: list[Task] = []
        self.late: list[Task] = []  # computed from forward values only, but by the backward
        self.slots: list[Task] = []
        self.parameters: list[tuple[str, int]] = []
        self.buffers: list[tuple[str, int]] = []
        self.named: dict[int, tuple[str, _Node]] = {}  # identity of a parameter or buffer -> its first name, its node
        self.first_name: dict[str, str] = {}  # of the tensor that the tracer calls so, perhaps among others
        self.constants: dict[str, torch.Tensor] = {}
        self.attributes: dict[str, fx.Node] = {}  # the first node of each tensor that the graph has as an attribute
        self.inputs: dict[int, int] = {}
        self.tangent_of: dict[int, int] = {}  # output position -> value
        self.unread_tangents: dict[fx.Node, int] = {}  # those that no node has read so far, with their position
        self.written: dict[int, int] = {}  # position of an input that the forward changes -> that among the outputs
        self.changed: set[int] = set()  # residents that have other contents when the forward has ended
        self.effects: list[int] = []
        self.drawn: set[int] = set()  # by slots: noise, whose order counts
        self.noises: dict[fx.Node, int] = {}  # CPU dropout: node -> the value that replaces its mask
        self.by_cudnn: dict[fx.Node, Ref | None] = {}  # batch norms that cuDNN computes, and the reserve of each
        self.in_backward = False
        self.marks: dict[int, Mark] = {}
        self.layers: dict[int, str] = {}
        self.in_place: set[int] = set()  # values that the model's own calls write into what they read
        self.saved: set[int] = set()  # values that those calls copy first, for the backward

    def build(self) -> Captured:
        # The graph holds the casts that autocast made: it must not act on them again.
        with self.mode, torch.no_grad(), torch._C._DisableAutocast():
            for node in self.graph.nodes:
                if node.op == "placeholder":
                    self._placeholder(node)
                elif node.op == "call_function":
                    self._call(node)
                elif node.op == "output":
                    return self._finish(node)
                else:
                    self._constant(node)
        raise AssertionError("the traced graph has no output")

    # Values ---------------------------------------------------------------------------------------------------

    def _value(self, name: str, kind: Any, tensor: torch.Tensor) -> int:
        """A new value for the storage of ``tensor``."""
        meta = TensorMeta.of(tensor)
        index = len(self.values)
        self.values.append(Value(name, meta.allocated_bytes, kind, str(meta)))
        self.metas.append(meta)
        self.storages[_storage(tensor)] = index
        self.owners.append(tensor)
        return index

    def _pseudo_value(self, name: str, count: int) -> int:
        """A forward value that is no tensor of the graph: a side effect, or a random generator's state."""
        self.values.append(Value(name, count, "forward", "state"))
        self.metas.append(TensorMeta(torch.uint8, torch.device("cpu"), (count,), (1,), 0, count))
        return len(self.values) - 1

    def _placeholder(self, node: fx.Node) -> None:
        desc = node.meta["desc"]
        fake = node.meta["val"]
        kind = type(desc).__name__
        if not isinstance(fake, torch.Tensor):
            raise CaptureError(f"input {node.name} is a {type(fake).__name__}; only tensors may vary between steps")
        if kind in ("ParamAOTInput", "BufferAOTInput"):
            self.nodes[node] = self._resident(desc.target, kind == "ParamAOTInput", fake)
        elif kind == "PlainAOTInput":
            value = self._value(f"input{desc.idx}", "input", fake)
            self.inputs[desc.idx] = value
            self.nodes[node] = _Node(fake, False, value)
        elif kind == "TangentAOTInput" and type(desc.output).__name__ == "PlainAOTOutput":
            position = desc.output.idx
            value = self._value(f"tangent{position}", "backward", fake)
            self.tangent_of[position] = value
            self.nodes[node] = _Node(fake, True, value)
            self.unread_tangents[node] = position
        elif kind == "TangentAOTInput":
            self._tangent_of_changed(node, desc.output)
        elif "Token" in kind:
            raise CaptureError(
                "the model calls an operator that must run in order, such as torch.linalg.inv, solve or cholesky, which look at "
                "their results for errors; use torch.linalg.inv_ex, solve_ex or cholesky_ex"
            )
        else:
            raise CaptureError(f"the traced graph has an input of a kind that is not supported: {desc}")

    def _tangent_of_changed(self, node: fx.Node, output: Any) -> None:
        """The incoming gradient of what an input becomes that the forward changes in place."""
        if not node.users:
            return
        changed = getattr(output, "mutated_input", output)
        key = changed.idx if hasattr(changed, "idx") else getattr(changed, "target", None)
        if key in self.flat.changed_without_gradient and _without_tangent(node):
            return  # what the caller has is the same tensor for autograd, before and after
        if type(changed).__name__ != "PlainAOTInput":
            name = self.flat.tensor(changed.target)[0] if hasattr(changed, "target") else changed
            raise CaptureError(
                f"{type(self.flat.model).__name__}.forward changes {name} in place, and gradients flow through what it becomes; "
                "compute it anew instead (x = x.relu(), not x.relu_()), or change it under torch.no_grad() (for an Embedding: "
                "max_norm=None)"
            )
        position = sum(type(d).__name__ == "PlainAOTOutput" for d in self._output.meta["desc"]) + len(self.written)
        fake = node.meta["val"]
        self.written[changed.idx] = position
        self.tangent_of[position] = value = self._value(f"tangent{position}", "backward", fake)
        self.nodes[node] = _Node(fake, True, value)

    def _lay_out_tangent(self, node: fx.Node, position: int) -> None:
        """Where the trace takes an incoming gradient to lie as a result, it lies as the result really does."""
        pairs = zip(_args(self._output)[0], self._output.meta["desc"], strict=True)
        (output,) = (out for out, d in pairs if type(d).__name__ == "PlainAOTOutput" and d.idx == position)
        if output not in self.nodes:  # a view that the trace makes later
            return
        tangent, told, result = self.nodes[node].result, output.meta["val"], self.nodes[output].result
        if tangent.stride() != told.stride() or result.stride() == told.stride():
            return
        if not torch.ops.aten.is_non_overlapping_and_dense(result):
            return
        laid_out = torch.empty_strided(result.shape, result.stride(), dtype=tangent.dtype, device=tangent.device)
        value = self.tangent_of[position]
        self.metas[value] = TensorMeta.of(laid_out)
        self.values[value] = replace(self.values[value], spec=str(self.metas[value]))
        self.storages[_storage(laid_out)] = value
        self.owners.append(laid_out)
        self.nodes[node] = _Node(laid_out, True, value)

    @cached_property
    def _output(self) -> fx.Node:
        return next(iter(reversed(self.graph.nodes)))

    def _resident(self, target: str, parameter: bool, fake: torch.Tensor) -> _Node:
        """A parameter or buffer; one that has several names, as tied weights have, is one value."""
        name, tensor = self.flat.tensor(target)
        first, known = self.named.setdefault(id(tensor), (name, _Node(fake, False)))
        self.first_name[target] = first
        if first == name:
            known.value = self._value(name, "parameter" if parameter else "buffer", fake)
            (self.parameters if parameter else self.buffers).append((name, known.value))
            if target.startswith(HELD):
                self.constants[name] = tensor
        return known

    def _constant(self, node: fx.Node) -> None:
        """A tensor that the graph has as an attribute: made in the forward from numbers, or read in the backward only."""
        tensor = getattr(self.graph.owning_module, str(node.target))
        if node.target in self.attributes:
            self.nodes[node] = self.nodes[self.attributes[str(node.target)]]
            return
        if id(tensor) in self.named:  # the backward reads it, by a checkpoint or a custom function, as the forward does
            self.nodes[node] = self.named[id(tensor)][1]
            return
        if not isinstance(tensor, torch.Tensor) or (tensor.requires_grad and not self.in_backward):
            raise CaptureError(
                f"{type(self.flat.model).__name__}.forward reads a {type(tensor).__name__} that is not registered and requires a "
                "gradient; register it: nn.Parameter as an attribute, nn.ModuleList or nn.ParameterList in place of a list"
            )
        self.attributes[str(node.target)] = node
        fake = node.meta["val"]
        name = constant_name(len(self.flat.held._parameters) + len(self.flat.held._buffers) + len(self.attributes) - 1)
        value = self._value(name, "buffer", fake)
        self.buffers.append((name, value))
        self.constants[name] = tensor
        self.nodes[node] = _Node(fake, False, value)

    # Calls ----------------------------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> None:
        known = len(self.values)
        self._call_unmarked(node)
        layer = layer_of(node)
        if layer is not None:
            self.layers.update((value, layer) for value in range(known, len(self.values)))
        if called_in_place(node) and not self.in_backward:
            self.in_place.update(range(known, len(self.values)))
            if self._is_idle_clone(node):
                self.saved.add(self.storages[_storage(self.nodes[node].result)])
        mark = mark_of(node)
        if mark is not None and not self.in_backward:
            self.marks.update((value, mark) for value in range(known, len(self.values)))

    def _call_unmarked(self, node: fx.Node) -> None:
        for parent in node.all_input_nodes:
            if parent in self.unread_tangents:
                self._lay_out_tangent(parent, self.unread_tangents.pop(parent))
        parents = [self.nodes[n] for n in node.all_input_nodes]
        # Noise that the backward draws is drawn once, in its place among the slots, whatever it depends on.
        backward = any(p.backward for p in parents) or (_of_the_backward(node) and _is_random(node))
        self.in_backward |= backward
        if node.target is operator.getitem:
            source, index = _args(node)
            self._getitem(node, self.nodes[source], index, backward)
            return
        if not isinstance(node.target, torch._ops.OpOverload):
            raise CaptureError(f"{node.target} at {_user_line(node)} is not an ATen operator and cannot be scheduled")
        if node.target is _CUDNN_LAYERS:
            raise CaptureError(
                "a recurrent layer runs by cuDNN, whose workspace for the backward only cuDNN knows the size of; plan and train "
                "inside `with torch.backends.cudnn.flags(enabled=False):`, where PyTorch's own operators do the same"
            )
        if _is_dropout(node, self.nodes):
            self._dropout(node, backward)
            return
        if node.target is torch.ops.aten.native_dropout_backward.default and _args(node)[1] in self.noises:
            self._dropout_backward(node)
            return
        args, kwargs = _map((_args(node), node.kwargs), lambda n: self.nodes[n].result)
        if node.target is torch.ops.aten.view.default and not _can_view(*args):
            # What dropout makes lies as its input does, and the trace took it to be contiguous: eager mode's reshape copies.
            node.target = torch.ops.aten.reshape.default
        result: Any
        if self._is_idle_clone(node) or self._is_idle_cast(node) or self._is_idle_copy(node):
            result = args[0]
        elif self._fills_in_its_own_order(node):
            result = torch.empty_like(args[0])
        elif node.target is torch.ops.aten.roll.default and args[0].device.type == "cpu":
            result = rolled(*args, **kwargs)
        else:
            result = node.target(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.device.type == "cpu":
            result = elementwise_result(node.target, args, result)
        if node.target in _UNFOLDING:
            result = unfolded(args[0], result)
        elif node.target is torch.ops.aten._embedding_bag.default and args[0].device.type == "cpu":
            result = bags(result)
        elif node.target is torch.ops.aten.convolution.default:
            result = convolved(args, result)
        if node.target is torch.ops.aten._native_batch_norm_legit_functional.default:
            result = _as_computed(node.target, args, result)
            if self._owns(_args(node)[3], "buffer"):
                # The statistics are updated where they live, as in eager mode: the new ones are the buffers.
                result = (*result[:3], args[3], args[4])
        elif node.target in _NORMALISATIONS:
            result = _as_computed(node.target, args, result)
        elif node.target is torch.ops.aten.native_batch_norm_backward.default and args[1].device.type == "cpu":
            result = (None if result[0] is None else batch_norm_gradient(*args[:2]), *result[1:])
        elif self._reserve_of(node) is not None:
            result = (None if result[0] is None else _as_cudnn_makes(args[1]), *result[1:])
        elif self._observes_in_place(node):
            result = (*result[:2], *args[3:7])  # likewise; in eager mode the observer even resizes them
        elif node.target is ONEDNN_LAYER:
            result = with_workspace(args, result)
        elif str(node.target) == _SYNC_BATCH_NORM_GATHER and self._is_buffer(args[1]) and self._is_buffer(args[2]):
            result = (*result[:3], args[1], args[2])  # likewise
        if node.target in _BATCH_NORM_NODES and self._is_by_cudnn(node, args):
            result = (_as_cudnn_makes(args[0]), *result[1:])
            self.by_cudnn[node] = None
        self.nodes[node] = info = _Node(result, backward)
        fresh = [t for t in _tensors(result) if _storage(t) not in self.storages]
        if not fresh:
            return  # a view, or a list of views: re-emitted by each task that uses it
        self._task(node, info)

    def _is_by_cudnn(self, node: fx.Node, args: Sequence[Any]) -> bool:
        """Whether plain PyTorch computes a node, which is a batch norm, by cuDNN."""
        places, training = _BATCH_NORM_NODES[_op(node)]
        x, weight, bias, mean, var, _, eps = [cast(Any, None if place is None else args[place]) for place in places]
        return by_cudnn(x.device, x, weight, bias, mean, var, training, eps)

    def _reserve_of(self, node: fx.Node) -> Ref | None:
        """The reserve that a node reads, which is the gradient of a batch norm by cuDNN; None for all other nodes."""
        if str(node.target) != NATIVE_BACKWARD or not _args(node)[7]:
            return None
        mean = _args(node)[5]
        made = isinstance(mean, fx.Node) and mean.target is operator.getitem
        return self.by_cudnn.get(_args(mean)[0]) if made else None

    def _observes_in_place(self, node: fx.Node) -> bool:
        """Whether a node is a fake quantisation whose observer updates buffers."""
        return node.target is _FAKE_QUANTIZE and all(self._owns(arg, "buffer") for arg in _args(node)[3:7])

    def _is_idle_clone(self, node: fx.Node) -> bool:
        """Whether a node copies a value that nothing will overwrite, as in-place activations do with what they save."""
        if node.target is not torch.ops.aten.clone.default or node.kwargs:
            return False
        source = self.nodes[_args(node)[0]]
        return source.value is not None and self.values[source.value].kind == "forward" and not reaches_output(node)

    def _result_of(self, node: fx.Node) -> torch.Tensor:
        result: torch.Tensor = self.nodes[node].result
        return result

    def _fills_in_its_own_order(self, node: fx.Node) -> bool:
        """Whether a node stands for ``bernoulli_`` on a tensor that is not in rows: it draws as that one's elements lie."""
        return fills_with_noise(node) and not self._result_of(_args(node)[0]).is_contiguous()

    def _is_idle_cast(self, node: fx.Node) -> bool:
        """Whether a node casts new statistics of a batch norm to what they are where they live."""
        if node.target is not torch.ops.aten._to_copy.default or not self._owns(_args(node)[0], "buffer"):
            return False
        source = _args(node)[0]
        same = node.kwargs.get("dtype") == self.nodes[source].result.dtype and "device" not in node.kwargs
        return source.op != "placeholder" and same

    def _is_idle_copy(self, node: fx.Node) -> bool:
        """Whether a node copies a buffer's new contents, which are where they live, into it."""
        if node.target is not torch.ops.aten.copy.default:
            return False
        into, source = (self.nodes[arg].result for arg in _args(node)[:2])
        return self._is_buffer(into) and self._is_buffer(source) and _storage(into) == _storage(source)

    def _is_buffer(self, tensor: Any) -> bool:
        """Whether a result is a buffer as it lives in its module."""
        value = self.storages.get(_storage(tensor)) if isinstance(tensor, torch.Tensor) else None
        return value is not None and self.values[value].kind == "buffer" and TensorMeta.of(tensor) == self.metas[value]

    def _getitem(self, node: fx.Node, source: _Node, index: Any, backward: bool) -> None:
        result = source.result[index]
        info = self.nodes[node] = _Node(result, backward)
        value = self.storages.get(_storage(result)) if isinstance(result, torch.Tensor) else None
        if value is not None and TensorMeta.of(result) == self.metas[value]:
            info.value = value

    def _owns(self, arg: Any, kind: str) -> bool:
        value = self.nodes[arg].value if isinstance(arg, fx.Node) else None
        return value is not None and self.values[value].kind == kind

    def _task(self, node: fx.Node, info: _Node) -> None:
        """The task of a node that makes new storages."""
        kind = "backward" if info.backward else "forward"
        calls, args, kwargs = self._emit_args(node)
        args = self._laid_out(node, calls, args)
        unpack = not isinstance(info.result, torch.Tensor)
        outs: list[Ref | None] = []
        writes: list[int] = []
        used = {_args(n)[1] for n in node.users if n.target is operator.getitem} if unpack else {0}
        for index, tensor in enumerate(info.result if unpack else (info.result,)):
            if index not in used or not isinstance(tensor, torch.Tensor) or _storage(tensor) in self.storages:
                outs.append(None)
                continue
            value = self._value(node.name if not unpack else f"{node.name}.{index}", kind, tensor)
            outs.append(Ref(value))
            writes.append(value)
        if not unpack:
            info.value = writes[0]
        op = str(node.target)
        if node in self.by_cudnn and _BATCH_NORM_NODES[_op(node)][1] and 1 in used:
            like = info.result[0]
            kept = torch.empty(reserve_bytes(like), dtype=torch.uint8, device=like.device)
            self.by_cudnn[node] = Ref(self._value(f"{node.name}.reserve", kind, kept))
        if op == "aten._native_batch_norm_legit_functional.default" and len(_tensors(info.result)) == 5:
            self._batch_norm(node, calls, args, outs, writes)
            return
        if node in self.by_cudnn:
            places, training = _BATCH_NORM_NODES[_op(node)]
            *tensors, momentum, eps = (None if place is None else args[place] for place in places)
            reserve = self.by_cudnn[node]
            op, args, outs = CUDNN, (*tensors, training, momentum, eps), [*outs, reserve]
            writes += [cast(int, reserve.name)] if reserve else []
        elif (reserve := self._reserve_of(node)) is not None:
            taken = backward_of(Call(op, args, (), ()))
            assert taken is not None
            op, args = CUDNN_BACKWARD, taken.cudnn_with(reserve)
        if op in _IN_LARGE_STORAGE and not info.result.dim():
            whole = Ref(f"{node.name}_whole")
            calls.append(Call(op, args, kwargs, (whole,)))
            op, args, kwargs = "aten.clone.default", (whole,), ()
        call = Call(op, args, kwargs, tuple(outs), unpack)
        if op == "aten.copy.default" and _is_part(self._result_of(_args(node)[0])):
            # The operator's own result would take as much unused memory as lies before and between what is copied into.
            meta, copied = self.metas[writes[0]], Ref(writes[0])
            options = (("dtype", meta.dtype), ("device", meta.device))
            calls = []
            source = self._emit(_args(node)[1], calls)
            calls.append(Call("aten.empty_strided.default", (meta.shape, meta.stride), options, (copied,)))
            call = Call("aten.copy_.default", (copied, source), (), ())
        if self._fills_in_its_own_order(node):
            meta, noise = self.metas[writes[0]], Ref(writes[0])
            options = (("dtype", meta.dtype), ("device", meta.device))
            calls = [Call("aten.empty_strided.default", (meta.shape, meta.stride), options, (noise,))]
            call = Call("aten.bernoulli_.float", (noise, *args[1:]), kwargs, ())
        if self._observes_in_place(node):
            self._observe(node, calls, call, writes)
        elif op == _SYNC_BATCH_NORM_GATHER:
            self._gather(node, (*calls, call), writes)
        elif op == "aten.convolution_backward.default" and outs[0] is not None and len(writes) > 1:
            self._convolution_backward(node, calls, call)
        elif info.backward:
            self.slots.append(self._make(node.name, (*calls, call), writes))
            if _is_random(node):
                self.drawn.update(writes)
        elif self.in_backward:
            self.late.append(self._make(node.name, (*calls, call), writes, runs="again"))
        elif _is_random(node):
            self._random(node, (*calls, call), writes)
        else:
            runs: Runs = "first" if self._reads_updated_buffer(node) else "both"
            self.tasks.append(self._make(node.name, (*calls, call), writes, runs=runs))

    def _make(self, name: str, calls: Sequence[Call], writes: Sequence[int], **options: Any) -> Task:
        return make_task(name, calls, writes, self.metas, **options)

    def _batch_norm(
        self, node: fx.Node, calls: list[Call], args: tuple[Any, ...], outs: list[Any], writes: list[int]
    ) -> None:
        """Training-mode batch norm: statistics move in the forward only; a rerun normalises by the batch again."""
        x, weight, bias, *running, _, momentum, eps = args
        before = calls
        if not self._owns(_args(node)[3], "buffer"):  # instance norm's, those of every sample: new ones beside the old
            moved = [out or Ref(f"new_{name}") for name, out in zip(("mean", "var"), outs[3:], strict=True)]
            copies = (Call("aten.clone.default", (old,), (), (new,)) for old, new in zip(running, moved, strict=True))
            before, running = [*calls, *copies], moved
        effect = self._pseudo_value(f"{node.name}.statistics", 0)
        self.effects.append(effect)
        update = Call(NATIVE, (x, weight, bias, *running, True, momentum, eps), (), tuple(outs[:3]), True)
        again = Call(
            "aten._native_batch_norm_legit.no_stats",
            (x, weight, bias, True, momentum, eps),
            (),
            (outs[0], None, None),
            True,
        )
        made = writes[:1]
        if node in self.by_cudnn:
            reserve = self.by_cudnn[node]
            update = replace(update, op=CUDNN, outs=(*update.outs, reserve))
            again = replace(update, args=(x, weight, bias, None, None, *update.args[5:]), outs=(*again.outs, reserve))
            left = [cast(int, reserve.name)] if reserve else []
            writes, made = [*writes, *left], [*made, *left]
        self.tasks.append(self._make(node.name, (*before, update), (*writes, effect), runs="first"))
        if outs[0] is not None:
            self.tasks.append(self._make(f"{node.name}.again", (*calls, again), made, runs="again"))

    def _gather(self, node: fx.Node, calls: Sequence[Call], writes: list[int]) -> None:
        """SyncBatchNorm's statistics: the group waits for them once, in the forward, whether or not anything reads them."""
        *views, call = calls
        effect = self._pseudo_value(f"{node.name}.statistics", 0)
        self.effects.append(effect)
        if call.outs[3] is None and call.outs[4] is None:  # the running ones move where they live, if there are any
            call = replace(call, op="monet_like.sync_batch_norm_gather.default", outs=call.outs[:3])
        self.tasks.append(self._make(node.name, (*views, call), (*writes, effect), runs="first"))

    def _observe(self, node: fx.Node, calls: Sequence[Call], call: Call, writes: list[int]) -> None:
        """Fake quantisation: its observer sees the tensor once, in the forward, and updates buffers where they live."""
        effect = self._pseudo_value(f"{node.name}.observer", 0)
        self.effects.append(effect)
        call = replace(call, op="aten._fused_moving_avg_obs_fq_helper.default", outs=call.outs[:2])
        self.tasks.append(self._make(node.name, (*calls, call), (*writes, effect), runs="first"))

    def _convolution_backward(self, node: fx.Node, calls: Sequence[Call], call: Call) -> None:
        """The gradients of weight and bias, then that of the input: PyTorch computes them apart, one after the other.

        As two slots each may be done in its own way; those of the second need not read the convolution's input.
        """
        of_input, *of_weights = call.outs
        parts: dict[str, tuple[Ref | None, ...]] = {"weight": (None, *of_weights), "input": (of_input, None, None)}
        for name, outs in parts.items():
            part = Call(call.op, (*call.args[:-1], [out is not None for out in outs]), call.kwargs, outs, True)
            writes = cast("list[int]", [out.name for out in outs if out is not None])
            self.slots.append(self._make(f"{node.name}.{name}", (*calls, part), writes))

    def _random(self, node: fx.Node, calls: Sequence[Call], writes: Sequence[int]) -> None:
        """A random operator draws once. Run again, it starts from the generator state of the first time.

        What nothing reads is drawn all the same: what is drawn after it depends on that.
        """
        if node not in self._read_nodes:
            effect = self._pseudo_value(f"{node.name}.drawn", 0)
            self.effects.append(effect)
            self.tasks.append(self._make(node.name, calls, (*writes, effect), runs="first"))
            return
        device = str(self.metas[writes[0]].device)
        bytes_ = 5056 if device == "cpu" else 0  # the CPU generator's state; CUDA's is a few bytes on the host
        state = self._pseudo_value(f"{node.name}.rng_state", bytes_)
        get = Call("monet_like.get_rng_state", (device,), (), (Ref(state),))
        now = Call("monet_like.get_rng_state", (device,), (), (Ref("rng_now"),))
        rewind = Call("monet_like.set_rng_state", (device, Ref(state)), (), ())
        restore = Call("monet_like.set_rng_state", (device, Ref("rng_now")), (), ())
        self.tasks.append(self._make(node.name, (get, *calls), (*writes, state), runs="first"))
        self.tasks.append(self._make(f"{node.name}.again", (now, rewind, *calls, restore), writes, runs="again"))

    def _dropout(self, node: fx.Node, backward: bool) -> None:
        """Dropout on a CPU as eager mode does it: x * noise, where noise is 0 or 1 / (1 - p).

        The trace has ``native_dropout`` (the CUDA kernel, with a boolean mask) instead, whose scaling rounds
        differently. As two tasks, the product can be recomputed without drawing again. Where p is 1 nothing is drawn, on
        any device: noise is a zero.
        """
        x, p, _ = _args(node)
        like = self.nodes[x].result
        keep = 1.0 - p
        if self.nodes[x].backward:
            self._dropout_of_gradient(node, x, keep)
            return
        meta = TensorMeta.of(like)
        draw: tuple[Call, ...]
        options = (("dtype", meta.dtype), ("device", meta.device))
        kind = "backward" if backward else "forward"
        noise = self._value(f"{node.name}.noise", kind, torch.empty_like(like) if keep else like.new_empty(()))
        if keep:
            draw = (
                Call("aten.empty_strided.default", (meta.shape, self.metas[noise].stride), options, (Ref(noise),)),
                Call("aten.bernoulli_.float", (Ref(noise), keep), (), ()),
                Call("aten.div_.Scalar", (Ref(noise), keep), (), ()),
            )
        else:
            draw = (Call("aten.zeros.default", ((),), options, (Ref(noise),)),)
        if backward:
            self.slots.append(self._make(f"{node.name}.noise", draw, (noise,)))
        elif keep:
            self._random(node, draw, (noise,))
        else:
            self.tasks.append(self._make(f"{node.name}.noise", draw, (noise,)))
        calls: list[Call] = []
        source = self._emit(x, calls)
        result = product(like, self._like(noise))
        value = self._value(f"{node.name}.0", kind, result)
        multiply = Call("aten.mul.Tensor", (source, Ref(noise)), (), (Ref(value),))
        (self.slots if backward else self.tasks).append(self._make(f"{node.name}.scale", (*calls, multiply), (value,)))
        mask = torch.empty_like(like, dtype=torch.bool)
        self.nodes[node] = _Node((result, mask), backward)
        self.noises.update((user, noise) for user in node.users if _args(user)[1] == 1)

    def _like(self, value: int) -> torch.Tensor:
        meta = self.metas[value]
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)

    def _dropout_of_gradient(self, node: fx.Node, x: fx.Node, keep: float) -> None:
        """Dropout that a backward does, by a hook or a custom function: every slot runs once, so noise is drawn there."""
        like = self.nodes[x].result
        calls: list[Call] = []
        source = self._emit(x, calls)
        noise_like = torch.empty_like(like) if keep else like.new_empty(())
        result = product(like, noise_like)
        value = self._value(f"{node.name}.0", "backward", result)
        meta = self.metas[value]
        noise = Ref("noise")
        options = (("dtype", meta.dtype), ("device", meta.device))
        if keep:
            calls += (
                Call("aten.empty_strided.default", (meta.shape, meta.stride), options, (noise,)),
                Call("aten.bernoulli_.float", (noise, keep), (), ()),
                Call("aten.div_.Scalar", (noise, keep), (), ()),
            )
        else:
            calls.append(Call("aten.zeros.default", ((),), options, (noise,)))
        calls.append(Call("aten.mul.Tensor", (source, noise), (), (Ref(value),)))
        self.slots.append(self._make(f"{node.name}.scale", calls, (value,)))
        self.nodes[node] = _Node((result, torch.empty_like(like, dtype=torch.bool)), True)

    def _dropout_backward(self, node: fx.Node) -> None:
        grad, mask, _ = _args(node)
        calls: list[Call] = []
        source = self._emit(grad, calls)
        result = product(self.nodes[grad].result, self._like(self.noises[mask]))
        value = self._value(node.name, "backward", result)
        multiply = Call("aten.mul.Tensor", (source, Ref(self.noises[mask])), (), (Ref(value),))
        self.nodes[node] = _Node(result, True, value)
        self.slots.append(self._make(node.name, (*calls, multiply), (value,)))

    def _reads_updated_buffer(self, node: fx.Node) -> bool:
        """Whether a node reads a resident that the step changes: such a node must not run a second time."""
        return any(
            self.storages.get(_storage(t)) in self._updated
            for n in node.all_input_nodes
            for t in _tensors(self.nodes[n].result)
        )

    @cached_property
    def _read_nodes(self) -> set[fx.Node]:
        """Nodes that results, gradients or updates of buffers are made from."""
        pending = [next(iter(reversed(self.graph.nodes)))]
        found = set(pending)
        while pending:
            fresh = set(pending.pop().all_input_nodes) - found
            found |= fresh
            pending += fresh
        return found

    @cached_property
    def _updated(self) -> set[int]:
        """Residents that the step changes; all inputs must have been seen."""
        found = (d.mutated_input for d in self._output.meta["desc"] if type(d).__name__ == "InputMutationAOTOutput")
        return {value for changed in found if (value := self._value_of(changed)) is not None}

    def _value_of(self, changed: Any) -> int | None:
        """The value of an input as the tracer describes it."""
        if hasattr(changed, "idx"):
            return self.inputs.get(changed.idx)
        return dict((*self.parameters, *self.buffers)).get(self.first_name.get(getattr(changed, "target", ""), ""))

    def _read_changed_once(self) -> None:
        """Nothing runs again that reads what has other contents when the forward has ended."""
        for task in (*self.late, *self.slots):
            if not self.changed.isdisjoint(task.reads):
                names = ", ".join(self.values[v].name for v in task.reads if v in self.changed)
                raise CaptureError(
                    f"{type(self.flat.model).__name__}.forward changes {names} in place after {task.name} has read it, whose "
                    "gradient needs it as it was; change a clone"
                )
        self.tasks = [
            replace(task, runs="first") if not self.changed.isdisjoint(task.reads) else task
            for task in self.tasks
            if task.runs != "again" or self.changed.isdisjoint(task.reads)
        ]

    # Views ----------------------------------------------------------------------------------------------------

    def _emit_args(self, node: fx.Node) -> tuple[list[Call], tuple[Any, ...], tuple[tuple[str, Any], ...]]:
        """The node's arguments with refs for tensors, and the view calls that make them."""
        calls: list[Call] = []
        args, kwargs = _map((_args(node), dict(node.kwargs)), lambda n: self._emit(n, calls))
        return calls, tuple(args), tuple(kwargs.items())

    def _laid_out(self, node: fx.Node, calls: list[Call], args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, those in the layout of plain PyTorch that the trace has in another."""
        layouts = {} if self.in_backward else eager_layouts(node)
        found = list(args)
        for position, strides in layouts.items():
            meta, copy = (
                TensorMeta.of(self.nodes[_args(node)[position]].result),
                Ref(f"t_{node.name}_laid_out_{position}"),
            )
            options = (("dtype", meta.dtype), ("device", meta.device))
            calls.append(Call("aten.empty_strided.default", (meta.shape, strides), options, (copy,)))
            calls.append(Call("aten.copy_.default", (copy, args[position]), (), ()))
            found[position] = copy
        return tuple(found)

    def _emit(self, node: fx.Node, calls: list[Call]) -> Ref:
        """A ref to the tensor of ``node``, after appending to ``calls`` the views that lead to it."""
        info = self.nodes[node]
        if info.value is not None:
            return Ref(info.value)
        if isinstance(info.result, torch.Tensor):
            base = self.storages[_storage(info.result)]
            if TensorMeta.of(info.result) == self.metas[base]:
                return Ref(base)  # detach, or views that undo one another
        if str(node.target) in _SKIPPED_VIEWS:
            return self._emit(_args(node)[0], calls)
        if self._is_idle_clone(node):
            return self._emit(_args(node)[0], calls)
        name = Ref(f"t_{node.name}")
        if all(name not in call.outs for call in calls):
            op = "operator.getitem" if node.target is operator.getitem else str(node.target)
            args, kwargs = _map((_args(node), dict(node.kwargs)), lambda n: self._emit(n, calls))
            calls.append(Call(op, tuple(args), tuple(kwargs.items()), (name,)))
        return name

    def _tensor(self, node: fx.Node) -> Tensor:
        calls: list[Call] = []
        ref = self._emit(node, calls)
        info = self.nodes[node]
        return Tensor(ref, self.storages[_storage(info.result)], tuple(calls))

    # The end --------------------------------------------------------------------------------------------------

    def _finish(self, node: fx.Node) -> Captured:
        outputs: list[Tensor] = []
        written: dict[int, Tensor] = {}
        gradients: list[tuple[Any, fx.Node]] = []
        for target, desc in zip(_args(node)[0], node.meta["desc"], strict=True):
            kind = type(desc).__name__
            if target is None:
                continue  # no gradient is wanted there
            if kind == "InputMutationAOTOutput" and getattr(desc.mutated_input, "idx", None) in self.written:
                written[self.written[desc.mutated_input.idx]] = self._tensor(target)
                self.changed.add(self.inputs[desc.mutated_input.idx])
            elif kind == "InputMutationAOTOutput":
                self._update(desc.mutated_input, target)
            elif kind == "PlainAOTOutput":
                outputs.append(self._tensor(target))
            elif kind == "GradAOTOutput":
                gradients.append((desc.grad_of, target))
            else:
                raise CaptureError(f"the traced graph has an output of a kind that is not supported: {desc}")
        outputs += (written[position] for position in sorted(written))
        parameter_gradients, input_gradients = self._gradients(gradients)
        self._read_changed_once()
        program = plain = self._program(outputs, [t.value for _, t in (*parameter_gradients, *input_gradients)])
        movable = self._movable(parameter_gradients)
        if self.made_last is None:
            late = worth_moving(program, movable)
        else:
            late = tuple(slot for slot, name in movable.items() if name in self.made_last)
        if late:
            self.slots = in_order(self.slots, late)
            parameter_gradients, input_gradients = map(self._in_order, (parameter_gradients, input_gradients))
            program = self._program(outputs, [t.value for _, t in (*parameter_gradients, *input_gradients)])
        assert self.flat.out_spec is not None
        return Captured(
            program=program,
            metas=tuple(self.metas),
            parameters=tuple(self.parameters),
            buffers=tuple(self.buffers),
            inputs=tuple(self.inputs[i] for i in sorted(self.inputs)),
            outputs=tuple(outputs),
            output_spec=self.flat.out_spec,
            output_leaves=tuple(self.flat.out_leaves),
            output_positions=tuple(self.flat.out_positions),
            tangents=tuple(self.tangent_of.get(i) for i in range(len(outputs))),
            parameter_gradients=tuple(parameter_gradients),
            input_gradients=tuple(input_gradients),
            device=self.metas[self.parameters[0][1]].device if self.parameters else torch.device("cpu"),
            marks=self.marks,
            layers=self.layers,
            as_called=self._as_called(plain) or (plain if late else None),
            made_last=tuple(movable[slot] for slot in late),
            reads=self.flat.reads,
            constants=Constants.of(self.constants, self.flat.model, self.flat.leaves),
            written=tuple(sorted(self.written, key=self.written.__getitem__)),
            changed=frozenset(self.changed),
        )

    def _program(self, outputs: Sequence[Tensor], gradients: Sequence[int]) -> Program:
        """What was gathered, with the slots in their present order."""
        slots = self._accumulating_in_place({*gradients})
        read = {value for slot in slots for value in slot.reads}
        held = {t.value for t in outputs if self.values[t.value].kind == "forward"}
        program = Program(
            values=tuple(self.values),
            tasks=(*self.tasks, *self.late),
            slots=tuple((slot,) for slot in slots),
            outputs=tuple(sorted({*held, *self.effects})),
            tangents=tuple(v for v in self.tangent_of.values() if v in read),
            gradients=tuple(dict.fromkeys(gradients)),
        )
        program.check()
        return program

    def _movable(self, gradients: Sequence[tuple[int, Tensor]]) -> dict[int, str]:
        """Slots after which nothing reads what they write: the whole gradient of a parameter, whose name this is."""
        fixed = {value for slot in self.slots for value in slot.reads} | self.drawn
        writer = {value: index for index, slot in enumerate(self.slots) for value in slot.writes}
        uses = Counter(index for index, _ in gradients)
        return {
            writer[tensor.value]: self.parameters[index][0]
            for index, tensor in gradients
            if uses[index] == 1 and tensor.value not in fixed and len(self.slots[writer[tensor.value]].writes) == 1
        }

    def _as_called(self, program: Program) -> Program | None:
        """``program`` in place where the model's calls are; None: it has none of them."""
        readers = Counter(value for task in program.every_task() for value in task.reads)
        tasks = list(program.tasks)
        for index, task in enumerate(tasks):
            if not self.in_place.issuperset(task.writes):
                continue
            if (found := in_place_form(program, task, self.metas, self.saved, readers)) is not None:
                calls, overwrites = found
                tasks[index] = self._make(task.name, calls, task.writes, overwrites=overwrites, runs=task.runs)
        return replace(program, tasks=tuple(tasks)) if tasks != list(program.tasks) else None

    def _update(self, target: Any, node: fx.Node) -> None:
        """New contents of a buffer or an input, copied in when the forward ends."""
        buffer = self._value_of(target)
        if buffer is None:
            raise CaptureError(
                f"{type(self.flat.model).__name__}.forward changes {target} in place, which is not supported"
            )
        name = self.values[buffer].name
        tensor = self._tensor(node)
        if tensor.ref == Ref(buffer):
            return  # batch-norm statistics: updated where they live
        self.changed.add(buffer)
        effect = self._pseudo_value(f"{name}.update", 0)
        self.effects.append(effect)
        counted = self._counted(tensor.value, buffer)
        if counted:  # num_batches_tracked: counted where it lives, as in eager mode
            self.tasks = [task for task in self.tasks if task not in counted]
            calls = tuple(
                Call("aten.add_.Tensor", (Ref(buffer), *t.calls[0].args[1:]), t.calls[0].kwargs, ()) for t in counted
            )
        else:
            calls = (*tensor.calls, Call("aten.copy_.default", (Ref(buffer), tensor.ref), (), ()))
        self.tasks.append(self._make(f"{name}.update", calls, (effect,), runs="first"))

    def _counted(self, value: int, buffer: int) -> list[Task]:
        """The tasks that make ``value`` of ``buffer`` by adding one number after the other; none where others read it."""
        found: list[Task] = []
        while value != buffer:
            readers = [task for task in (*self.tasks, *self.slots) if value in task.reads and task not in found]
            makers = [task for task in self.tasks if task.writes == (value,)]
            call = makers[0].calls[-1] if len(makers) == 1 and not readers else None
            if call is None or call.op != "aten.add.Tensor" or len(makers[0].reads) != 1 or len(makers[0].calls) > 1:
                return []
            found.insert(0, makers[0])
            (value,) = makers[0].reads
        return found

    def _gradients(self, found: list[tuple[Any, fx.Node]]) -> tuple[list[tuple[int, Tensor]], list[tuple[int, Tensor]]]:
        """Parameter and input gradients in the order in which the slots make them, each with a storage of its own."""
        position = {name: index for index, (name, _) in enumerate(self.parameters)}
        owned: set[int] = set()
        parameters: list[tuple[int, Tensor]] = []
        inputs: list[tuple[int, Tensor]] = []
        for target, node in found:
            tensor = self._tensor(node)
            value = tensor.value
            if type(target).__name__ == "PlainAOTInput" and not _accumulates_as_it_is(
                *self._with_input(node, target.idx)
            ):
                tensor = self._as_accumulated(node, target.idx, tensor)
            elif value in owned or self.values[value].kind != "backward" or value in self.tangent_of.values():
                tensor = self._cloned(node, tensor)
            owned.add(tensor.value)
            if type(target).__name__ == "ParamAOTInput":
                parameters.append((position[self.first_name[target.target]], tensor))
            else:
                inputs.append((target.idx, tensor))
        return self._in_order(parameters), self._in_order(inputs)

    def _in_order(self, gradients: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
        """As the slots make them."""
        made = {value: index for index, slot in enumerate(self.slots) for value in slot.writes}
        return sorted(gradients, key=lambda g: made[g[1].value])

    def _cloned(self, node: fx.Node, tensor: Tensor) -> Tensor:
        """Two gradients must not share a storage, nor be the caller's own: the second is a copy."""
        value = self._value(
            f"{node.name}.copy{len(self.values)}", "backward", torch.empty_like(self.nodes[node].result)
        )
        clone = Call("aten.clone.default", (tensor.ref,), (), (Ref(value),))
        self.slots.append(self._make(self.values[value].name, (*tensor.calls, clone), (value,)))
        return Tensor(Ref(value), value)

    def _with_input(self, node: fx.Node, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._result_of(node), self._like(self.inputs[position])

    def _as_accumulated(self, node: fx.Node, position: int, tensor: Tensor) -> Tensor:
        """The gradient of an input laid out as PyTorch accumulates it: else it would be copied then, unseen."""
        gradient, given = self._with_input(node, position)
        dense = torch.ops.aten.is_non_overlapping_and_dense(given)
        strides = given.stride() if dense else contiguous_strides(given.shape)
        like = torch.empty_strided(given.shape, strides, dtype=gradient.dtype, device=gradient.device)
        value = self._value(f"{node.name}.accumulated", "backward", like)
        options = (("dtype", like.dtype), ("device", like.device))
        empty = Call("aten.empty_strided.default", (tuple(like.shape), like.stride()), options, (Ref(value),))
        copy = Call("aten.copy_.default", (Ref(value), tensor.ref), (), ())
        self.slots.append(self._make(self.values[value].name, (*tensor.calls, empty, copy), (value,)))
        return Tensor(Ref(value), value)

    def _accumulating_in_place(self, gradients: set[int]) -> list[Task]:
        """The slots; gradients that meet are added in place, as the autograd engine does, where one of them ends there."""
        slots = list(self.slots)
        last = {value: index for index, slot in enumerate(self.slots) for value in slot.reads}
        keep = {*gradients, *self.tangent_of.values()}
        for index, slot in enumerate(self.slots):
            call = slot.calls[-1]
            if call.op != "aten.add.Tensor" or len(slot.calls) > 1 or call.kwargs or len(call.args) != 2:
                continue
            (out,) = slot.writes
            for mine, other in (call.args, call.args[::-1]):
                if (
                    isinstance(mine, Ref)
                    and isinstance(mine.name, int)
                    and isinstance(other, Ref)
                    and mine != other
                    and self.values[mine.name].kind == "backward"
                    and mine.name not in keep
                    and last[mine.name] == index
                    and self.metas[mine.name] == self.metas[out]
                ):
                    add = Call("aten.add_.Tensor", (mine, other), (), (Ref(out),))
                    slots[index] = self._make(slot.name, (add,), (out,), overwrites=mine.name)
                    break
        return slots


def _args(node: fx.Node) -> tuple[Any, ...]:
    """A node's arguments, of whatever types its operator takes."""
    return cast("tuple[Any, ...]", node.args)


def _op(node: fx.Node) -> Any:
    """A node's operator."""
    return node.target


def _map(tree: Any, function: Callable[[fx.Node], Any]) -> Any:
    """``tree`` with every node replaced by the function's result."""
    return fx.map_arg(tree, cast(Any, function))


def _storage(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        raise CaptureError(
            f"the model, or its backward, makes a tensor of layout {tensor.layout}, and only strided ones can be scheduled;"
            " for an Embedding, use sparse=False"
        )
    return tensor.untyped_storage()._cdata


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _of_the_backward(node: fx.Node) -> bool:
    """Whether a node was traced while the backward ran, whatever it depends on."""
    return bool(node.meta.get("partitioner_tag") == "is_backward")


def _is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in _op(node).tags:
        return False
    dropout = next((i for i, a in enumerate(_op(node)._schema.arguments) if a.name == "dropout_p"), None)
    if dropout is None:
        return True
    given = dict(node.kwargs).get("dropout_p", _args(node)[dropout] if dropout < len(_args(node)) else 0.0)
    return bool(given != 0.0)


def _is_dropout(node: fx.Node, nodes: Mapping[fx.Node, _Node]) -> bool:
    if node.target is not torch.ops.aten.native_dropout.default:
        return False
    x, p, train = _args(node)
    return bool(train and (p == 1.0 or (nodes[x].result.device.type == "cpu" and p > 0.0)))


def _without_tangent(node: fx.Node) -> bool:
    """Take an incoming gradient out of the sums that it is added in; False: it is used otherwise."""
    if any(user.target is not torch.ops.aten.add.Tensor or len(_args(user)) != 2 for user in node.users):
        return False
    for user in list(node.users):
        (other,) = (arg for arg in _args(user) if arg is not node)
        user.replace_all_uses_with(cast(fx.Node, other))
        user.graph.erase_node(user)
    return True


def _is_part(tensor: torch.Tensor) -> bool:
    """Whether a tensor is some of the elements of its storage."""
    return tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()


def _accumulates_as_it_is(gradient: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Whether autograd takes a gradient for ``leaf.grad`` as it lies (torch's ``obeys_layout_contract``)."""
    if not torch.ops.aten.is_non_overlapping_and_dense(leaf):
        return gradient.is_contiguous()
    extents = zip(gradient.shape, gradient.stride(), leaf.stride(), strict=True)
    return all(stride == own if extent != 1 else stride != 0 for extent, stride, own in extents)


def _can_view(tensor: torch.Tensor, shape: Sequence[int]) -> bool:
    """Whether a tensor of another shape can share its memory."""
    try:
        tensor.view(shape)
    except (RuntimeError, ValueError):
        return False
    return True


def _user_line(node: fx.Node) -> str:
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    return " ".join(lines[-2:]) if lines else "an unknown line"
