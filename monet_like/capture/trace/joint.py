"""Tracing: a module and example inputs become PyTorch's joint forward and backward graph of ATen calls.

The trace is kept as close to eager mode as possible: where PyTorch's tracer would decompose an operator into
others that round differently, the operator itself is kept; conditions on constants are decided as in eager mode.
"""

from __future__ import annotations

import contextlib
import logging
import re
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._functorch._aot_autograd import collect_metadata_analysis
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._library.effects import EffectType
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
from ..captured import fake_mode
from ..checks import check_attributes, may_have_gradient
from ..constants import ConstantsFound, InputRequires
from ..guards.recorder import Recorder
from ..guards.side_effects import keeping_generators
from .flat_module import FlatModule
from .graph_edits import drop_copies_of_parts, drop_tokens, restore_literals, restore_views
from .known_values import KnownValues

#: Advice for operators whose results have sizes that depend on values.
_ADVICE = {
    "aten._ctc_loss": (
        "CTC loss with lengths in tensors needs memory that depends on their values; give the lengths as lists of "
        "numbers, or compute the loss outside the model"
    ),
    "aten._pack_padded_sequence": (
        "pack_padded_sequence makes a tensor whose size depends on the lengths' values; give the "
        "recurrent layer the padded sequences, and mask its results"
    ),
    "aten._to_sparse": "to_sparse makes a tensor whose size depends on the values of a tensor; compute with dense ones",
}

#: For a model of which a part cannot be captured.
_OTHER_PARTS = (
    "; if other parts of the model do not, give these schedules of their own (monet_like.auto_schedule(model, "
    "blocks=...)), and the rest runs as it is"
)

#: Likewise, by a file that the error passes through.
_ADVICE_FOR_FILES = {
    "/triton/": (
        "it launches a Triton kernel itself, as Liger's layers do, and a launch cannot be traced by shapes; take "
        "PyTorch's layers instead (for decoders there are variants in one pass and in tiles of our own), or put the "
        "launch into torch.library.custom_op with a fake and a gradient"
    ),
    "/torch_geometric/utils/loop.py": (
        "its layers replace the self-loops of each graph, whose number depends on values; replace them once, in "
        "the data (torch_geometric.transforms.AddRemainingSelfLoops() or AddSelfLoops()), and make the layers with "
        "add_self_loops=False"
    ),
}


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
        target: a device that need not be present: PyTorch's choices by device are made as for it.
        processes: number of processes that share SyncBatchNorm's statistics; None: those of its process group.
        row_major_gradients: incoming gradients have row-major layout, not the results'.

    Raises:
        CaptureError: the step cannot be traced; the message names the operator or the line.
    """
    modes = [t.fake_mode for t in tensors if isinstance(t, FakeTensor)]
    mode = modes[0] if modes else fake_mode()
    fakes = _fakes(tensors, mode)
    while True:
        try:
            with _tangents_in_rows() if row_major_gradients else contextlib.nullcontext():
                return _traced(flat, fakes, target, processes), mode
        except InputRequires as asked:
            own = fakes[asked.position].detach().requires_grad_()
            fakes = (*fakes[: asked.position], own, *fakes[asked.position + 1 :])
            flat.made_to_require.add(asked.position)
        except ConstantsFound as found:
            flat.hold(found.tensors)
            flat.tries = found.tries


def _fakes(tensors: tuple[torch.Tensor, ...], mode: FakeTensorMode) -> tuple[torch.Tensor, ...]:
    """Fake tensors for inputs: one for each tensor that may have a gradient, and one for each place of others, as keys
    of steps have it.
    """
    fakes: list[torch.Tensor] = []
    for position, tensor in enumerate(tensors):
        if any(tensor is other for other in tensors[:position]) and not may_have_gradient(tensor):
            with mode:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        else:
            fake = tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor, static_shapes=True)
        fakes.append(fake)
    return tuple(fakes)


def _traced(
    flat: FlatModule, fakes: tuple[torch.Tensor, ...], target: absent_gpu.Absent | None, processes: int | None
) -> fx.Graph:
    flat.before = dict((*flat.named_parameters(), *flat.named_buffers()))
    if flat.answers is None and flat.model in _asking and flat.has_values():
        flat.answers = flat.recorded_answers()
    if flat.answers is None:
        try:
            return _export(flat, fakes, target, processes, asks=False)
        except Exception as error:
            if not _asks(flat, error):
                raise _refused(flat, error) from error
    try:
        return _export(flat, fakes, target, processes, asks=True)
    except Exception as error:
        raise _refused(flat, error) from error


def _asks(flat: FlatModule, error: Exception) -> bool:
    """Whether a trace failed because the forward asks for values of tensors; then it gets the answers, if there are
    any.

    Raises:
        Exception: what a plain forward raises.
    """
    asks = _data_dependent(error)
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
    refused = CaptureError(f"{type(flat.model).__name__} cannot be captured: {_reason(error)}")
    refused.of_values = _of_values(error)
    return refused


def _export(
    flat: FlatModule,
    fakes: tuple[torch.Tensor, ...],
    target: absent_gpu.Absent | None,
    processes: int | None,
    *,
    asks: bool,
) -> fx.Graph:
    """The graph; ``asks``: of a forward that asks for values.

    Where it has no answers it takes the path of libraries under a compiler,
    who then do not look at values."""
    with contextlib.ExitStack() as stack, warnings.catch_warnings(), _quiet(), _eager_operators(), preserve_node_meta():
        warnings.simplefilter("ignore")
        if asks and flat.answers is None:
            stack.enter_context(_is_compiling())
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
        stack.enter_context(flat.autocast.outside_forward())
        stack.enter_context(_use_lazy_graph_module(True))  # writes no Python code of graphs, which nobody runs
        in_backward = f"a hook or a custom function of {type(flat.model).__name__}, in the backward,"
        with keeping_generators(in_backward), _uncaught():
            joint = _recorded(stack, flat, fakes)
        restore_literals(joint.graph_module)
        restore_views(joint.graph_module)
        drop_copies_of_parts(joint.graph_module)
        drop_tokens(joint.graph_module)
        graph: fx.Graph = joint.graph_module.graph
        return graph


def _recorded(stack: contextlib.ExitStack, flat: FlatModule, fakes: tuple[torch.Tensor, ...]) -> Any:
    """PyTorch's joint export. It sets ``flat.reads``: the values beside tensors that the model reads."""
    leaves = [leaf for leaf in flat.leaves if not isinstance(leaf, torch.Tensor)]
    with Recorder(flat.model, [*leaves, *flat.classes]) as flat.recorder:
        joint = aot_export_joint_with_descriptors(stack, flat, fakes)
        flat.recorder.check_backward()
        flat.check_state_objects()
    check_attributes(flat.model, flat.leaves, flat.recorder.names)
    own = (
        each for each in vars(joint.graph_module).values() if isinstance(each, torch.Tensor)
    )  # that the backward reads
    flat.used.update(dict.fromkeys(own, True))
    flat.reads, flat.effects = flat.recorder.found(flat.used, flat.effects)
    return joint


@contextlib.contextmanager
def _tangents_in_rows() -> Iterator[None]:
    """Have the tracer give incoming gradients row-major layout, instead of the results'."""
    name = "coerce_tangent_and_suggest_memory_format"
    own = getattr(collect_metadata_analysis, name)

    def in_rows(tangent: Any) -> Any:
        return own(tangent.new_empty(tangent.shape) if isinstance(tangent, torch.Tensor) else tangent)

    setattr(collect_metadata_analysis, name, in_rows)
    try:
        yield
    finally:
        setattr(collect_metadata_analysis, name, own)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the tracer's own log of errors that are raised anyway."""
    loggers = [logging.getLogger("torch._subclasses.fake_tensor")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _uncaught() -> Iterator[None]:
    """Raise the error of a question about values at the end, too: a model's ``except Exception`` may have caught it.

    The trace has then taken a branch that no plain forward takes.
    """
    raised: list[Exception] = []
    kinds: tuple[Any, ...] = (DataDependentOutputException, DynamicOutputShapeException)
    own = [kind.__init__ for kind in kinds]

    def noting(init: Callable[..., None]) -> Callable[..., None]:
        def noted(error: Exception, *args: Any) -> None:
            init(error, *args)
            raised.append(error)

        return noted

    for kind, init in zip(kinds, own, strict=True):
        kind.__init__ = noting(init)
    try:
        yield
    finally:
        for kind, init in zip(kinds, own, strict=True):
            kind.__init__ = init
    if raised:
        raise raised[0]


@contextlib.contextmanager
def _is_compiling() -> Iterator[None]:
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def _decomposed_operators() -> Iterator[Any]:
    """Operators that tracing would decompose into others that round differently, or, recurrent ones, that leave out
    dropout.
    """
    for name in dir(torch.ops.aten):
        if "upsample" in name or name in (
            "hardshrink",
            "softshrink",
            "multi_margin_loss",
            "multilabel_margin_loss_forward",
            "istft",
            "stft",
            "gru",
            "lstm",
            "rnn_relu",
            "rnn_tanh",
        ):
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
    """Keep the checks of ``torch.linalg.inv`` and the like: PyTorch 2.11 drops them from traces, later versions run
    them in order.
    """
    effect = torch._library.simple_registry.singleton.find("aten::_linalg_check_errors").effect
    before = effect.effect
    effect.register(EffectType.ORDERED)
    try:
        yield
    finally:
        effect.register(before)


@contextlib.contextmanager
def _unvalidated() -> Iterator[None]:
    """Switch off what only raises an error for some values: the validation of distributions' parameters, PyTorch's
    checks.
    """
    distribution = torch.distributions.Distribution
    before = distribution._validate_args
    checks = {name: getattr(torch, name) for name in ("_check_tensor_all", "_check_tensor_all_with")}
    distribution.set_default_validate_args(False)
    for name in checks:
        setattr(torch, name, lambda *_, **__: None)
    try:
        yield
    finally:
        distribution.set_default_validate_args(before)
        for name, own in checks.items():
            setattr(torch, name, own)


def _data_dependent(error: BaseException) -> bool:
    return isinstance(error, DataDependentOutputException) or "data-dependent" in str(error)


def _of_values(error: BaseException) -> bool:
    """Whether a trace failed because of what tensors contain: their values, or sizes that depend on these."""
    named = any(operator_ in str(error) for operator_ in ("aten._local_scalar_dense", "aten.nonzero"))
    return _data_dependent(error) or isinstance(error, DynamicOutputShapeException) or named


def _reason(error: BaseException) -> str:
    """A sentence that explains why the trace failed, with the user's line or the operator."""
    message = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    internal = ("/torch/", "/monet_like/capture/", "/contextlib.py", "/triton/")
    every = traceback.extract_tb(error.__traceback__)
    frames = [f for f in every if not any(part in f.filename for part in internal)]
    where = f" (at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""
    advice = next((said for operator_, said in _ADVICE.items() if operator_ in str(error)), "")
    if not advice:
        of_file = (said for file, said in _ADVICE_FOR_FILES.items() if any(file in frame.filename for frame in every))
        advice = next(of_file, "")
    if advice:
        return f"{advice}{where}"
    if _of_values(error):
        message = f"its computation depends on the values of a tensor, not only on shapes: {message}"
        where += _OTHER_PARTS
    elif "modified by an inplace operation" in str(error):
        told = re.search(r"\[torch\.\w+ \[[^]]*\]\](, which is output \d+ of \w+)?", message)
        message = (
            f"it overwrites in place what the gradient of one of its results reads ({told[0] if told else message}); "
            "plain PyTorch has no gradient there either: detach() that result, if the loss does not use it, or do not "
            "write in place"
        )
    elif "requires grad" in str(error) or "require grad" in str(error):
        message = f"nothing in it requires a gradient: {message}"
    return f"{type(error).__name__}: {message}{where}"
