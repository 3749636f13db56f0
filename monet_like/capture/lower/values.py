"""Values of a program that is being lowered: the storages of a traced graph, and the views that lead to them."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import fx

from ...errors import CaptureError
from ...ir.program import Call, Ref, Runs, Task, Value
from ..annotations import Mark, called_in_place, eager_layouts
from ..captured import Tensor, TensorMeta, make_task
from ..quantised import int8_weights
from ..trace.flat_module import FlatModule
from ..trace.graph_edits import WRITES_OF_PARTS, is_part, reaches_output, reads_others

_SKIPPED_VIEWS = frozenset({"aten.detach.default", "aten.alias.default", "aten.lift_fresh.default"})


@dataclass(slots=True)
class NodeResult:
    """The result of a graph node.

    Attributes:
        result: a fake tensor, or several.
        backward: whether it depends on incoming gradients.
        value: whose own tensor it is; None for views and tuples.
    """

    result: Any
    backward: bool
    value: int | None = None


class Values:
    """Values, and the tasks that make them, as far as the graph has been lowered."""

    def __init__(self, flat: FlatModule, graph: fx.Graph, *, moved: bool = False) -> None:
        self.flat, self.graph = flat, graph
        self.moved = moved  # the graph was traced on another device: results are not the traced ones
        self._as_traced: dict[fx.Node, bool] = {}
        self.values: list[Value] = []
        self.metas: list[TensorMeta] = []
        self.storages: dict[int, int] = {}  # identity of a storage -> its value
        self.owners: list[torch.Tensor] = []  # kept alive: an identity is only unique among the living
        self.nodes: dict[fx.Node, NodeResult] = {}
        # Tasks of the forward, tasks that read forward values only but are in the backward, and tasks of the backward.
        self.tasks: list[Task] = []
        self.again: list[Task] = []
        self.slots: list[Task] = []
        self.effects: list[int] = []  # values that stand for side effects of the forward
        # The model's tensors.
        self.parameters: list[tuple[str, int]] = []
        self.buffers: list[tuple[str, int]] = []
        # Identity of a parameter or buffer -> its first name, its node.
        self.named: dict[int, tuple[str, NodeResult]] = {}
        self.first_name: dict[str, str] = {}  # the tracer's name of a tensor -> the tensor's first name
        self.constants: dict[str, torch.Tensor] = {}
        self.attributes: dict[str, fx.Node] = {}  # the first node of each tensor that is an attribute of the graph
        self.changed: set[int] = set()  # residents whose contents differ when the forward has ended
        self.contents: dict[int, int] = {}  # values that become the contents of residents -> these
        # Inputs and incoming gradients.
        self.inputs: dict[int, int] = {}
        self.tangent_of: dict[int, int] = {}  # position of an output -> value of its incoming gradient
        self.unread_tangents: dict[fx.Node, int] = {}  # those that no node has read yet -> position of the output
        self.written: dict[int, int] = {}  # position of an input that the forward changes -> that among the outputs
        # Facts remembered about operators.
        self.drawn: set[int] = set()  # noise that slots draw: the order of these slots counts
        self.noises: dict[fx.Node, int] = {}  # dropout on a CPU: node of the mask -> the noise that replaces it
        self.int8_weights = int8_weights(flat.model)
        self.by_cudnn: dict[fx.Node, Ref | None] = {}  # batch norm that cuDNN computes -> its reserve
        self.in_backward = False
        self.autograd_nodes: dict[str, int] = {}  # name of a slot -> the node of autograd's graph
        self.forward_calls: Counter[int] = Counter()  # node of autograd's graph -> operators that its forward calls
        self.copy_slices: set[int] = set()  # nodes that make a gradient of a whole tensor from that of a view
        self.marks: dict[int, Mark] = {}
        self.layers: dict[int, str] = {}
        self.in_place: set[int] = set()  # values that the model's own calls write into what they read
        self.held: set[int] = set()  # values that plain PyTorch keeps to the end of the step
        self.made_in_part: set[fx.Node] = set()  # see `is_made_in_part`
        self.saved: set[int] = set()  # values that these calls copy first, for the backward
        self.examples: dict[int, list[tuple[Tensor, torch.Tensor]]] = {}  # see `Captured`

    def new_value(self, name: str, kind: Any, tensor: torch.Tensor) -> int:
        """A new value for the storage of ``tensor``: its index in ``values``."""
        meta = TensorMeta.of(tensor)
        index = len(self.values)
        self.values.append(Value(name, meta.allocated_bytes, kind, str(meta)))
        self.metas.append(meta)
        self.storages[storage_of(tensor)] = index
        self.owners.append(tensor)
        return index

    def new_state(self, name: str, bytes_: int) -> int:
        """A forward value that is no tensor of the graph: a side effect, or a random generator's state."""
        self.values.append(Value(name, bytes_, "forward", "state"))
        self.metas.append(TensorMeta(torch.uint8, torch.device("cpu"), (bytes_,), (1,), 0, bytes_))
        return len(self.values) - 1

    def make_task(self, name: str, calls: Sequence[Call], writes: Sequence[int], **options: Any) -> Task:
        """A task of the program, with the options of `captured.make_task`."""
        return make_task(name, calls, writes, self.metas, **options)

    def add_effect(
        self, name: str, calls: Sequence[Call], effect: str, writes: Sequence[int] = (), **options: Any
    ) -> None:
        """A task of the forward that is run for what it does: once, whether anything reads what it writes or not.

        Args:
            effect: name of the value that stands for what it does.
        """
        self.effects.append(self.new_state(effect, 0))
        self.tasks.append(self.make_task(name, calls, (*writes, self.effects[-1]), runs="first", **options))

    def add_forward_task(self, node: fx.Node, calls: Sequence[Call], writes: Sequence[int]) -> None:
        """The task of a node that needs no incoming gradient."""
        runs: Runs = "again" if self.in_backward else "first" if self.reads_updated_resident(node) else "both"
        (self.again if self.in_backward else self.tasks).append(self.make_task(node.name, calls, writes, runs=runs))

    def result_of(self, node: fx.Node) -> torch.Tensor:
        """The fake tensor that a node makes."""
        result: torch.Tensor = self.nodes[node].result
        return result

    def reads_as_traced(self, node: fx.Node) -> bool:
        """Whether all tensors that a node reads are laid out as they were in the trace."""
        return not self.moved and not reads_others(node) and all(map(self._is_as_traced, node.all_input_nodes))

    def _is_as_traced(self, node: fx.Node) -> bool:
        if (known := self._as_traced.get(node)) is None:
            pairs = zip_longest(_leaves(self.nodes[node].result), _leaves(node.meta.get("val")))
            known = self._as_traced[node] = all(is_alike(now, traced) for now, traced in pairs)
        return known

    def traced_result(self, node: fx.Node) -> Any:
        """The result of a node in the trace, where calling its operator anew would make the same; else None.

        Results have the layouts of eager mode (`eager_results`), so some inputs differ from those in the trace. Where
        none does, an operator that makes new storages has the traced result. A view has it only if it lies in a storage
        that is known.
        """
        if not self.reads_as_traced(node):
            return None
        result = node.meta.get("val")
        storages = {storage_of(tensor) for tensor in tensors_in(result)}
        if not storages:
            return None
        if cast(Any, node.target).is_view:
            return result if storages <= self.storages.keys() else None
        # An operator may return what it reads, which is known here by another storage than in the trace.
        read = {storage_of(tensor) for parent in node.all_input_nodes for tensor in tensors_in(parent.meta.get("val"))}
        return None if storages & read or storages & self.storages.keys() else result

    def is_buffer_node(self, arg: Any) -> bool:
        """Whether an argument is a node whose result is a buffer itself, not a view of one."""
        value = self.nodes[arg].value if isinstance(arg, fx.Node) else None
        return value is not None and self.values[value].kind == "buffer"

    def is_buffer_tensor(self, tensor: Any) -> bool:
        """Whether a tensor is a whole buffer, in the layout that the buffer has in its module."""
        value = self.storages.get(storage_of(tensor)) if isinstance(tensor, torch.Tensor) else None
        return value is not None and self.values[value].kind == "buffer" and TensorMeta.of(tensor) == self.metas[value]

    def is_needless_clone(self, node: fx.Node) -> bool:
        """Whether a node clones a value that nothing overwrites, as in-place activations clone what they save."""
        if node.target is not torch.ops.aten.clone.default or node.kwargs:
            return False
        source = self.nodes[args_of(node)[0]]
        return source.value is not None and self.values[source.value].kind == "forward" and not reaches_output(node)

    def is_needless_cast(self, node: fx.Node) -> bool:
        """Whether a node casts statistics that a batch norm has updated in place to the dtype that they have."""
        if node.target is not torch.ops.aten._to_copy.default or not self.is_buffer_node(args_of(node)[0]):
            return False
        source = args_of(node)[0]
        same = node.kwargs.get("dtype") == self.nodes[source].result.dtype and "device" not in node.kwargs
        return source.op != "placeholder" and same

    def is_needless_copy(self, node: fx.Node) -> bool:
        """Whether a node copies a buffer into itself, after an operator has updated it in place."""
        if node.target is not torch.ops.aten.copy.default:
            return False
        into, source = (self.nodes[arg].result for arg in args_of(node)[:2])
        return self.is_buffer_tensor(into) and self.is_buffer_tensor(source) and storage_of(into) == storage_of(source)

    def is_scaled_in_place(self, node: fx.Node) -> bool:
        """Whether a node casts an int8 weight that bitsandbytes then scales in place: it is dequantised at once."""
        if node.target is not torch.ops.aten._to_copy.default or len(node.users) != 1:
            return False
        weight, (user,) = self.storages[storage_of(self.result_of(args_of(node)[0]))], node.users
        scaled = user.target is torch.ops.aten.mul.Tensor and args_of(user)[0] is node
        return scaled and self.values[weight].name in self.int8_weights

    def is_made_in_part(self, node: fx.Node) -> bool:
        """Whether a node computes in place in a part of a tensor: the task of the write into that part makes it."""
        write = next(iter(node.users)) if len(node.users) == 1 else node
        part = args_of(node)[0] if args_of(node) else None
        if write.target not in WRITES_OF_PARTS or args_of(write)[1] is not node:
            return False
        if not isinstance(part, fx.Node) or not is_part(part, write):
            return False
        drawn = torch.Tag.nondeterministic_seeded in operator_of(node).tags
        in_place = called_in_place(node) and has_in_place_form(str(node.target)) and not drawn
        found = node.target in WRITES_OF_PARTS or in_place
        return found and not eager_layouts(node) and not self.reads_updated_resident(node)

    @cached_property
    def output(self) -> fx.Node:
        """The node that holds what the graph returns."""
        return next(iter(reversed(self.graph.nodes)))

    @cached_property
    def read_nodes(self) -> set[fx.Node]:
        """Nodes on which a result, a gradient or an update of a buffer depends."""
        pending = [self.output]
        found = set(pending)
        while pending:
            fresh = set(pending.pop().all_input_nodes) - found
            found |= fresh
            pending += fresh
        return found

    @cached_property
    def updated(self) -> set[int]:
        """Parameters, buffers and inputs that the forward changes; call it when all inputs have values."""
        found = (d.mutated_input for d in self.output.meta["desc"] if type(d).__name__ == "InputMutationAOTOutput")
        return {value for changed in found if (value := self.value_of(changed)) is not None}

    def value_of(self, changed: Any) -> int | None:
        """The value of an input, a parameter or a buffer that the tracer describes."""
        if hasattr(changed, "idx"):
            return self.inputs.get(changed.idx)
        return dict((*self.parameters, *self.buffers)).get(self.first_name.get(getattr(changed, "target", ""), ""))

    def reads_updated_resident(self, node: fx.Node) -> bool:
        """Whether a node reads a parameter, buffer or input that the forward changes: it must not run a second time."""
        return any(
            self.storages.get(storage_of(t)) in self.updated
            for n in node.all_input_nodes
            for t in tensors_in(self.nodes[n].result)
        )

    def emit_args(self, node: fx.Node) -> tuple[list[Call], tuple[Any, ...], tuple[tuple[str, Any], ...]]:
        """View calls that make a node's arguments, then its arguments and keyword arguments with refs for tensors."""
        calls: list[Call] = []
        args, kwargs = map_nodes((args_of(node), dict(node.kwargs)), lambda n: self.emit(n, calls))
        return calls, tuple(args), tuple(kwargs.items())

    def in_eager_layouts(self, node: fx.Node, calls: list[Call], args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, after appending to ``calls`` copies of those that plain PyTorch has in another layout."""
        layouts = {} if self.in_backward else eager_layouts(node)
        found = list(args)
        for position, strides in layouts.items():
            meta = TensorMeta.of(self.nodes[args_of(node)[position]].result)
            copy = Ref(f"t_{node.name}_laid_out_{position}")
            calls.append(empty_call(replace(meta, stride=strides), copy))
            calls.append(Call("aten.copy_.default", (copy, args[position]), (), ()))
            found[position] = copy
        return tuple(found)

    def emit(self, node: fx.Node, calls: list[Call]) -> Ref:
        """A ref to the tensor of ``node``, after appending to ``calls`` the views that lead to it."""
        info = self.nodes[node]
        if info.value is not None:
            return Ref(info.value)
        if isinstance(info.result, torch.Tensor) and node not in self.made_in_part:
            base = self.storages[storage_of(info.result)]
            if TensorMeta.of(info.result) == self.metas[base]:
                return Ref(base)  # detach, or views that undo one another
        if str(node.target) in _SKIPPED_VIEWS:
            return self.emit(args_of(node)[0], calls)
        if self.is_needless_clone(node):
            return self.emit(args_of(node)[0], calls)
        name = Ref(f"t_{node.name}")
        if all(name not in call.outs for call in calls):
            op = "operator.getitem" if node.target is operator.getitem else str(node.target)
            args, kwargs = map_nodes((args_of(node), dict(node.kwargs)), lambda n: self.emit(n, calls))
            calls.append(Call(op, tuple(args), tuple(kwargs.items()), (name,)))
        return name

    def tensor(self, node: fx.Node) -> Tensor:
        """The result of ``node`` as a tensor that leaves the program."""
        calls: list[Call] = []
        ref = self.emit(node, calls)
        info = self.nodes[node]
        return Tensor(ref, self.storages[storage_of(info.result)], tuple(calls))


def args_of(node: fx.Node) -> tuple[Any, ...]:
    """A node's arguments, of whatever types its operator takes."""
    return cast("tuple[Any, ...]", node.args)


def operator_of(node: fx.Node) -> Any:
    """A node's operator."""
    return node.target


def has_in_place_form(op: str) -> bool:
    """Whether an operator has a form that writes into its first argument."""
    packet, name, overload = op.split(".")
    form = getattr(getattr(torch.ops, packet), f"{name}_", None)
    return form is not None and overload in form.overloads()


def map_nodes(tree: Any, function: Callable[[fx.Node], Any]) -> Any:
    """``tree`` with every node replaced by the function's result."""
    return fx.map_arg(tree, cast(Any, function))


def empty_call(meta: TensorMeta, out: Ref) -> Call:
    """The call that makes a new tensor like ``meta``, not initialised."""
    options = (("dtype", meta.dtype), ("device", meta.device))
    return Call("aten.empty_strided.default", (meta.shape, meta.stride), options, (out,))


def storage_of(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage.

    Raises:
        CaptureError: the tensor is sparse or has another layout without strides.
    """
    if tensor.layout is not torch.strided:
        raise CaptureError(
            f"the model, or its backward, makes a tensor of layout {tensor.layout}, and only strided ones can be "
            "scheduled; for an Embedding, use sparse=False"
        )
    return tensor.untyped_storage()._cdata


def is_alike(now: Any, traced: Any) -> bool:
    """Whether a tensor has the dtype, device, shape and memory layout of another one, real or fake."""
    if now is traced or not isinstance(now, torch.Tensor) or not isinstance(traced, torch.Tensor):
        return now is traced
    return TensorMeta.of(now) == TensorMeta.of(traced)


def _leaves(result: Any) -> Sequence[Any]:
    return result if isinstance(result, tuple | list) else (result,)


def tensors_in(result: Any) -> list[torch.Tensor]:
    """The tensors among a node's results."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
