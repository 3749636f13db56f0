"""What kernels cost: generated ones by the bytes that they move, others measured once, or by their arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from ..ir.program import Cost
from ..profile.devices import DeviceLimits
from ..profile.measure import allocated_peak, seconds_of
from ..profile.rates import limits_like, measured_limits
from ..profile.roofline import seconds_of as seconds_by_rates
from ..profile.work import Operation, Operations
from ..runtime.operators import communicates
from .collectives import begins_as_copy
from .joint import Kernel, name_of, tensors_of
from .kernels import Kernels

#: Kernels whose tensors have more bytes than this are not run for measuring.
MOST_MEASURED_BYTES = 2**31
#: Of each of them Inductor requires that a dimension of every argument has stride 1.
_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
#: A call is timed at most so often, and not again once that took so long in all; the least counts.
TIMED_CALLS, ENOUGH_SECONDS = 2, 0.02


@dataclass(frozen=True)
class Device:
    """A device, its rates, and whether costs are measured there.

    Attributes:
        measured: run what Inductor does not generate once for its workspace and twice for its time, if this process has
            not done so before; else all is estimated from the rates, and workspaces are taken to be 0. What Inductor
            copies is counted in any case.
    """

    device: torch.device
    limits: DeviceLimits
    measured: bool


@lru_cache
def device_of(device: torch.device, measured: bool) -> Device:
    """A device and its rates: measured here, or those of its datasheet."""
    with unset_fake_temporarily():
        return Device(device, measured_limits(device) if measured else limits_like(device), measured)


def prices(kernels: Kernels, device: Device) -> dict[str, Cost]:
    """The cost of every kernel, by its task's key."""
    found: dict[str, Cost] = {}
    tasks = zip(kernels.program.tasks, kernels.tasks, strict=True)
    slots = (
        pair for ways in zip(kernels.program.slots, kernels.slots, strict=True) for pair in zip(*ways, strict=True)
    )
    for task, kernel in (*tasks, *slots):
        if task.cost and task.cost not in found and kernel is not None and kernel.root is not None:
            found[task.cost] = price_of(kernel, kernel.root, device)
    return found


def price_of(kernel: Kernel, root: fx.Node, device: Device) -> Cost:
    """The cost of a kernel that writes ``root``."""
    cost = measured_cost(root, kernel.writes, device) if device.measured and not kernel.generated else None
    cost = cost or _estimated(kernel, device.limits)
    return replace(cost, workspace_bytes=max(cost.workspace_bytes, _copied_bytes(root)))


def _copied_bytes(node: fx.Node) -> int:
    """Bytes of the copies that Inductor has made for a product: of arguments none of whose dimensions has stride 1; and
    for a collective: of arguments that are not contiguous.

    Such are every second element of a row, and the gradient of a sum: one element that is expanded.
    """
    if communicates(node.target) and not begins_as_copy(node):
        given = tensors_of([argument.meta["val"] for argument in node.all_input_nodes])
        return sum(t.numel() * t.element_size() for t in given if not t.is_contiguous())
    if name_of(node) not in _PRODUCTS:
        return 0
    arguments = [argument.meta["val"] for argument in node.args if isinstance(argument, fx.Node)]
    return sum(t.numel() * t.element_size() for t in arguments if t.dim() and 1 not in t.stride())


def _bytes(nodes: Iterable[fx.Node]) -> int:
    return sum(t.numel() * t.element_size() for node in nodes for t in tensors_of(node.meta.get("val")))


def _estimated(kernel: Kernel, limits: DeviceLimits) -> Cost:
    """By the device's rates (`monet_like.profile.roofline`): what Inductor generates passes over what it touches."""
    known = [] if kernel.generated or kernel.root is None else operations_of(kernel.root)
    return Cost(seconds_by_rates(known or [Operation(touched_bytes=_bytes((*kernel.reads, *kernel.writes)))], limits))


def operations_of(node: fx.Node) -> list[Operation]:
    """What a call does; nothing known where its operator does not run without values."""
    counter = Operations()
    try:
        with counter:
            _call(node, lambda value: value)
    except (RuntimeError, NotImplementedError):
        return []
    return counter.found


def _call(node: fx.Node, tensor_like: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Call a node's operator on tensors made from those that the graph says it has."""

    def given(argument: fx.Node) -> Any:
        return pytree.tree_map_only(torch.Tensor, tensor_like, argument.meta["val"])

    args, kwargs = fx.map_arg((node.args, node.kwargs), given)
    target: Any = node.target
    return target(*args, **kwargs)


#: What was measured in this process: a call that is met again costs the same.
MEASURED: dict[str, Cost | None] = {}


def measured_cost(root: fx.Node, writes: Sequence[fx.Node], device: Device) -> Cost | None:
    """Seconds and workspace of an operator of PyTorch's; None: it does not run by itself, as a collective, or is
    too large.

    Args:
        root: the call.
        writes: it, or the parts of its result.
    """

    def shown(argument: fx.Node) -> Any:
        tensors = tensors_of(argument.meta["val"])
        return [f"{t.dtype}{tuple(t.shape)}{t.stride()}" for t in tensors]

    arguments = fx.map_arg((root.args, root.kwargs), shown)
    key = f"{device.device}, {torch.get_num_threads()}: {root.target} {arguments} {_bytes(writes)}"
    if key not in MEASURED:
        small = _bytes((*root.all_input_nodes, *writes)) <= MOST_MEASURED_BYTES
        MEASURED[key] = _measured(root, writes, device) if small and not communicates(root.target) else None
    return MEASURED[key]


def with_strides(call: fx.Node, strides: Sequence[tuple[int, ...]]) -> fx.Node | None:
    """A call with these strides of its tensors; None: the graph has the same, or does not say which tensors are meant.

    Inductor may lay out what it writes in another way than the graph says: an operator may then have to copy it.
    """
    given = [node for node in pytree.arg_tree_leaves(*call.args, **call.kwargs) if isinstance(node, fx.Node)]
    values = [value for node in given if isinstance(value := node.meta.get("val"), FakeTensor)]
    if not len(values) == len(given) == len(strides):
        return None
    if any(value.dim() != len(found) for value, found in zip(values, strides, strict=True)):
        return None
    if all(value.stride() == found for value, found in zip(values, strides, strict=True)):
        return None
    graph = fx.Graph()
    made = {}
    for node, value, found in zip(given, values, strides, strict=True):
        made[node] = graph.placeholder(node.name)
        with value.fake_mode:
            made[node].meta["val"] = value.as_strided(value.shape, found)
    return graph.node_copy(call, made.__getitem__)


class MadeUp:
    """Makes tensors like others: of ones, and of zeros where they are of integers or truth values; one of each kind."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}

    def __call__(self, fake: torch.Tensor) -> torch.Tensor:
        """A tensor that lies as this one does."""
        key = (fake.dtype, tuple(fake.shape), fake.stride(), fake.device)
        if key not in self._made:
            tensor = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
            self._made[key] = tensor.fill_(1) if fake.is_floating_point() or fake.is_complex() else tensor.zero_()
        return self._made[key]


def _measured(root: fx.Node, writes: Sequence[fx.Node], device: Device) -> Cost | None:
    like = MadeUp()
    try:
        with unset_fake_temporarily(), torch.no_grad(), torch._C._DisableAutocast():
            _call(root, like)  # what libraries set up in their first call
            peak = allocated_peak(lambda: _call(root, like), device.device)
            seconds = seconds_of(
                lambda: _call(root, like), device.device, repeats=TIMED_CALLS, enough_seconds=ENOUGH_SECONDS
            )
    except (RuntimeError, NotImplementedError):
        return None
    return Cost(seconds, max(0, peak - _bytes(writes)))
