"""A backward that a schedule cannot do, as plain PyTorch's: the forward runs once more, and autograd differentiates it.

For second derivatives, for many gradients at once, for the whole gradient of a result from which others are made, and
for a backward that reads what was set since the forward. Nothing is kept for it but references that hold no memory, and
of a step whose backward reads Python values, the inputs and the buffers that the forward reads and changes. So it is
possible while the caller holds the inputs and has not changed them or parameters. Values that the forward reads are put
back while it runs. Where tensors or values have changed otherwise, its results have to be the same ones when it runs
once more.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from ..capture.example_inputs import Example, version_of
from ..capture.guards.objects import default_generators
from ..capture.precision import autocast_as, autocast_name
from ..capture.trace.answers import forward_undone
from ..capture.trees import flattened, taken_apart
from ..errors import UsageError
from .checks.backward_checks import Hook
from .kept_steps import KeptStep
from .segments import Segment


class PlainCall:
    """What repeats a call of a model by a step. To be made before the step's forward.

    Args:
        model, kept: the model and the step. Results hold this, and the model may hold them, so they are not held.
        leaves, spec: the arguments, flattened.
        instead: is told why plain PyTorch does such calls from now on, and with which arguments.
    """

    def __init__(
        self, model: nn.Module, kept: KeptStep, leaves: Sequence[Any], spec: pytree.TreeSpec,
        instead: Callable[[UsageError, Example], None],
    ) -> None:  # fmt: skip
        self._model, self._kept, self._spec, self._instead = weakref.ref(model), weakref.ref(kept), spec, instead
        late = kept.reads is not None and kept.reads.has_late
        self._leaves = [_reference(leaf, held=late) for leaf in leaves]
        self._changed = kept.read_and_changed
        each = zip(kept.captured.buffers, kept.residents()[1], strict=True)
        again = [buffer for (_, value), buffer in each if value in self._changed] if late else []
        self._buffers = [(weakref.ref(buffer), buffer.clone()) for buffer in again]
        residents = [*chain(*kept.residents()), *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]
        written = [residents[position] for position in kept.step.written]
        self._written = [(weakref.ref(tensor), tensor._version) for tensor in written]
        device = kept.captured.device
        self._generators = [(generator, generator.clone_state()) for generator in default_generators(device)]
        self._autocast = autocast_name(device)
        self._then: _State | None = None
        self._results: list[tuple[weakref.ref[torch.Tensor], int]] = []

    def undone(self) -> bool:
        """Undo what the step has done so far, if it has drawn random numbers at most.

        Returns:
            Whether nothing is left of it.
        """
        if any((tensor := there()) is None or tensor._version != version for there, version in self._written):
            return False
        self._seed()
        return True

    def made(self, results: Sequence[torch.Tensor]) -> None:
        """Take note of the call's results, which are not held."""
        kept = self._kept()
        self._then = None if kept is None else self._state(kept)
        self._results = [(weakref.ref(result), result._version) for result in results]

    def _state(self, kept: KeptStep) -> _State | None:
        """Which tensors the call reads, and how often each was changed; None if an input is gone."""
        parameters, buffers = kept.residents()
        tensors = [*parameters]
        for there in self._leaves:
            leaf = there()
            if isinstance(there, weakref.ref) and leaf is None:
                return None
            tensors += [leaf] if isinstance(leaf, torch.Tensor) else []
        restored = {id(buffer()) for buffer, _ in self._buffers}
        counts = kept.captured.changed - self._changed
        others = [b for (_, value), b in zip(kept.captured.buffers, buffers, strict=True) if value not in counts]
        return _versions(tensors), _versions([buffer for buffer in others if id(buffer) not in restored])

    def __call__(
        self, gradients: Sequence[torch.Tensor | None], segments: Sequence[Segment],
        hooks: Mapping[int, Sequence[Hook]], reason: UsageError,
    ) -> Iterator[list[Any]]:  # fmt: skip
        """The gradients of one segment after the other, with a graph of their own if that is asked for.

        Args:
            gradients: incoming ones of the step's results.
            hooks: of results, by position, for the whole gradient of each.
            reason: why the schedule cannot do it.

        Raises:
            UsageError: ``reason``; the call cannot be repeated.
        """
        model, kept = self._model(), self._kept()
        state = None if kept is None else self._state(kept)
        if model is None or kept is None or state is None or self._then is None or state[0] != self._then[0]:
            raise reason
        captured, with_graph = kept.captured, torch.is_grad_enabled()
        leaves = [leaf() for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves if with_graph else [*map(_cut, leaves)], self._spec)
        parameters, _ = kept.residents()
        called: Callable[..., Any] = model
        wanted_of = parameters
        if with_graph and _lead_to(leaves, parameters):
            called, wanted_of = _by_aliases(model, parameters)
        with kept.reads.as_then() if kept.reads is not None else contextlib.nullcontext():
            changed = kept.change() is not None
            if changed and kept.own_change() is None:
                raise reason
            try:
                with autocast_as(self._autocast, captured.device):
                    _, result = forward_undone(model, args, kwargs, self._seed, call=called)
            except Exception as error:  # it draws random numbers for many gradients at once
                raise reason from error
        found = pytree.tree_leaves(taken_apart(result, results=True))
        results = [found[positions[0]] if positions else None for positions in captured.output_positions]
        others = len(self._changed) > len(self._buffers)  # change, and are not as before the call
        if called is not model and _lead_to(results, parameters, but=[*leaves, *wanted_of]):
            raise reason  # it takes parameters from elsewhere than modules
        if not self._made_alike(results, certainly=others or changed or state != self._then):
            raise reason
        there: list[tuple[torch.Tensor, torch.Tensor]] = []
        for position, given in enumerate(gradients):
            mine = results[position] if position < len(results) else None
            if mine is None and given is not None:
                raise reason  # of what the forward has set, or of an input that it has changed
            if mine is not None:
                for hook in hooks.get(position, ()):
                    mine.register_hook(hook)
                there += [] if given is None else [(mine, given)]
        inputs = [leaf for leaf in flattened((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        wanted = [[*(wanted_of[i] for i in s.parameters), *(inputs[i] for i in s.inputs)] for s in segments]
        each = list({id(tensor): tensor for tensors in wanted for tensor in tensors}.values())
        with without_hooks(each):
            made = torch.autograd.grad(
                [mine for mine, _ in there], each, [given for _, given in there],
                create_graph=with_graph, allow_unused=True,
            )  # fmt: skip
        self._instead(reason, (args, kwargs))
        by = {id(tensor): gradient for tensor, gradient in zip(each, made, strict=True)}
        return iter([[by.pop(id(tensor), None) for tensor in tensors] for tensors in wanted])

    def _made_alike(self, results: Sequence[torch.Tensor | None], *, certainly: bool) -> bool:
        """Whether results are those of the call, to the bit, as far as the model has returned them.

        Args:
            certainly: also of those that nobody holds, or that were changed since.
        """
        for (there, version), mine in zip(self._results, results, strict=False):
            if mine is None:
                continue
            own = there()
            if own is None or own._version != version:
                if certainly:
                    return False
            elif not torch.equal(own, mine) and not bool(((own == mine) | (own != own) & (mine != mine)).all()):
                return False
        return True

    def _seed(self) -> None:
        """Have the generators and the kept buffers as they were before the call."""
        for there, contents in self._buffers:
            if (buffer := there()) is not None:
                with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(buffer):
                    buffer.copy_(contents)
        for generator, state in self._generators:
            generator.set_state(state.get_state())


#: Identities and version counters of parameters and inputs, and those of buffers.
_State = tuple[list[tuple[int, int]], list[tuple[int, int]]]


def _versions(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return [(id(tensor), version_of(tensor)) for tensor in tensors]


def _reference(leaf: Any, *, held: bool) -> Callable[[], Any]:
    return weakref.ref(leaf) if isinstance(leaf, torch.Tensor) and not held else lambda: leaf


def _cut(leaf: Any) -> Any:
    """An input whose gradient is a result: what has made it has a backward of its own."""
    if not isinstance(leaf, torch.Tensor) or leaf.grad_fn is None:
        return leaf
    with torch.enable_grad():  # no view, of which autograd makes another node when it is written
        return leaf.detach().requires_grad_().clone()


def _by_aliases(model: nn.Module, parameters: Sequence[torch.Tensor]) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """What calls the model with aliases of its parameters, and those: gradients are of this call alone, where the
    inputs are computed from the parameters, too.
    """
    with torch.enable_grad():
        by = {id(parameter): parameter.view_as(parameter) for parameter in parameters}
    given = {
        name: by[id(parameter)]
        for prefix, module in model.named_modules()  # each once, whatever its names
        for name, parameter in module.named_parameters(prefix, recurse=False, remove_duplicate=False)
        if id(parameter) in by
    }

    def called(*args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(model, given, args, kwargs, tie_weights=False)

    return called, [by[id(parameter)] for parameter in parameters]


def _lead_to(tensors: Sequence[Any], parameters: Sequence[torch.Tensor], but: Sequence[Any] = ()) -> bool:
    """Whether one of these tensors is computed from one of the parameters, otherwise than by those in ``but``."""
    wanted = set(map(id, parameters))
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors if isinstance(tensor, torch.Tensor)]
    seen: set[Any] = {None, *(tensor.grad_fn for tensor in but if isinstance(tensor, torch.Tensor))}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            if id(getattr(node, "variable", None)) in wanted:
                return True
            waiting += [before for before, _ in node.next_functions]
    return False


@contextlib.contextmanager
def without_hooks(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Without the hooks of tensors, which run when their gradients are handed over."""
    kept = [(hooks, dict(hooks)) for tensor in tensors if (hooks := tensor._backward_hooks)]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in kept:
            hooks.update(own)
