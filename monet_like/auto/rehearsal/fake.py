"""Counts the memory of a training step on fake tensors: nothing is computed, and no tensor of the model changes.

Each storage that an operator makes counts from then until nobody holds it any more. What an operator takes while it
runs is measured once, on tensors like its arguments: its workspaces and the order in which it makes its results.
"""

from __future__ import annotations

import collections
import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.utils._pytree as pytree
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...capture.captured import TensorMeta, fake_mode, let_go_of_tensors
from ...capture.example_inputs import Example, each_once
from ...capture.guards.objects import is_library
from ...capture.replaced import replaced
from ...capture.trace.alone import in_this_thread
from ...capture.trace.answers import Answer, repeated
from ...capture.trace.known_values import KnownValues
from ...compiler.quick import MOST_WORKSPACE
from ...profile.measure import Stretch
from .operators import NotOnFakes, Operator, looks_of, relaid


def fake_stretches(
    function: Callable[[Callable[[], None]], Any], mode: FakeTensorMode, device: torch.device,
    answers: Sequence[Answer] | None = None, inputs: Iterable[torch.Tensor] = (),
) -> list[Stretch]:  # fmt: skip
    """As `monet_like.profile.measure.allocated_stretches`, on fake tensors of a mode.

    Args:
        device: on which operators are measured.
        answers: to the questions about values that the function asks; None: it asks none but of literals and inputs.
        inputs: tensors of whose values the function may ask.

    Raises:
        NotOnFakes: the function asks for values of other tensors or for their memory, or an operator is not known for
            fake tensors.
    """
    counting = _Counting(mode, device)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.autograd.set_detect_anomaly(False))  # it asks gradients for their values
            known = KnownValues(inputs) if answers is None else repeated(answers)
            for context in (hidden(), mode, counting, _Refusals(), known):
                stack.enter_context(context)
            result = function(counting.mark)
    except Exception as error:
        raise NotOnFakes(str(error)) from error
    finally:
        torch.clear_autocast_cache()  # in the caller's region it has kept casts of weights, which are fakes
        _Counting.left += counting._storages.values()
    counting.mark()
    del result
    if counting.failed is not None:  # and the step has gone on
        raise NotOnFakes(str(counting.failed)) from counting.failed
    return counting.stretches


@contextmanager
def none_left() -> Iterator[None]:
    """Leave no fake tensors of steps within in caches of functions and global dicts, also of packages, whose state is
    not put back. All else that has them is to be put back within.
    """
    with replaced(_Counting, left=[]):
        try:
            yield
        finally:
            if any(left() is not None for left in _Counting.left):  # if not, a tenth of a second is saved
                _empty_caches()


def _empty_caches() -> None:
    """Take all fake tensors out of these caches and dicts."""
    caches = [held for held in gc.get_objects() if type(held) is functools._lru_cache_wrapper]
    for cache in caches:
        theirs = not is_library(getattr(cache.__wrapped__, "__module__", None))
        if theirs and any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(gc.get_referents(cache))):
            cache.cache_clear()
    modules = [module for name, module in [*sys.modules.items()] if not is_library(name)]
    found = [value for module in modules for value in [*getattr(module, "__dict__", {}).values()]]
    found += [value for kind in found if type(kind) is type for value in [*vars(kind).values()]]
    for held in {id(value): value for value in found if type(value) in _DICTS}.values():
        for key in [key for key, kept in [*held.items()] if _is_fake(kept)]:
            del held[key]


_DICTS = (dict, collections.OrderedDict, collections.defaultdict)  # those of other classes may import what they hold


def _is_fake(kept: Any) -> bool:
    return any(isinstance(part, FakeTensor) for part in (kept if isinstance(kept, tuple | list) else (kept,)))


@contextmanager
def outside(example: Example) -> Iterator[Example]:
    """Run what is no part of the step, such as a capture of an example, as if no step were counted.

    Yields:
        An example of fake tensors whose memory does not count.
    """
    mode = fake_mode()
    _Counting.left.append(weakref.ref(mode))  # its tensors hold it
    try:
        with replaced(_Counting, now=None), _disable_current_modes():
            yield copied(example, mode)
    finally:
        let_go_of_tensors(mode)


def copied(example: Example, mode: FakeTensorMode) -> Example:
    """Fake tensors like those of an example, for a capture, which keeps some: nobody else holds their memory."""
    storages = dict[int, torch.Tensor]()

    def like(tensor: torch.Tensor) -> torch.Tensor:
        meta = TensorMeta.of(tensor)
        whole = storages.setdefault(
            tensor.untyped_storage()._cdata, torch.empty(meta.storage_bytes, dtype=torch.uint8, device=meta.device)
        )
        made = whole.view(meta.dtype).as_strided(meta.shape, meta.stride, meta.offset)
        made = made.detach().requires_grad_(tensor.requires_grad)
        return made if tensor.is_leaf else made.view_as(made)

    with mode:
        return each_once(like, example)


class _Counting(TorchDispatchMode):
    """The level of memory after each operator of a step."""

    now: _Counting | None = None
    left: ClassVar[list[weakref.ref[Any]]] = []  # of what may outlive a step

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        super().__init__()
        self.mode, self.device = mode, device
        self.stretches: list[Stretch] = []
        self.failed: Exception | None = None
        self._level = self._peak = 0
        self._unmeasured: list[_Run] = []
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._validated: set[int] = set()
        self._factors = _Factors()

    def __enter__(self) -> _Counting:
        _Counting.now = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        _Counting.now = None
        super().__exit__(*error)

    def mark(self) -> None:
        """End a stretch."""
        self._level += self._factors.risen(torch._C._current_autograd_node())
        self._peak = max(self._peak, self._level)
        for run in sorted(self._unmeasured, key=lambda run: -run.most):
            if run.most <= self._peak:
                break
            self._peak = max(self._peak, run.before + run.operator.measured().rise)
        self._unmeasured.clear()
        self.stretches.append(Stretch(self._peak, self._level))
        self._peak = self._level

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        fresh = func is torch.ops.aten.lift_fresh.default  # of a tensor that PyTorch has made of numbers
        args, kwargs = pytree.tree_map(functools.partial(self._faked, counts=fresh), (args, dict(kwargs or {})))
        if func is torch.ops.prim.device.default:
            self._validated.add(id(args[0]))
            return func(*args, **kwargs)
        try:
            if func is torch.ops.aten.add.Tensor and self._adds_in_place(args):
                func = torch.ops.aten.add_.Tensor
            elif func in _FILLS and torch._C._current_autograd_node() is not None and _is_held_once(args[0]):
                func = _FILLS[func]
            else:
                self._validated.clear()
            self._level += self._factors.risen(torch._C._current_autograd_node())
            operator = Operator.of(func, args, kwargs, self.device)
            before = self._level - self._factors.there
            result = func(*args, **kwargs)
            if operator.is_small and looks_of(result) != (looks := operator.measured().results):
                result = relaid(func, result, looks)
        except Exception as error:
            self.failed = self.failed or error
            raise
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._follow(leaf, counts=True)
        self._peak = max(self._peak, self._level, before + (operator.measured().rise if operator.is_small else 0))
        if not operator.is_small:
            made = sum(nbytes for *_, nbytes in looks_of(result))
            most = self._level - self._factors.there + MOST_WORKSPACE * (operator.touched_bytes + made)
            self._unmeasured.append(_Run(operator, before, most))
        if func in _SCALES and self.device.type == "cpu":
            self._factors.keep(args, result)
        return result

    def keep(self, made: torch.Tensor) -> None:
        """Count a tensor that no operator has made."""
        self._follow(made, counts=True)
        self._peak = max(self._peak, self._level)

    def _faked(self, leaf: Any, *, counts: bool) -> Any:
        """A real tensor, such as a parameter, as a fake one; its memory was there before the step unless it counts."""
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        fake = self.mode.from_tensor(leaf, static_shapes=True)
        self._follow(fake, counts=counts)
        return fake

    def _follow(self, tensor: torch.Tensor, *, counts: bool) -> None:
        """Count a storage until nobody holds it any more."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if counts and tensor.device == self.device else 0
        if key in self._storages:
            return

        def gone(_: Any) -> None:
            self._storages.pop(key, None)
            self._level -= size

        self._storages[key] = weakref.ref(storage, gone)
        self._level += size

    def _adds_in_place(self, args: tuple[Any, ...]) -> bool:
        """Whether a sum is one of gradients, which autograd adds to the sum so far in place if nobody else holds that.

        While a mode is active it does not. It has asked for the device of the second gradient just before.
        """
        if torch.is_grad_enabled() or torch._C._current_autograd_node() is None or len(args) != 2:
            return False
        far, gradient = args
        if not isinstance(gradient, torch.Tensor) or id(gradient) not in self._validated:
            return False
        return _is_held_once(far) and _is_dense(far)


@dataclass(frozen=True)
class _Run:
    """An operator that has run, and was not measured.

    Attributes:
        before: the level of memory.
        most: the highest level that it may have reached.
    """

    operator: Operator
    before: int
    most: int


class _Factors:
    """Bytes of the tensors that PyTorch makes on the CPU of numbers with which others are multiplied, and keeps for the
    backward.

    Attributes:
        there: of the number that the running node of autograd has kept.
    """

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}
        self._made: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._node, self.there = -1, 0

    def keep(self, args: tuple[Any, ...], result: torch.Tensor) -> None:
        """Note a product that has been computed; autograd makes its node afterwards."""
        if len(args) == 2 and isinstance(args[1], int | float | complex) and torch.is_grad_enabled():
            self._made.append((weakref.ref(result), _BYTES[type(args[1])]))

    def risen(self, node: Any) -> int:
        """By how much more is kept than at the call before."""
        rise = 0
        for made, size in self._made:
            tensor = made()
            if tensor is not None and tensor.grad_fn is not None:
                self._bytes[tensor.grad_fn._sequence_nr()] = size
                rise += size
        self._made.clear()
        number = -1 if node is None else node._sequence_nr()
        if number != self._node:
            rise -= self.there
            self._node, self.there = number, self._bytes.pop(number, 0)
        return rise


#: Operators whose node keeps the number, and the bytes of numbers as tensors.
_SCALES = frozenset(getattr(torch.ops.aten, name).Tensor for name in ("mul", "mul_", "div", "div_"))
_BYTES = {bool: 1, int: 8, float: 8, complex: 16}
#: Formulas of gradients fill zeros in place by these; while a mode is active they do not.
_FILLS = {
    torch.ops.aten.index_put.default: torch.ops.aten.index_put_.default,
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
}
#: References to a gradient's tensor and to its storage while an operator is dispatched on it, if autograd alone holds
#: it.
_HELD_BY_AUTOGRAD = (4, 2)


def _is_held_once(tensor: Any) -> bool:
    held = tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return held == _HELD_BY_AUTOGRAD


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie side by side, in any order of the dimensions."""
    expected = 1
    for stride, extent in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= extent
    return True


#: Gives a tensor the memory of another one, a fake one here.
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class _Refusals(TorchFunctionMode):
    """Refuses what reads, changes or takes memory beside PyTorch's operators."""

    _OF_MEMORY = frozenset({"data", "numpy", "__array__", "data_ptr", "__dlpack__", "tolist"})

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = "data" if func == _SET_DATA else getattr(func, "__name__", "")
        if _Counting.now is not None and name in self._OF_MEMORY:
            _refuse(name)
        return func(*args, **(kwargs or {}))


def _refuse(name: str) -> Any:
    assert _Counting.now is not None
    _Counting.now.failed = NotOnFakes(f"the step calls {name}")
    raise _Counting.now.failed


@contextmanager
def hidden() -> Iterator[None]:
    """Let code that asks whether tensors are fake, to compute in another way then, take them for real."""
    own = torch.get_rng_state

    def state() -> torch.Tensor:  # which checkpoints keep; it is real, and fake operators draw nothing
        kept = own()
        if _Counting.now is not None:
            _Counting.now.keep(kept)
        return kept

    with (
        replaced(torch, get_rng_state=in_this_thread(state, own)),
        replaced(torch.random, get_rng_state=in_this_thread(state, own)),
        replaced(torch._subclasses, FakeTensor=_Nothing),
        replaced(fake_tensor.log, disabled=True),  # operators that fakes do not know: the step runs on real tensors
    ):
        yield


class _Nothing:
    pass
