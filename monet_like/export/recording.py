"""Records the operators of plain PyTorch's forward, in the order in which a policy of checkpointing sees them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SAC_IGNORED_OPS

from ..capture.example_inputs import Example
from ..capture.trees import tensors_of
from ..errors import UsageError


@dataclass(frozen=True, slots=True)
class Operator:
    """One call of an operator.

    Attributes:
        op: such as ``aten.addmm.default``.
        region: number of the region in which it was called, or None.
        group: number of the operators that make and change the same storages; None: it makes none (a view), or it
            changes a parameter or buffer.
        shape: of the first result, or None.
        bytes: of the storages that it makes.
        draws: it draws random numbers.
        changes_state: it writes into a parameter or buffer.
        early: groups that it reads and that are changed in place later.
        changes: it writes into a storage that its region has made.
        until: for each storage that it makes, the number of the last call during which the storage exists although
            autograd saves nothing: the call that reads it last, or a later one where a variable of the model still
            names it.
    """

    op: str
    region: int | None
    group: int | None
    shape: tuple[int, ...] | None
    bytes: int
    draws: bool = False
    changes_state: bool = False
    early: tuple[int, ...] = ()
    changes: bool = False
    until: tuple[int, ...] = ()


def find_regions(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Qualified names of the modules that the patterns name, in the model's order; ``*`` stands for one part of a name.

    Raises:
        UsageError: a pattern names none, or one region is within another.
    """
    names = [name for name, _ in model.named_modules()]
    found: dict[str, None] = {}
    for pattern in patterns:
        regular = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        mine = [name for name in names if regular.fullmatch(name)]
        if not mine:
            known = ", ".join(name for name in names if name and name.count(".") == pattern.count("."))[:200]
            raise UsageError(f"no module is called {pattern!r}; regions are names such as {known or names[-1]}")
        found.update(dict.fromkeys(mine))
    regions = sorted(found, key=names.index)
    for one in regions:
        inner = next((other for other in regions if other != one and (not one or other.startswith(f"{one}."))), None)
        if inner is not None:
            raise UsageError(f"the regions {one or 'model'!r} and {inner!r} overlap; give one of them")
    return regions


def record_operators(model: nn.Module, example: Example, regions: Sequence[str]) -> tuple[Operator, ...]:
    """The operators of one forward. The model runs; its buffers and the random state are put back afterwards.

    Args:
        model: in training mode.
        example: real inputs.
        regions: names of modules.

    Raises:
        UsageError: a region is not called once, or its inputs are changed in place.
    """
    recorder = _Recorder({id(model.get_submodule(name)): k for k, name in enumerate(regions)}, regions)
    for tensor in (*model.parameters(), *model.buffers()):
        recorder.owned[_storage(tensor)] = (StorageWeakRef(tensor.untyped_storage()), "state")
    with ExitStack() as stack:
        stack.enter_context(_unchanged(model, example))
        # The forward runs as in training; what autograd would save is dropped at once.
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_dropped, _dropped))
        for name in regions:
            module = model.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(recorder.enter).remove)
            stack.callback(module.register_forward_hook(recorder.leave, always_call=True).remove)
        with recorder:
            model(*example[0], **example[1])
    for number, count in enumerate(recorder.calls):
        if count != 1:
            raise UsageError(
                f"{regions[number] or 'the model'} is called {count} times in a step, and a region must be called "
                "once; leave it out of regions"
            )
    return recorder.finished()


def _dropped(_: Any) -> Any:
    """In place of what autograd would save."""


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _unchanged(model: nn.Module, example: Example) -> Iterator[None]:
    """Put buffers and the random state back afterwards."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    devices = {t.device for t in tensors_of(example) if t.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if name in buffers and buffers[name].shape == buffer.shape:
                        buffer.copy_(buffers[name])


class _Recorder(TorchDispatchMode):
    """Notes every operator as `_CachingTorchDispatchMode` of PyTorch's checkpointing would ask about it."""

    def __init__(self, numbers: Mapping[int, int], names: Sequence[str]) -> None:
        super().__init__()
        self.numbers, self.names = numbers, names
        self.calls = [0] * len(names)
        self.region: int | None = None
        self.found: list[dict[str, Any]] = []
        #: Storage -> (a reference that keeps its number from being used again, the group or region that made it).
        self.owned: dict[int, tuple[StorageWeakRef, int | str]] = {}
        self.region_of: list[int | None] = []
        self.readers: dict[int, list[int]] = {}
        #: Storages that exist: a reference, the call that made it, and its place among the storages of that call.
        self.alive: list[tuple[StorageWeakRef, int, int]] = []

    def enter(self, module: nn.Module, *_: Any) -> None:
        self.region = self.numbers[id(module)]
        self.calls[self.region] += 1

    def leave(self, *_: Any) -> None:
        self.region = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        out = func(*args, **kwargs)
        if func not in SAC_IGNORED_OPS:
            self._note(func, args, kwargs, out)
        return out

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        place = len(self.found)
        self._expire(place - 1)
        schema = func._schema.arguments
        given = {**{a.name: value for a, value in zip(schema, args, strict=False)}, **kwargs}
        written = {a.name for a in schema if a.alias_info is not None and a.alias_info.is_write}
        read = [_storage(t) for t in _tensors([value for name, value in given.items() if name not in written])]
        targets = [_storage(t) for t in _tensors([given.get(name) for name in written])]
        for tensor in _tensors([args, kwargs]):
            self.owned.setdefault(_storage(tensor), (StorageWeakRef(tensor.untyped_storage()), "input"))
        results = _tensors([out])
        new = {_storage(t): t for t in results if _storage(t) not in self.owned}
        owners = [self.owned[target][1] for target in targets]
        group = next((owner for owner in owners if isinstance(owner, int)), None)
        self._check(str(func), owners)
        if group is None and new:
            group = len(self.region_of)
            self.region_of.append(self.region)
        for number, tensor in new.items():
            self.owned[number] = (StorageWeakRef(tensor.untyped_storage()), group if group is not None else "input")
        for number in read:
            owner = self.owned[number][1]
            if isinstance(owner, int) and new:
                self.readers.setdefault(owner, []).append(place)
        changed = [owner for owner in owners if isinstance(owner, int)]
        for owner in changed:
            for reader in self.readers.get(owner, ()):
                self.found[reader]["early"] += (owner,)
        self.found.append(
            {
                "op": str(func),
                "region": self.region,
                "group": group,
                "shape": tuple(results[0].shape) if results else None,
                "bytes": sum(t.untyped_storage().nbytes() for t in new.values()),
                "draws": torch.Tag.nondeterministic_seeded in func.tags,
                "changes_state": "state" in owners,
                "early": (),
                "changes": bool(changed),
                "until": [place] * len(new),
            }
        )
        self.alive += ((self.owned[number][0], place, index) for index, number in enumerate(new))

    def _expire(self, last: int) -> None:
        """Note which storages existed until the call ``last`` and do so no more."""
        there = []
        for reference, place, index in self.alive:
            if reference.expired():
                self.found[place]["until"][index] = last
            else:
                there.append((reference, place, index))
        self.alive = there

    def _check(self, op: str, owners: Sequence[int | str]) -> None:
        """Refuse a region that changes what was made outside of it: run again, it would change it again."""
        if self.region is None:
            return
        for owner in owners:
            outside = owner == "input" or (isinstance(owner, int) and self.region_of[owner] != self.region)
            if outside:
                raise UsageError(
                    f"{self.names[self.region] or 'the model'} changes its input in place ({op}), so it cannot be "
                    "checkpointed: run again, it would read the changed input; use the operator that makes a new "
                    "tensor, or leave the region out"
                )

    def finished(self) -> tuple[Operator, ...]:
        """What was noted."""
        self._expire(len(self.found) - 1)
        for _, place, index in self.alive:
            self.found[place]["until"][index] = len(self.found) - 1
        return tuple(Operator(**{**entry, "until": tuple(entry["until"])}) for entry in self.found)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
