"""Inductor's own code for the forward and the backward of a partition, written but not compiled: the buffers that it
allocates, and the kernels that it launches.

Whatever decides the partition, a plan of ours or PyTorch's own rules, is judged alike: by what Inductor makes of it.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ..capture.captured import allocated_bytes
from ..torch_versions import release
from .joint import is_unchecked, tensors_of

#: Settings of Inductor that a plan needs. It may not sort kernels anew; a buffer is freed after its last use, not kept
#: for the next of its size; tensors keep the layouts that the graph says they have; and Inductor writes no elementwise
#: result to memory because it is made from many tensors (8 on GPUs, 12 on the CPU) or by many operators: the plan
#: decides that.
SETTINGS: dict[str, Any] = {
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
    "allow_buffer_reuse": False,
    "layout_optimization": False,
    "realize_acc_reads_threshold": 10**6,
    "realize_opcount_threshold": 10**6,
}
#: Settings while code is written that is not run: no process may begin to compile kernels, and the code is not cut into
#: parts for CUDA graphs, in which nothing could be read.
_UNRUN = {"compile_threads": 1, "triton.cudagraphs": False}


#: The first PyTorch that was seen to free an incoming gradient before the backward ends; 2.11 does not.
RELEASES_GRADIENTS = (2, 14)

#: Bytes beside all buffers while a call of an operator runs, by its node and the strides of its arguments.
Workspace = Callable[[fx.Node, Sequence[tuple[int, ...]]], int]
#: Buffers that begin, buffers that end, and bytes that exist beside all buffers while a call of an operator runs.
Change = tuple[tuple[str, ...], tuple[str, ...], int]


@dataclass
class Written:
    """The code of one graph.

    Attributes:
        moved: bytes of the buffers that each generated kernel reads or writes, every buffer once.
        changes: of memory, in order.
        results: for every result of the graph the buffer that it lies in; "" if it is an input or no tensor.
        strides: of every result; None: it is no tensor.
        bytes_of: of buffers.
    """

    moved: list[int] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    strides: list[tuple[int, ...] | None] = field(default_factory=list)
    bytes_of: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Rehearsed:
    """What a step of a partition needs.

    Attributes:
        forward_bytes, backward_bytes: the most memory beyond the graph's inputs, incoming gradients included.
        saved_bytes: made by the forward and handed to the backward.
        moved: bytes that each generated kernel moves.
        movable: bytes of each buffer among what is saved that nobody else holds and that one tensor fills.
    """

    forward_bytes: int
    backward_bytes: int
    saved_bytes: int
    moved: tuple[int, ...]
    movable: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """The most of forward and backward."""
        return max(self.forward_bytes, self.backward_bytes)


def rehearsed(
    forward: fx.GraphModule, backward: fx.GraphModule, forward_count: int, workspace_of: Workspace
) -> Rehearsed:
    """Have Inductor write the code of a partition, and count.

    Args:
        forward, backward: as AOTAutograd expects them of a partitioner; they are not changed.
        forward_count: how many results of the forward are the model's.
        workspace_of: is asked with the strides that Inductor gives arguments, which may not be those of the graph.
    """
    first = write(forward, workspace_of)
    at_end, most = _follow(first.changes, {}, first.bytes_of)
    held = {*filter(None, first.results[:forward_count])}
    # The backward is given what is saved, in the order of the forward's results, and incoming gradients.
    given = backward.graph.find_nodes(op="placeholder")
    result_of = dict(zip((node.name for node in given), first.results[forward_count:], strict=False))
    live = {_saved(name): first.bytes_of[name] for name in at_end}
    ends: dict[str, tuple[str, ...]] = {}
    left = Counter(result_of.get(node.name, "") for node in given)
    for node in given:
        if node.name not in result_of:
            live[node.name] = _bytes_of(node)
            if release() < RELEASES_GRADIENTS:
                ends[node.name] = ()
        else:
            owned = _owned(result_of, held, node)
            ends[node.name] = (_saved(owned),) if owned and left[owned] == 1 else ()
    is_donated = torch._functorch.config.donated_buffer
    donated = [node.name for node in given if is_donated and _owned(result_of, held, node)]
    # What is saved may be channels-last, although the graph says otherwise.
    strides = dict(zip((node.name for node in given), first.strides[forward_count:], strict=False))
    second = write(backward, workspace_of, donated, strides)
    _, later = _follow(second.changes, live, {**second.bytes_of, **live}, ends)
    saved = {*filter(None, first.results[forward_count:])}
    alone = ((node, _owned(result_of, held, node)) for node in given if not is_unchecked(node))
    movable = (first.bytes_of[name] for node, name in alone if name and left[name] == 1 and _fills(node, name, first))
    size = sum(first.bytes_of[name] for name in saved)
    return Rehearsed(most, later, size, (*first.moved, *second.moved), tuple(movable))


def _fills(node: fx.Node, buffer: str, written: Written) -> bool:
    return _bytes_of(node) == written.bytes_of[buffer]


def _owned(result_of: Mapping[str, str], held: Collection[str], node: fx.Node) -> str:
    """The buffer of the forward that an input of the backward is and nobody else holds; "" if there is none."""
    name = result_of.get(node.name, "")
    return "" if name in held else name


def _saved(buffer: str) -> str:
    """A buffer of the forward in the backward, which has others of this name."""
    return f"{buffer} of the forward"


def _follow(
    changes: Iterable[Change],
    live: Mapping[str, int],
    sizes: Mapping[str, int],
    ends: Mapping[str, tuple[str, ...]] | None = None,
) -> tuple[list[str], int]:
    """The buffers that exist when the code ends, and the most bytes that exist at once.

    Args:
        live: what exists when it begins.
        sizes: bytes of all buffers.
        ends: for inputs, the buffers that end with them.
    """
    alive = dict(live)
    memory = most = sum(alive.values())
    for begun, ended, beside in changes:
        for name in begun:
            memory += sizes[name] - alive.get(name, 0)
            alive[name] = sizes[name]
        most = max(most, memory + beside)
        for name in ended:
            for buffer in (ends or {}).get(name, (name,)):
                memory -= alive.pop(buffer, 0)
    return list(alive), most


def _bytes_of(node: fx.Node) -> int:
    tensors = tensors_of(node.meta.get("val"))
    return sum(allocated_bytes(t.numel() * t.element_size(), t.device) for t in tensors)


def write(
    module: fx.GraphModule,
    workspace_of: Workspace,
    donated: Collection[str] | None = None,
    strides: Mapping[str, tuple[int, ...] | None] | None = None,
) -> Written:
    """Have Inductor lower, fuse and schedule a copy of a graph and write its code, as for compiling it.

    Args:
        donated: of a backward: the inputs whose memory it may write results into. None: it is a forward.
        strides: of inputs that have others than the graph says.
    """
    from torch._dynamo.utils import preserve_rng_state
    from torch._inductor import compile_fx, config
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    copied = fx.GraphModule(module, copy.deepcopy(module.graph))
    given = copied.graph.find_nodes(op="placeholder")
    names = [node.name for node in given]
    inputs = [strided(node.meta["val"], (strides or {}).get(node.name)) for node in given]
    with preserve_rng_state(), settings_kept(), config.patch(_UNRUN), DebugContext(), torch.no_grad():
        compile_fx.view_to_reshape(copied)
        mode = compile_fx.fake_tensor_prop(copied, inputs)
        compile_fx._recursive_record_original_output_strides(copied)
        with V.set_fake_mode(mode), compile_fx.get_cuda_device_context(copied):
            compile_fx._recursive_post_grad_passes(copied, is_inference=False)
        with V.set_fake_mode(mode), compile_fx.maybe_disable_comprehensive_padding(inputs):
            is_backward = donated is not None
            graph = GraphLowering(copied, example_inputs=inputs, shape_env=mode.shape_env, is_backward=is_backward)
            graph.bw_donated_idxs = [place for place, name in enumerate(names) if name in (donated or ())]
            with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]):
                graph.run(*inputs)
                graph.codegen()
                return _read(graph, workspace_of)


def settings_kept() -> AbstractContextManager[Any]:
    """Within it a pass may change the settings of plans for one graph."""
    from torch._inductor import config

    kept: AbstractContextManager[Any] = config.patch(
        {name: getattr(config, name) for name in SETTINGS if hasattr(config, name)}
    )
    return kept


def strided(value: Any, strides: tuple[int, ...] | None) -> Any:
    """A fake tensor with these strides."""
    if strides is None or not isinstance(value, FakeTensor) or value.stride() == strides:
        return value
    with value.fake_mode:
        return value.as_strided(value.shape, strides)


def _read(graph: Any, workspace_of: Workspace) -> Written:
    """What has been written for a graph."""
    from torch._inductor import ir
    from torch._inductor.codegen import wrapper

    found = Written()
    for node in graph.scheduler.nodes:
        kind = type(node).__name__
        if "Nop" not in kind and "Extern" not in kind:
            found.moved.append(int(node.get_read_write_buffers_sizes()))

    def size_of(buffer: Any) -> int:
        storage = int(graph.get_allocation_storage_size(buffer))  # sizes are fixed
        return allocated_bytes(storage * buffer.get_dtype().itemsize, buffer.get_device())

    def change(begun: Sequence[Any] = (), ended: Sequence[Any] = (), beside: int = 0) -> None:
        found.bytes_of.update((buffer.get_name(), size_of(buffer)) for buffer in begun)
        first, last = (tuple(buffer.get_name() for buffer in buffers) for buffers in (begun, ended))
        found.changes.append((first, last, beside))

    for line in graph.wrapper_code.lines:
        if isinstance(line, wrapper.AllocateLine):
            change(begun=[line.node])
        elif isinstance(line, wrapper.ReuseLine):  # one ends as the other begins
            change(ended=[line.node])
            change(begun=[line.reused_as])
        elif isinstance(line, wrapper.FreeLine) or (
            isinstance(line, wrapper.FreeIfNotReusedLine) and not line.is_reused
        ):
            change(ended=[line.node])
        elif isinstance(line, wrapper.ExternKernelAllocLine | wrapper.ExternKernelOutLine):
            given = [one for one in line.node.inputs if isinstance(one, ir.IRNode) and one.has_tensor_output()]
            strides = [tuple(map(int, one.get_stride())) for one in given]
            beside = max((workspace_of(origin, strides) for origin in line.node.origins), default=0)
            is_given = isinstance(line, wrapper.ExternKernelOutLine)
            change([] if is_given else _made(graph, line.node, ir), beside=beside)
    inputs = set(graph.graph_inputs)
    for result in graph.graph_outputs:
        name = "" if isinstance(result, (ir.NoneAsConstantBuffer, ir.ShapeAsConstantBuffer)) else result.get_name()
        found.results.append("" if name in inputs or name not in found.bytes_of else name)
        has_strides = isinstance(result, ir.IRNode) and result.has_tensor_output()
        found.strides.append(tuple(map(int, result.get_stride())) if has_strides else None)
    return found


def _made(graph: Any, node: Any, ir: Any) -> list[Any]:
    """The buffers that a call of PyTorch's operator allocates: its result, or the parts of it."""
    if not isinstance(node.layout, ir.MultiOutputLayout):
        return [] if isinstance(node.layout, ir.NoneLayout) or node.get_inputs_that_alias_output() else [node]
    parts = (buffer for buffer in graph.buffers if isinstance(buffer, ir.MultiOutput))
    return [buffer for buffer in parts if any(given.get_name() == node.get_name() for given in buffer.inputs)]
