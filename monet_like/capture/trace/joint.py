"""Tracing: a module and example inputs become PyTorch's joint forward and backward graph of ATen calls.

The trace is kept as close to eager mode as possible: where PyTorch's tracer would decompose an operator into
others that round differently, the operator itself is kept; conditions on constants are decided as in eager mode.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._functorch import aot_autograd  # before its parts, which import each other
from torch._functorch._aot_autograd import collect_metadata_analysis, runtime_wrappers
from torch._library.effects import EffectType
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.traceback import preserve_node_meta

from ... import ops
from ...errors import CaptureError
from ...nn import sync_batch_norm
from ...ops import gradients_by_values
from ...ops import meta_functions as fakes_of_pytorchs
from ..absent_gpu import choices as absent_gpu
from ..annotations import noted_in_custom_backwards
from ..captured import fake_mode, let_go_of_tensors
from ..checks import check_attributes
from ..guards.recorder import Recorder
from ..guards.side_effects import OthersMayDraw
from ..held_tensors import BufferRequires, ConstantsFound, InputRequires
from ..replaced import replaced
from .alone import TrueInThisThread, in_this_thread, quiet
from .flat_module import FlatModule
from .graph_edits import drop_copies_of_parts, drop_idle_writes, drop_tokens, restore_literals, restore_views
from .known_values import KnownValues
from .reasons import data_dependent, of_values, reason_of

#: Models whose forward was found to ask for values of tensors.
_asking: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def trace_joint(
    flat: FlatModule,
    tensors: tuple[torch.Tensor, ...],
    target: absent_gpu.Absent | None = None,
    processes: int | None = None,
    *,
    row_major_gradients: bool = False,
) -> tuple[fx.Graph, FakeTensorMode]:
    """The joint graph of ``flat(*tensors)``, and the mode its fake tensors belong to.

    Args:
        target, processes, row_major_gradients: as of `capture`; PyTorch's choices by device are those for the target.

    Raises:
        CaptureError: the step cannot be traced; the message names the operator or the line.
    """
    modes = [t.fake_mode for t in tensors if isinstance(t, FakeTensor)]
    mode = modes[0] if modes else fake_mode()
    try:
        with _tangents_in_rows() if row_major_gradients else contextlib.nullcontext():
            return _traced_at_last(flat, tensors, mode, partial(_export, flat, target, processes)), mode
    finally:
        flat.used.clear()
        if not modes:
            let_go_of_tensors(mode)


def _traced_at_last(
    flat: FlatModule, tensors: tuple[torch.Tensor, ...], mode: FakeTensorMode, export: Callable[..., fx.Graph]
) -> fx.Graph:
    """The joint graph, traced once more where a trace shows what it should have begun with.

    Args:
        export: `_export` of fake tensors.
    """
    fakes = _fakes(tensors, mode, flat.is_one)
    while True:
        try:
            return _traced(flat, partial(export, fakes))
        except InputRequires as asked:
            own = fakes[asked.position].detach().requires_grad_()
            fakes = (*fakes[: asked.position], own, *fakes[asked.position + 1 :])
            flat.made_to_require.add(asked.position)
        except BufferRequires as asked:
            flat.have_trained(asked.buffer)
            mode.from_tensor(asked.buffer, static_shapes=True).requires_grad_()  # the last trace's is taken again
        except ConstantsFound as found:
            flat.hold(found.tensors)
            flat.tries = found.tries
        except OthersMayDraw:
            continue


def _fakes(
    tensors: tuple[torch.Tensor, ...], mode: FakeTensorMode, is_one: Callable[[torch.Tensor], bool]
) -> tuple[torch.Tensor, ...]:
    """Fake tensors for inputs: one for each tensor of which ``is_one`` holds, and one for each place of others."""
    fakes: list[torch.Tensor] = []
    for position, tensor in enumerate(tensors):
        if any(tensor is other for other in tensors[:position]) and not is_one(tensor):
            with mode:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        else:
            fake = tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor, static_shapes=True)
        fakes.append(fake)
    return tuple(fakes)


def _traced(flat: FlatModule, export: Callable[..., fx.Graph]) -> fx.Graph:
    flat.before = dict((*flat.named_parameters(), *flat.named_buffers()))
    if flat.answers is None and flat.model in _asking and flat.has_values():
        flat.answers = flat.recorded_answers()
    if flat.answers is None:
        try:
            return export(asks=False)
        except Exception as error:
            if not _asks(flat, error):
                raise _refused(flat, error) from error
    try:
        return export(asks=True)
    except Exception as error:
        raise _refused(flat, error) from error


def _asks(flat: FlatModule, error: Exception) -> bool:
    """Whether a trace failed because the forward asks for values of tensors; then it gets the answers, if there are
    any.

    Raises:
        Exception: what a plain forward raises.
    """
    asks = data_dependent(error)
    if asks:
        _asking.add(flat.model)
    if isinstance(error, CaptureError) or not flat.has_values():
        return asks
    try:
        flat.answers = flat.recorded_answers()
    except Exception:
        if asks:
            raise
        return False  # it is refused for another reason
    if flat.answers:
        _asking.add(flat.model)
    return asks or bool(flat.answers)


def asks_for_values(model: nn.Module) -> bool:
    """Whether the forward of a model that was traced has asked for values of tensors."""
    return model in _asking


def _refused(flat: FlatModule, error: Exception) -> CaptureError:
    """Whatever the user's forward or the tracer raises: says where."""
    if isinstance(error, CaptureError):
        return error
    refused = CaptureError(f"{type(flat.model).__name__} cannot be captured: {reason_of(error)}")
    refused.of_values = of_values(error)
    return refused


def _export(
    flat: FlatModule,
    target: absent_gpu.Absent | None,
    processes: int | None,
    fakes: tuple[torch.Tensor, ...],
    *,
    asks: bool,
) -> fx.Graph:
    """The graph.

    Args:
        asks: whether the forward asks for values. Where it has no answers it takes the path of libraries under a
            compiler, who then do not look at values.
    """
    with (
        contextlib.ExitStack() as stack,
        quiet(),
        replaced(fake_tensor.log, disabled=True),
        replaced(
            aot_autograd, preserve_rng_state=in_this_thread(contextlib.nullcontext, aot_autograd.preserve_rng_state)
        ),
        _eager_operators(),
        preserve_node_meta(),
    ):
        if asks and flat.answers is None:
            stack.enter_context(
                replaced(torch.compiler, _is_compiling_flag=TrueInThisThread(torch.compiler._is_compiling_flag))
            )
        ops.load()
        fakes_of_pytorchs.register()
        flat.tracing_mode = KnownValues()
        stack.enter_context(absent_gpu.as_on(target))
        stack.enter_context(sync_batch_norm.traced(processes))
        if not flat.has_values():
            stack.enter_context(_unvalidated())
        stack.enter_context(fakes_of_pytorchs.ctc_loss_by_steps())
        stack.enter_context(_checked_matrices())
        stack.enter_context(gradients_by_values.traced())
        stack.enter_context(noted_in_custom_backwards())
        stack.enter_context(flat.autocast.outside_forward())
        stack.enter_context(_tangents_of_all_results())
        stack.enter_context(_use_lazy_graph_module(True))  # writes no Python code of graphs, which nobody runs
        in_backward = f"a hook or a custom function of {type(flat.model).__name__}, in the backward,"
        with flat.generators.kept(in_backward), _uncaught():
            joint = _recorded(stack, flat, fakes)
        restore_literals(joint.graph_module)
        restore_views(joint.graph_module)
        drop_copies_of_parts(joint.graph_module)
        drop_idle_writes(joint.graph_module)
        drop_tokens(joint.graph_module)
        graph: fx.Graph = joint.graph_module.graph
        return graph


def _recorded(stack: contextlib.ExitStack, flat: FlatModule, fakes: tuple[torch.Tensor, ...]) -> Any:
    """PyTorch's joint export. It sets ``flat.reads``: the values beside tensors that the model reads."""
    leaves = [leaf for leaf in flat.leaves if not isinstance(leaf, torch.Tensor)]
    with flat.buffers_requiring(), Recorder(flat.model, [*leaves, *flat.classes]) as flat.recorder:
        joint = aot_autograd.aot_export_joint_with_descriptors(stack, flat, fakes)
        flat.recorder.check_backward()
        flat.check_state_objects()
    check_attributes(flat.model, flat.leaves, flat.recorder.names)
    of_backward = (each for each in vars(joint.graph_module).values() if isinstance(each, torch.Tensor))
    flat.used.update(dict.fromkeys(of_backward, True))
    flat.reads, flat.effects = flat.recorder.found(flat.used, flat.effects)
    return joint


def _tangents_in_rows() -> contextlib.AbstractContextManager[None]:
    """Have the tracer give incoming gradients row-major layout, instead of the results'."""
    own = collect_metadata_analysis.coerce_tangent_and_suggest_memory_format

    def in_rows(tangent: Any) -> Any:
        return own(tangent.new_empty(tangent.shape) if isinstance(tangent, torch.Tensor) else tangent)

    return replaced(collect_metadata_analysis, coerce_tangent_and_suggest_memory_format=in_rows)


def _tangents_of_all_results() -> contextlib.AbstractContextManager[None]:
    """Have the tracer keep all incoming gradients where a tensor that is given twice is changed in place.

    It leaves out those of what is one tensor with another, and counts changed inputs without a gradient, too.
    """
    own = runtime_wrappers.remove_dupe_metadata

    def with_all(meta: Any, keep: list[bool], places: list[int]) -> Any:
        found = own(meta, keep, places)
        infos = ((place, meta.input_info[place]) for place in meta.mutated_inp_runtime_indices)
        stay = [keep[place] for place, info in infos if info.mutates_data and info.requires_grad]
        stay += [True] * (len(meta.traced_tangents) - len(stay))
        for name in ("traced_tangents", "traced_tangents_descs", "subclass_tangent_meta"):
            setattr(found, name, list(itertools.compress(getattr(meta, name), stay)))
        return found

    return replaced(runtime_wrappers, remove_dupe_metadata=with_all)


@contextlib.contextmanager
def _uncaught() -> Iterator[None]:
    """Raise the error of a question about values at the end, too: a model's ``except Exception`` may have caught it.

    The trace has then taken a branch that no plain forward takes.
    """
    raised: list[Exception] = []
    kinds: tuple[Any, ...] = (DataDependentOutputException, DynamicOutputShapeException)

    def noting(init: Callable[..., None]) -> Callable[..., None]:
        def noted(error: Exception, *args: Any) -> None:
            init(error, *args)
            raised.append(error)

        return noted

    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(replaced(kind, __init__=noting(kind.__init__)))
        yield
    if raised:
        raise raised[0]


#: Beside ``upsample``.
_DECOMPOSED = frozenset((
    "hardshrink", "softshrink", "multi_margin_loss", "multilabel_margin_loss_forward", "istft", "stft", "gru", "lstm",
    "rnn_relu", "rnn_tanh",
))  # fmt: skip


def _decomposed_operators() -> Iterator[Any]:
    """Operators that tracing would decompose into others, which round differently or, recurrent ones, lack dropout."""
    for name in dir(torch.ops.aten):
        if "upsample" in name or name in _DECOMPOSED:
            packet = getattr(torch.ops.aten, name)
            yield from (getattr(packet, overload) for overload in packet.overloads())


@contextlib.contextmanager
def _eager_operators() -> Iterator[None]:
    """Keep the operators of `_decomposed_operators` whole, as eager mode calls them."""
    keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    removed: list[tuple[Any, Any, Callable[..., Any]]] = []
    for op in _decomposed_operators():
        for key in keys:
            if key in op.py_kernels:
                removed.append((op, key, op.py_kernels.pop(key)))
                op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, key, kernel in removed:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


@contextlib.contextmanager
def _checked_matrices() -> Iterator[None]:
    """Keep the checks of ``torch.linalg.inv`` and the like, in order; PyTorch 2.11 drops them from traces."""
    effect = torch._library.simple_registry.singleton.find("aten::_linalg_check_errors").effect
    before = effect.effect
    effect.register(EffectType.ORDERED)
    try:
        yield
    finally:
        effect.register(before)


@contextlib.contextmanager
def _unvalidated() -> Iterator[None]:
    """Switch off what only raises errors for some values: distributions' validation, and PyTorch's checks."""
    checks = dict.fromkeys(("_check_tensor_all", "_check_tensor_all_with"), lambda *_, **__: None)
    with replaced(torch.distributions.Distribution, _validate_args=False), replaced(torch, **checks):
        yield
