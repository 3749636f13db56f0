"""Counts the memory of a training step on fake tensors: nothing is computed, and no tensor of the model changes.

Each storage that an operator makes counts from then until nobody holds it any more. What an operator takes while it
runs is measured once, on tensors like its arguments: its workspaces and the order in which it makes its results.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...capture.captured import TensorMeta, fake_mode
from ...capture.example_inputs import Example, each_once
from ...profile.measure import Stretch, allocated_peak


class NotOnFakes(Exception):
    """Fake tensors do not tell what this step does: it has to be run on real ones."""


def fake_stretches(
    function: Callable[[Callable[[], None]], Any], mode: FakeTensorMode, device: torch.device
) -> list[Stretch]:
    """As `monet_like.profile.measure.allocated_stretches`, on fake tensors of a mode.

    Args:
        device: on which operators are measured.

    Raises:
        NotOnFakes: the function asks for values of tensors or for their memory, or an operator is not known for fake
            tensors.
    """
    counting = _Counting(mode, device)
    try:
        with ExitStack() as stack:
            for context in (_hidden(), mode, counting, _Refusals()):
                stack.enter_context(context)
            result = function(counting.mark)
    except Exception as error:
        raise NotOnFakes(str(error)) from error
    counting.mark()
    del result
    if counting.failed is not None:  # and the step has gone on
        raise NotOnFakes(str(counting.failed)) from counting.failed
    return counting.stretches


@contextmanager
def outside(example: Example) -> Iterator[Example]:
    """Run what is no part of the step, such as a capture of an example, as if no step were counted.

    Yields:
        An example of fake tensors whose memory does not count.
    """
    now, _Counting.now = _Counting.now, None
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            yield copied(example)
    finally:
        _Counting.now = now


def copied(example: Example) -> Example:
    """Fake tensors like those of an example, for a capture, which keeps some: nobody else holds their memory."""
    mode, storages = fake_mode(), dict[int, torch.Tensor]()

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

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        super().__init__()
        self.mode, self.device = mode, device
        self.stretches: list[Stretch] = []
        self.failed: Exception | None = None
        self._level = self._peak = 0
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
        self.stretches.append(Stretch(self._peak, self._level))
        self._peak = self._level

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map(self._faked, (args, dict(kwargs or {})))
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
            before = self._level
            measured = self._measured(func, args, kwargs)
            result = func(*args, **kwargs)
            if _looks(result) != measured.results:
                raise NotOnFakes(f"the results of {func} lie otherwise")
        except Exception as error:
            self.failed = self.failed or error
            raise
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._follow(leaf, counts=True)
        self._peak = max(self._peak, self._level, before + measured.rise - self._factors.there)
        if func in _SCALES and self.device.type == "cpu":
            self._factors.keep(args, result)
        return result

    def _faked(self, leaf: Any) -> Any:
        """A real tensor, such as a parameter, as a fake one; its memory was there before the step."""
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        fake = self.mode.from_tensor(leaf, static_shapes=True)
        self._follow(fake, counts=False)
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

    def _measured(self, func: Any, args: Any, kwargs: Any) -> _Measured:
        """What an operator takes and makes on real tensors."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = (func, spec, self.device, torch.get_num_threads(), tuple(map(_described, leaves)))
        if key not in _measured:
            looks: list[Any] = []
            with outside(((), {})), torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
                given, named = pytree.tree_unflatten([*map(_alike, leaves)], spec)
                rise = allocated_peak(lambda: looks.append(_looks(func(*given, **named))), self.device)
            _measured[key] = _Measured(rise, looks[0])
        return _measured[key]


@dataclass(frozen=True)
class _Measured:
    """An operator on tensors of some sizes.

    Attributes:
        rise: by how much memory rises while it runs, at most, its results included.
        results: how its results lie.
    """

    rise: int
    results: tuple[Any, ...]


def _looks(result: Any) -> tuple[Any, ...]:
    tensors = (leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))
    return tuple((t.dtype, tuple(t.shape), t.stride(), t.untyped_storage().nbytes()) for t in tensors)


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
_measured: dict[Any, _Measured] = {}


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


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.device, tuple(leaf.shape), leaf.stride(), leaf.storage_offset()
    return torch.Generator if isinstance(leaf, torch.Generator) else (type(leaf), leaf)


def _alike(leaf: Any) -> Any:
    """Something of the same kind and size that an operator may read and change."""
    if isinstance(leaf, torch.Generator):
        return torch.Generator(leaf.device)
    if not isinstance(leaf, FakeTensor):
        return leaf
    size = leaf.untyped_storage().nbytes() // leaf.element_size()
    whole = torch.zeros(size, dtype=leaf.dtype, device=leaf.device)
    return whole.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())


#: Gives a tensor the memory of another one, a fake one here.
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class _Refusals(TorchFunctionMode):
    """Refuses what reads, changes or takes memory beside PyTorch's operators."""

    _OF_MEMORY = frozenset({"data", "numpy", "__array__", "data_ptr", "__dlpack__", "tolist"})

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = "data" if func == _SET_DATA else getattr(func, "__name__", "")
        makes_tensor = name == "__setitem__" and not isinstance(args[2], torch.Tensor)
        if name in self._OF_MEMORY or makes_tensor:
            _refuse(name)
        return func(*args, **(kwargs or {}))


def _refuse(name: str) -> Any:
    error = NotOnFakes(f"the step calls {name}")
    if _Counting.now is not None:
        _Counting.now.failed = error
    raise error


@contextmanager
def _hidden() -> Iterator[None]:
    """Let code that asks whether tensors are fake, to compute in another way then, take them for real."""
    package = torch._subclasses
    own, log, state = package.FakeTensor, fake_tensor.log.disabled, torch.get_rng_state
    torch.get_rng_state = lambda: state() if _Counting.now is None else _refuse("get_rng_state")  # checkpoints keep it
    package.FakeTensor = _Nothing  # type: ignore[misc, assignment]
    fake_tensor.log.disabled = True  # of operators that fakes do not know: then the step runs on real tensors
    try:
        yield
    finally:
        package.FakeTensor, fake_tensor.log.disabled = own, log  # type: ignore[misc]
        torch.get_rng_state = state


class _Nothing:
    pass
