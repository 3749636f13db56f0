"""Plans for ``torch_remat``: which modules of checkpointed layers keep what the backward reads, and are not run again.

A layer is one checkpoint, and each of its submodules may be a region that is saved: ``remat.region(module, name,
recompute=False)``. All else of the layer runs again when its backward begins. One list of names, relative to a layer,
holds for all layers, as torchtitan's ``save_regions`` does.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..capture.layers import layers_of
from ..compiler.prepared import Prepared
from ..compiler.request import Request
from ..errors import UsageError
from ..files import write_atomically
from ..ir.defaults import SOLVER
from ..ir.json_fields import headed, read_file_as
from ..ir.schedule_file import ScheduleRecord
from ..ir.units import format_bytes, format_seconds
from .checkpointed import Item, StepOfRegions
from .policy_file import Predictions
from .selection import choose
from .selective import checkpointing_step, predictions, recorded

FORMAT = "monet_like remat plan"
VERSION = 1


@dataclass(frozen=True, slots=True)
class SavedRegion:
    """A submodule of each layer that is saved.

    Attributes:
        name: relative to the layer, such as ``self_attn.q_proj``.
        needs_tensor: operators that run again read its result: ``remat.recompute_needs_tensor``.
    """

    name: str
    needs_tensor: bool


@dataclass(frozen=True)
class RematPlan(Predictions):
    """The saved regions of all layers, and what is predicted.

    Attributes:
        layers: qualified names of the modules that are checkpointed.
        regions: the submodules of them that are saved.
    """

    layers: tuple[str, ...]
    regions: tuple[SavedRegion, ...]

    def content(self) -> dict[str, Any]:
        """The content of the file, as builtins; ``save_regions`` is the list that torchtitan takes."""
        head = headed(self, FORMAT, VERSION, without="regions")
        regions = [asdict(region) for region in self.regions]
        return {
            **head,
            "layers": list(self.layers),
            "save_regions": [region.name for region in self.regions],
            "regions": regions,
        }

    def write(self, path: Path) -> None:
        """Write it as JSON.

        Raises:
            UsageError: it cannot be written.
        """
        write_atomically(path, (json.dumps(self.content(), indent=1) + "\n").encode())

    @staticmethod
    def read(path: Path) -> RematPlan:
        """Read a file that `write` has written.

        Raises:
            ScheduleFileError: it is unreadable or none of these.
        """
        return read_file_as(path, RematPlan, "remat plan", FORMAT, VERSION, "write it again")

    def __repr__(self) -> str:
        saved = ", ".join(region.name for region in self.regions) or "nothing"
        return (
            f"RematPlan({len(self.layers)} layers of {self.model}, saved in each: {saved}; peak "
            f"{format_bytes(self.peak_bytes)}, step {format_seconds(self.seconds)} predicted; the full plan: "
            f"{format_bytes(self.full_peak_bytes)}, {format_seconds(self.full_seconds)}; plain PyTorch: "
            f"{format_bytes(self.plain_peak_bytes)}, {format_seconds(self.plain_seconds)})"
        )


def remat_plan(
    record: ScheduleRecord,
    ready: Prepared,
    request: Request,
    device: torch.device,
    patterns: Sequence[str],
    *,
    solver: str = SOLVER,
    time_limit_seconds: float = 60.0,
) -> RematPlan:
    """The fastest choice of saved regions within the budget of a schedule.

    Args:
        record, ready, request: a schedule, and the prepared program of its model.
        patterns: names of layers, in which ``*`` stands for one part of a name.

    Raises:
        UsageError: a layer cannot be checkpointed, or does itself what may happen only once.
        InfeasibleError: the mechanism cannot reach the budget; the message says what it reaches.
    """
    with _watched(request.model) as seen:
        ready, called, names = recorded(record, ready, request, device, patterns)
    operators, _ = checkpointing_step(ready, called, names, draws_saved=True)  # a draw is not repeated
    layers = layers_of(ready.captured, ready.captured.program)
    modules = [_modules(item, operators, layers, names) for item in operators.items]
    step, named = _by_module(operators, modules, names, seen)
    step = replace(step, extra_bytes=ready.extra_bytes)  # no random states are kept
    choice = choose(step, record.budget_bytes, solver=solver, time_limit_seconds=time_limit_seconds)
    return RematPlan(
        **predictions(record, choice), layers=tuple(names), regions=tuple(_saved_regions(step, named, choice.saved))
    )


@dataclass
class _Seen:
    """What was seen of a forward's modules, by their qualified names.

    Attributes:
        calls: how often each was called.
        changes: those that have changed buffers of their own.
        others: those whose result is no tensor and no tuple or list of tensors, which a region cannot return.
    """

    calls: Counter[str]
    changes: set[str]
    others: set[str]

    def may_be_saved(self, module: str) -> bool:
        """Whether a region may be put around its call: it is called once, and returns tensors."""
        return self.calls[module] == 1 and module not in self.others


@contextmanager
def _watched(model: nn.Module) -> Iterator[_Seen]:
    seen = _Seen(Counter(), set(), set())
    versions: dict[str, list[int]] = {}
    hooks = []

    def own(module: nn.Module) -> list[int]:
        return [buffer._version for buffer in module.buffers(recurse=False)]

    for name, module in model.named_modules():

        def before(module: nn.Module, _: Any, name: str = name) -> None:
            seen.calls[name] += 1
            versions[name] = own(module)

        def after(module: nn.Module, _: Any, result: Any, name: str = name) -> None:
            if own(module) != versions[name]:
                seen.changes.add(name)
            leaves = result if isinstance(result, tuple | list) else (result,)
            if not all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in leaves):
                seen.others.add(name)

        hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _modules(item: Item, step: StepOfRegions, layers: Sequence[str], names: Sequence[str]) -> set[str]:
    """The modules in whose calls the operators of an item run, relative to the item's layer; "": the layer itself."""
    inside = f"{names[item.region]}."
    found = {layers[v] for p in item.tasks for v in step.program.tasks[p].writes}
    return {layer.removeprefix(inside) if layer.startswith(inside) else "" for layer in found}


def _by_module(
    operators: StepOfRegions, modules: Sequence[set[str]], names: Sequence[str], seen: _Seen
) -> tuple[StepOfRegions, dict[tuple[int, str], int]]:
    """The step with an item for the operators of each module, and the items by layer and module."""
    tasks: dict[tuple[int, str], set[int]] = {}
    together: set[tuple[tuple[int, str], tuple[int, str]]] = set()  # the first is saved only with the second
    always: set[str] = set()
    for item, own in zip(operators.items, modules, strict=True):
        places = [(item.region, module) for module in sorted(own)]
        for place in places:
            tasks.setdefault(place, set()).update(item.tasks)
        together.update((one, other) for one in places for other in places)
        if item.always:
            always |= own
        for other in item.implies:
            together.update((place, (operators.items[other].region, m)) for place in places for m in modules[other])
    for place in list(tasks):
        region, module = place
        together.update((place, other) for other in tasks if other[0] == region and other[1].startswith(f"{module}."))
        together.update((place, other) for other in tasks if other[1] == module)  # of all layers, or of none
    always |= {
        module.removeprefix(f"{name}.") if module != name else ""
        for module in seen.changes
        for name in names
        if module == name or module.startswith(f"{name}.")
    }
    never = {module for region, module in tasks if not module or not seen.may_be_saved(f"{names[region]}.{module}")}
    _check_once(always, never, names)
    number = {place: i for i, place in enumerate(tasks)}
    items = [
        Item(
            region,
            tuple(sorted(own)),
            always=module in always,
            never=module in never,
            implies=tuple(sorted({number[b] for a, b in together if a == (region, module) and a != b and b in number})),
        )
        for (region, module), own in tasks.items()
    ]
    return replace(operators, items=tuple(_closed(items)), caches=False), number


def _check_once(always: set[str], never: set[str], names: Sequence[str]) -> None:
    wrong = sorted(always & never)
    if wrong:
        who = f"{names[0]}.{wrong[0]}" if wrong[0] else names[0]
        raise UsageError(
            f"{who} draws random numbers or changes buffers, which a recomputation would do twice, and it cannot be "
            "saved: it is a layer itself, or is called several times, or returns other things than tensors; move this "
            "into a submodule that is called once, or take --to sac"
        )


def _closed(items: Sequence[Item]) -> list[Item]:
    """The items with ``always`` carried along `Item.implies`."""
    saved = [i for i, item in enumerate(items) if item.always]
    pending = list(saved)
    while pending:
        for j in items[pending.pop()].implies:
            if j not in saved:
                saved.append(j)
                pending.append(j)
    return [replace(item, always=i in saved) for i, item in enumerate(items)]


def _saved_regions(
    step: StepOfRegions, named: Mapping[tuple[int, str], int], saved: Collection[int]
) -> Iterator[SavedRegion]:
    """Of the saved modules those that are in no other one, in the order in which a step comes to them."""
    chosen = {module for (_, module), i in named.items() if i in saved}
    outer = [m for m in chosen if not any(m.startswith(f"{other}.") for other in chosen)]
    again = [p for region in step.regions for p in region.tasks]
    kept = {p for i in saved for p in step.items[i].tasks}
    read = {v for p in again if p not in kept for v in step.program.tasks[p].reads}
    first: dict[str, int] = {}
    needed = set()
    for (_, module), i in named.items():
        owner = next((m for m in outer if module == m or module.startswith(f"{m}.")), None)
        if owner is None or i not in saved:
            continue
        first[owner] = min(first.get(owner, step.items[i].tasks[0]), step.items[i].tasks[0])
        if any(v in read for p in step.items[i].tasks for v in step.program.tasks[p].writes):
            needed.add(owner)
    for module in sorted(outer, key=first.__getitem__):
        yield SavedRegion(module, module in needed)
