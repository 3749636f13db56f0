"""Tracing: a module and example inputs become PyTorch's joint forward and backward graph of ATen calls.

The trace is kept as close to eager mode as possible: where PyTorch's tracer would decompose an operator into
others that round differently, the operator itself is kept; conditions on constants are decided as in eager mode.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._functorch._aot_autograd import collect_metadata_analysis
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.traceback import preserve_node_meta
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import CaptureError
from ..nn import sync_batch_norm
from ..ops import meta_functions as fakes_of_pytorchs
from . import absent_gpu
from .annotations import InPlaceCalls, called_in_place, changes_its_first, marked_modules, named_layers
from .captured import fake_mode
from .constants import ConstantsFound, HeldTensors, constant_name, foreign_memory
from .guards.reads import Reads
from .guards.recorder import Recorder
from .guards.side_effects import keeping_generators, keeping_tensors
from .results import without_dataclasses

#: Integer and boolean constants up to this size are followed, so that conditions on them can be decided.
_CONSTANT_ELEMENTS = 2**20

#: What autocast casts with, and where it is implemented.
_TO, _COMPOSITE = torch.ops.aten.to.dtype, torch._C.DispatchKey.CompositeImplicitAutograd
#: What to do instead of calling operators whose results have sizes that depend on values.
_ADVICE = {
    "aten._ctc_loss": "CTC loss with lengths in tensors needs memory that depends on their values; give the lengths as lists of "
    "numbers, or compute the loss outside the model",
    "aten._pack_padded_sequence": "pack_padded_sequence makes a tensor whose size depends on the lengths' values; give the "
    "recurrent layer the padded sequences, and mask its results",
}

#: Where a `FlatModule` keeps the tensors that the model has not registered.
HELD = "held."

#: A forward that fails is traced anew so often, each time with the constants that the last trace met as inputs.
_TRIES = 16

_T = TypeVar("_T")


class FlatModule(nn.Module):
    """The model as aot_export wants it: tensors in, tensors out; everything else is a constant."""

    def __init__(
        self, model: nn.Module, leaves: list[Any], spec: pytree.TreeSpec, *, tied_as_one: bool = False
    ) -> None:
        super().__init__()
        self.autocast = _Autocast()
        self.training = model.training
        self.model = model
        self.leaves, self.spec = leaves, spec
        self.out_leaves: list[Any] = []
        self.out_spec: pytree.TreeSpec | None = None
        self.out_positions: list[tuple[int, ...]] = []
        self.told: dict[str, None] = {}
        self.reads: Reads | None = None
        self.recorder: Recorder | None = None
        self.held, self.tries = nn.Module(), _TRIES
        self.before: dict[str, torch.Tensor] = {}
        self.changed_without_gradient: set[int | str] = set()  # inputs and names of what is changed under no_grad alone
        self.tracing_mode: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        modules = [module for _, module in self.named_modules()]
        self._parameters_as_one = tied_as_one
        self._tied = _further_places([m._buffers for m in modules])
        if tied_as_one:
            self._tied += _further_places([m._parameters for m in modules])

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have the tracer take tensors that live in the user's objects for parameters and buffers."""
        for tensor in tensors:
            members = self.held._parameters if tensor.requires_grad else self.held._buffers
            members[str(len(self.held._parameters) + len(self.held._buffers))] = tensor  # type: ignore[assignment]

    def tensor(self, target: str) -> tuple[str, torch.Tensor]:
        """The name of what the tracer calls ``target``, and the tensor itself."""
        owner, _, name = target.rpartition(".")
        module = self.get_submodule(owner)
        tensor = {**module._parameters, **module._buffers}[name]
        assert tensor is not None
        return (constant_name(int(name)) if module is self.held else target.removeprefix("model.")), tensor

    # The tracer puts its own tensors in the place of the model's, name by name, and takes them out in the same order. In a
    # module that has two names the second would put back the tracer's tensor that it found: only first names are told.
    # A buffer that two modules hold is one tensor in the trace as well: what one of them writes the other reads.

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's, those of a module with several names under the first."""
        members = self._in_first_names(super().named_parameters(*args, **kwargs))
        return _first_of_each(members) if self._parameters_as_one else members

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's, each under its first name."""
        return _first_of_each(self._in_first_names(super().named_buffers(*args, **kwargs)))

    def _in_first_names(self, members: Iterator[tuple[str, _T]]) -> Iterator[tuple[str, _T]]:
        first = {name for name, _ in self.named_modules()}
        return ((name, member) for name, member in members if name.rpartition(".")[0] in first)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        supply = iter(tensors)
        leaves = [next(supply) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_as_one(self._tied))
            stack.enter_context(self.autocast.in_forward([*self.model.parameters(), *self._leaf_inputs(tensors)]))
            stack.enter_context(keeping_generators(f"{type(self.model).__name__}.forward"))
            stack.enter_context(keeping_tensors(self.model))
            for context in (self.tracing_mode, InPlaceCalls(), named_layers(self.model), marked_modules()):
                stack.enter_context(context)
            if self.recorder is not None:
                stack.enter_context(self.recorder.forward())
            result = self._called(args, kwargs, tensors)
        flat, self.out_spec = pytree.tree_flatten(result)
        positions: dict[
            int, list[int]
        ] = {}  # of each tensor, which is alive here: one that is returned twice is one result
        for position, leaf in enumerate(flat):
            if isinstance(leaf, torch.Tensor):
                positions.setdefault(id(leaf), []).append(position)
        self.out_positions = [tuple(found) for found in positions.values()]
        if not self.out_positions:
            raise CaptureError(f"{type(self.model).__name__} returned no tensor, so there is nothing to train")
        for leaf in flat:
            if not isinstance(leaf, torch.Tensor | int | float | bool | str | type(None)):
                raise CaptureError(
                    f"{type(self.model).__name__} returned a {type(leaf).__name__}, which PyTorch's pytree cannot look into; "
                    "return tensors in tuples, lists, dicts or dataclasses (for Hugging Face models: use_cache=False)"
                )
        self.out_leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
        return tuple(self._apart([flat[first] for first, *_ in self.out_positions], tensors))

    def _leaf_inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of ``tensors`` that no operator has made, as the example inputs were given."""
        given = (leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor))
        return [tensor for tensor, example in zip(tensors, given, strict=True) if example.is_leaf]

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]) -> Any:
        """The model's result, with the tracer's tensors in the place of those that the user's objects hold."""
        own = WeakTensorKeyDictionary()
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if (before := self.before.get(name)) is not None:
                own[before] = tensor
        mode = HeldTensors(own, looking=self.tries > 0)
        try:
            with mode, mode.in_custom_functions():
                result = mode.replaced(without_dataclasses(self.model(*args, **kwargs)))
        except Exception:
            if mode.found:
                raise ConstantsFound(mode.found, self.tries - 1) from None
            raise
        if mode.found:
            raise ConstantsFound(mode.found, 0)
        keyed: list[tuple[int | str, torch.Tensor]] = [
            *enumerate(tensors),
            *self.named_parameters(),
            *self.named_buffers(),
        ]
        self.changed_without_gradient = {
            key
            for key, tensor in keyed
            if isinstance(tensor, FunctionalTensor)
            and torch._functionalize_are_all_mutations_under_no_grad_or_inference_mode(tensor.elem)
        }
        return result

    def _apart(self, results: list[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results, each with a storage of its own where it has a gradient: a copy of what is also something else.

        A tracer gives no gradient to results that are views of each other, of inputs, or of parameters.
        """
        known = {_storage_of(t) for t in (*tensors, *self.parameters(), *self.buffers())}
        for position, leaf in enumerate(results):
            if leaf.requires_grad:
                if _storage_of(leaf) in known:
                    results[position] = leaf.clone()
                known.add(_storage_of(leaf))
        return results


def _storage_of(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


#: A dict of a module's tensors and a name in it, and where the same tensor is found first.
_Place = tuple[dict[str, Any], str, dict[str, Any], str]


def _further_places(members: Iterable[dict[str, Any]]) -> list[_Place]:
    """Where modules hold tensors that an earlier place holds too."""
    first: dict[int, tuple[dict[str, Any], str]] = {}
    places: list[_Place] = []
    for held in members:
        for name, tensor in held.items():
            if tensor is not None:
                found = first.setdefault(id(tensor), (held, name))
                if found[0] is not held or found[1] != name:
                    places.append((held, name, *found))
    return places


def _first_of_each(members: Iterator[tuple[str, _T]]) -> Iterator[tuple[str, _T]]:
    """Named tensors, each under its first name alone."""
    seen: set[int] = set()
    for name, member in members:
        if id(member) not in seen:
            seen.add(id(member))
            yield name, member


@contextlib.contextmanager
def _as_one(places: Sequence[_Place]) -> Iterator[None]:
    """Further places hold what the first place holds now: the tensor that the tracer has put there."""
    before = [held[name] for held, name, *_ in places]
    for held, name, first, first_name in places:
        held[name] = first[first_name]
    try:
        yield
    finally:
        for (held, name, *_), tensor in zip(places, before, strict=True):
            held[name] = tensor


def trace_joint(
    flat: FlatModule,
    tensors: tuple[torch.Tensor, ...],
    target: torch.device | None = None,
    processes: int | None = None,
    *,
    row_major_gradients: bool = False,
) -> tuple[fx.Graph, FakeTensorMode]:
    """The joint graph of ``flat(*tensors)``, and the mode its fake tensors belong to.

    Args:
        target: a device that may not be here: choices that PyTorch makes by the device are made as there.
        processes: that share SyncBatchNorm's statistics; None: those of its process group.
        row_major_gradients: the gradients that come in lie so, not as the results do.

    Raises:
        CaptureError: what cannot be traced, with the operator or line that is the reason.
    """
    modes = [t.fake_mode for t in tensors if isinstance(t, FakeTensor)]
    mode = modes[0] if modes else fake_mode()
    fakes = tuple(t if isinstance(t, FakeTensor) else mode.from_tensor(t, static_shapes=True) for t in tensors)
    while True:
        try:
            with _tangents_in_rows() if row_major_gradients else contextlib.nullcontext():
                return _traced(flat, fakes, target, processes), mode
        except ConstantsFound as found:
            flat.hold(found.tensors)
            flat.tries = found.tries


def _traced(
    flat: FlatModule, fakes: tuple[torch.Tensor, ...], target: torch.device | None, processes: int | None
) -> fx.Graph:
    flat.before = dict((*flat.named_parameters(), *flat.named_buffers()))
    try:
        try:
            return _export(flat, fakes, target, processes, compiling=False)
        except Exception as error:
            if not _data_dependent(error):
                raise
        # Libraries check torch.compiler.is_compiling() before they look at values, and then take the general path.
        return _export(flat, fakes, target, processes, compiling=True)
    except CaptureError:
        raise
    except Exception as error:  # whatever the user's forward or the tracer raises: say where, keep the cause
        raise CaptureError(f"{type(flat.model).__name__} cannot be captured: {_reason(error)}") from error


def _export(
    flat: FlatModule,
    fakes: tuple[torch.Tensor, ...],
    target: torch.device | None,
    processes: int | None,
    *,
    compiling: bool,
) -> fx.Graph:
    with contextlib.ExitStack() as stack, warnings.catch_warnings(), _quiet(), _eager_operators(), preserve_node_meta():
        warnings.simplefilter("ignore")
        if compiling:
            stack.enter_context(_is_compiling())
        fakes_of_pytorchs.register()
        flat.tracing_mode = _Constants()
        stack.enter_context(absent_gpu.as_on(target))
        stack.enter_context(sync_batch_norm.traced(processes))
        stack.enter_context(_unvalidated())
        stack.enter_context(fakes_of_pytorchs.ctc_loss_by_steps())
        stack.enter_context(flat.autocast.outside_forward())
        with keeping_generators(f"a hook or a custom function of {type(flat.model).__name__}, in the backward,"):
            joint = _recorded(stack, flat, fakes)
        _with_literals(joint.graph_module)
        _with_views(joint.graph_module)
        graph: fx.Graph = joint.graph_module.graph
        return graph


def _recorded(stack: contextlib.ExitStack, flat: FlatModule, fakes: tuple[torch.Tensor, ...]) -> Any:
    """PyTorch's joint export, with what the model reads beside tensors in ``flat.reads``."""
    leaves = [leaf for leaf in flat.leaves if not isinstance(leaf, torch.Tensor)]
    with Recorder(flat.model, leaves, flat.told) as flat.recorder:
        joint = aot_export_joint_with_descriptors(stack, flat, fakes)
        flat.recorder.check_backward()
    flat.reads = flat.recorder.reads()
    return joint


@contextlib.contextmanager
def _tangents_in_rows() -> Iterator[None]:
    """Have the tracer lay out the gradients that come in in row-major order; it lays them out as the results."""
    name = "coerce_tangent_and_suggest_memory_format"
    own = getattr(collect_metadata_analysis, name)

    def in_rows(tangent: Any) -> Any:
        return own(tangent.new_empty(tangent.shape) if isinstance(tangent, torch.Tensor) else tangent)

    setattr(collect_metadata_analysis, name, in_rows)
    try:
        yield
    finally:
        setattr(collect_metadata_analysis, name, own)


def _with_literals(module: fx.GraphModule) -> None:
    """Numbers that tracing made tensors of, attributes which the graph copies, are literals again.

    ``x * torch.tensor(2.0)`` is such a one, and with PyTorch 2.11, though not 2.15, also ``x[:2] = 2.0``.
    """
    aten = torch.ops.aten
    for node in module.graph.find_nodes(op="get_attr"):
        constant = getattr(module, node.target)
        if not isinstance(constant, torch.Tensor):
            continue
        if constant.dim():
            _without_copies(node, constant)
            continue
        with _disable_current_modes():
            number = constant.item()
        for copied in [user for user in node.users if user.target is aten.lift_fresh_copy.default]:
            for user in list(copied.users):
                if user.target is aten.fill.Tensor and user.args[1] is copied:
                    user.target, user.args = aten.fill.Scalar, (user.args[0], number)
            if copied.users:
                like: dict[str, Any] = {"dtype": constant.dtype, "device": constant.device, "pin_memory": False}
                with module.graph.inserting_before(copied):
                    literal = module.graph.call_function(aten.full.default, ([], number), like)
                copied.replace_all_uses_with(literal, propagate_meta=True)
            module.graph.erase_node(copied)
        if not node.users:
            module.graph.erase_node(node)


def _without_copies(node: fx.Node, constant: torch.Tensor) -> None:
    """A tensor that the forward makes from numbers is made once, and copied where the caller gets to see it."""
    for copied in [user for user in node.users if user.target is torch.ops.aten.lift_fresh_copy.default]:
        foreign = not constant.untyped_storage().resizable()
        if foreign and any(called_in_place(user) and user.args[0] is copied for user in copied.users):
            raise foreign_memory()
        if reaches_output(copied):
            copied.target = torch.ops.aten.clone.default
        else:
            copied.replace_all_uses_with(node)
            node.graph.erase_node(copied)


def reaches_output(node: fx.Node) -> bool:
    """Whether the caller gets to see a node's storage: through itself or through views of it."""
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if user.op == "output":
                return True
            if user.target is operator.getitem or getattr(user.target, "is_view", False):
                pending.append(user)
    return False


def _with_views(module: fx.GraphModule) -> None:
    """Views that autograd is not told of are views: PyTorch 2.15 traces some reshapes as those that 2.14 does not.

    So a model is the same program with both, and its reshapes are seen to move no bytes.
    """
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten._unsafe_view.default):
        node.target = torch.ops.aten.view.default


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the tracer's own log of errors that are raised anyway."""
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
def _is_compiling() -> Iterator[None]:
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def _decomposed_operators() -> Iterator[Any]:
    """Operators that tracing would replace by others that round differently, or, recurrent ones, leave dropout out."""
    for name in dir(torch.ops.aten):
        if "upsample" in name or name in (
            "hardshrink",
            "softshrink",
            "multi_margin_loss",
            "multilabel_margin_loss_forward",
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


class _Autocast:
    """The caller's autocast while a model is traced: active in the forward, as it is in a call, and not in the backward.

    Plain PyTorch runs the backward without autocast, where the loss calls it; a custom function that wants autocast there
    restores it itself (``custom_bwd``). The tracer would run both under the same. It also switches off autocast's cache,
    with which a parameter is cast once however often it is used, so that its gradients are added up in 16 bits.
    """

    def __init__(self) -> None:
        self.active = _active_autocasts()
        self.caches = torch.is_autocast_cache_enabled()

    @contextlib.contextmanager
    def outside_forward(self) -> Iterator[None]:
        """Without autocast, on any device."""
        with contextlib.ExitStack() as stack:
            for device, dtype in self.active:
                stack.enter_context(torch.autocast(device, dtype, enabled=False))
            yield

    @contextlib.contextmanager
    def in_forward(self, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
        """The caller's, with a cache that is empty at the beginning.

        Args:
            leaves: the tensors of the trace that are leaves of autograd's graph in a call: their casts are cached.
        """
        with contextlib.ExitStack() as stack:
            if not self.active:
                # Regions inside the forward are outermost ones then, and empty the cache where they end.
                depth = _autocast_depth()
                stack.callback(_nest_autocast, depth)
                _nest_autocast(-depth)
            stack.enter_context(_CachedCasts(leaves).active())
            stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(self.caches)
            for device, dtype in self.active:
                stack.enter_context(torch.autocast(device, dtype))
            yield


class _CachedCasts(TorchFunctionMode):
    """What autocast's own cache does (``cached_cast`` in PyTorch's autocast_mode.cpp) for tensors of a trace.

    They are no leaves of autograd's graph, so that PyTorch would cast them anew for every use.
    """

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.casts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.leaves = WeakTensorKeyDictionary(
            {t: None for t in leaves if t.dtype == torch.float32 and t.requires_grad}  # which autocast casts
        )
        self.autocast_dtypes: dict[str, torch.dtype] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Deeper, where autocast calls operators itself, it is off.
        self.autocast_dtypes = dict(_active_autocasts()) if torch.is_autocast_cache_enabled() else {}
        return func(*args, **(kwargs or {}))

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
        """The kernel of ``aten.to.dtype`` while this is active."""
        cached = torch.is_grad_enabled() and tensor in self.leaves and self._is_autocasts_own(tensor.device.type, dtype)
        if cached and tensor in self.casts:
            return self.casts[tensor]
        result = _TO._op_dk(_COMPOSITE, tensor, dtype, *args, **kwargs)
        if cached:
            self.casts[tensor] = result
        return result

    def _is_autocasts_own(self, device: str, dtype: torch.dtype) -> bool:
        key = getattr(torch._C.DispatchKey, f"Autocast{device.upper()}", None)
        switched_off = key is not None and torch._C._dispatch_tls_is_dispatch_key_excluded(key)
        return switched_off and self.autocast_dtypes.get(device) == dtype

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Casts are cached, until a region of autocast ends that is in no other."""
        clear, own = torch.clear_autocast_cache, _TO.py_kernels.get(_COMPOSITE)

        def clear_both() -> None:
            clear()
            self.casts.clear()

        _TO.py_kernels[_COMPOSITE] = self.cast
        _TO._dispatch_cache.clear()
        torch.clear_autocast_cache = clear_both
        try:
            with self:
                yield
        finally:
            torch.clear_autocast_cache = clear
            del _TO.py_kernels[_COMPOSITE]
            if own is not None:
                _TO.py_kernels[_COMPOSITE] = own
            _TO._dispatch_cache.clear()


def _active_autocasts() -> list[tuple[str, torch.dtype]]:
    """The devices for which autocast is active, and to what."""
    devices = [device for device in torch._C._autocast_supported_devices() if torch.is_autocast_enabled(device)]
    return [(device, torch.get_autocast_dtype(device)) for device in devices]


def _autocast_depth() -> int:
    """How many regions of autocast, active or not, this is inside of."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def _nest_autocast(levels: int) -> None:
    """Enter so many regions, or, for a negative number, leave them."""
    for _ in range(abs(levels)):
        (torch.autocast_increment_nesting if levels > 0 else torch.autocast_decrement_nesting)()


class _Constants(TorchFunctionMode):
    """Follows small integer and boolean tensors that depend on no input, and answers questions about their values.

    ``if (positions == 0).all()`` on a tensor made by ``arange`` is no data dependence: its answer is always the
    same. Only what is made from literals is followed; anything that an input or a parameter went into is not.
    """

    _FACTORIES = frozenset({torch.arange, torch.ones, torch.zeros, torch.full, torch.tensor, torch.eye})
    _QUESTIONS = frozenset({"__bool__", "item", "__int__", "tolist", "__index__"})

    def __init__(self) -> None:
        super().__init__()
        self.values: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        known = bool(tensors or func in self._FACTORIES) and all(t in self.values for t in tensors)
        if known and getattr(func, "__name__", "") in self._QUESTIONS:
            with _disable_current_modes():
                return func(*self._real(args), **kwargs)
        result = func(*args, **kwargs)
        changes = changes_its_first(func, kwargs) or getattr(func, "__name__", "") == "__setitem__"
        changed = [kwargs["out"]] if "out" in kwargs else args[:1] if changes else ()
        if known and "out" not in kwargs:
            self._follow(func, args, kwargs, result, changes=bool(changed))
        else:
            for leaf in pytree.tree_leaves(changed):
                self._forget(leaf)
        return result

    def _forget(self, changed: Any) -> None:
        """What shares its memory is no longer known either."""
        if isinstance(changed, torch.Tensor) and (real := self.values.get(changed)) is not None:
            storage = real.untyped_storage()._cdata
            for tensor in [t for t, other in self.values.items() if other.untyped_storage()._cdata == storage]:
                self.values.pop(tensor)

    def _real(self, tree: Any) -> Any:
        return pytree.tree_map(lambda leaf: self.values[leaf] if isinstance(leaf, torch.Tensor) else leaf, tree)

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any, *, changes: bool) -> None:
        """Do for real, outside the trace, what was done to tensors that are known."""
        small = isinstance(result, torch.Tensor) and not result.dtype.is_floating_point
        small = small and result.numel() <= _CONSTANT_ELEMENTS
        if not small and not changes:
            return
        with _disable_current_modes():
            try:
                real = func(
                    *self._real(args), **{**self._real(kwargs), **({"device": "cpu"} if "device" in kwargs else {})}
                )
            except RuntimeError:  # then it is simply not known
                if changes:
                    self._forget(args[0])
                return
        if small:
            self.values[result] = real


@contextlib.contextmanager
def _unvalidated() -> Iterator[None]:
    """Distributions do not look at their parameters' values, as they do by default to see whether they are valid."""
    distribution = torch.distributions.Distribution
    before = distribution._validate_args
    distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        distribution.set_default_validate_args(before)


def _data_dependent(error: BaseException) -> bool:
    return isinstance(error, DataDependentOutputException) or "data-dependent" in str(error)


def _reason(error: BaseException) -> str:
    """The user's line, or the operator, that stopped the trace."""
    message = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    internal = (
        "/torch/",
        "/monet_like/capture/tracing.py",
        "/monet_like/capture/absent_gpu.py",
        "/monet_like/capture/guards/recorder.py",
        "/monet_like/capture/in_place.py",
        "/monet_like/capture/constants.py",
        "/contextlib.py",
    )
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not any(part in f.filename for part in internal)]
    where = f" (at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""
    advice = next((said for operator_, said in _ADVICE.items() if operator_ in str(error)), "")
    if advice:
        return f"{advice}{where}"
    if _data_dependent(error) or "aten._local_scalar_dense" in str(error) or "aten.nonzero" in str(error):
        message = f"its computation depends on the values of a tensor, not only on shapes: {message}"
    elif "modified by an inplace operation" in str(error):
        told = re.search(r"\[torch\.\w+ \[[^]]*\]\](, which is output \d+ of \w+)?", message)
        message = (
            f"it overwrites in place what the gradient of one of its results reads ({told[0] if told else message}); plain PyTorch "
            "has no gradient there either: detach() that result, if the loss does not use it, or do not write in place"
        )
    elif "requires grad" in str(error) or "require grad" in str(error):
        message = f"nothing in it requires a gradient: {message}"
    return f"{type(error).__name__}: {message}{where}"
