"""Schedules for blocks of a model under one memory budget: finds the blocks, wraps them, and plans at the
first call.
"""

from __future__ import annotations

import fnmatch
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..capture.checks import check_initialized, check_unscripted, is_sharded
from ..capture.example_inputs import Example, is_for_shapes
from ..capture.trace.alone import CAPTURING, is_observed
from ..capture.trees import tensors_of
from ..errors import UsageError, warn_caller
from ..replay.checks.one_pass import apart
from ..replay.stand_in import caching_config
from ..replay.wrapper import ScheduleWrapper
from .block import BlockSchedule, blocks_of
from .block_calls import CallPlans, plans_of
from .block_plan import plan_blocks
from .found_parts import find_parts, in_words
from .planning import Settings
from .promise import BlockPlan
from .rehearsal.memory import Blocks, NoBlockCalled, WholeStep
from .shared_captures import SharedCaptures
from .streamed import check_streams, frozen_layers, may_stream, unstream

#: How blocks are named: modules of the model, or patterns of their names.
BlockNames = Iterable[nn.Module] | str | Sequence[str]


class ContainerSchedule(BlockSchedule):
    """A block that the code around it may also count, index and go through, such as a `torch.nn.Sequential`."""

    def __len__(self) -> int:
        return len(self._model)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._model)  # type: ignore[call-overload]

    def __getitem__(self, place: Any) -> Any:
        return self._model[place]  # type: ignore[index]


def schedule_blocks(
    model: nn.Module, args: Any, kwargs: Mapping[str, Any] | None, blocks: BlockNames | None, settings: Settings
) -> nn.Module:
    """Give every block of ``model`` a schedule of its own; see `monet_like.auto_schedule`.

    Args:
        blocks: None: the layers that have frozen weights.

    Returns:
        The model itself. With example inputs the schedules are planned now, else at the first training call.

    Raises:
        UsageError: the blocks are wrong or scripted, a module is lazy, the model is in eval mode, or gives its layers a
            cache.
    """
    check_initialized(model, planned=True)
    found = find_blocks(model, frozen_layers(model) if blocks is None else blocks)
    for name, block in found.items():
        check_unscripted(block, name)
    _check_unsharded(model, found)
    check_streams(model, settings)
    if config := caching_config(model):
        raise UsageError(
            f"{type(model).__name__} gives its layers a cache of keys and values also in training, which is another "
            f"object in every step; set model.{config}.use_cache = False (generate takes use_cache=True)"
        )
    if (args is not None or kwargs is not None) and not model.training:
        raise UsageError("the model is in eval mode; call model.train() before auto_schedule")
    _wrap(model, found, settings, SharedCaptures())
    if args is not None or kwargs is not None:
        given = args if isinstance(args, tuple) else () if args is None else (args,)
        _plan_now(model, (given, dict(kwargs or {})))
    else:
        _plan_when_called(model)
    return model


def schedule_parts(model: nn.Module, example: Example, settings: Settings, why: str) -> Sequence[str]:
    """Give schedules to the largest parts of ``model`` that can be captured, planned for this call of it.

    Args:
        why: the model as a whole has none.

    Returns:
        The parts' names; none if no part can be captured.

    Raises:
        InfeasibleError: no schedules fit; says what would.
        Exception: what the model raises.
    """
    shared = SharedCaptures()
    found, sharing = find_parts(model, example, settings.mode, shared, settings.sharing)
    if found:
        told = f"; planned: {in_words(model, found)}; all else runs as it is, because {why}"
        _wrap(model, found, replace(settings, told=told, sharing=sharing), shared)
        _plan_now(model, example)
    return tuple(found)


def _wrap(model: nn.Module, found: Mapping[str, nn.Module], settings: Settings, shared: SharedCaptures) -> None:
    wrapped: dict[nn.Module, BlockSchedule] = {}
    for name, block in found.items():
        kind = ContainerSchedule if hasattr(type(block), "__getitem__") else BlockSchedule
        wrapped[block] = kind(block, name, settings.mode, settings.backend, shared)
        wrapped[block]._block_settings = settings
    _replace(model, wrapped)
    if settings.weights != "device":
        may_stream(model, list(wrapped.values()), settings.sharing)
    model.register_forward_pre_hook(CallPlans(settings), prepend=True, with_kwargs=True)


def _plan_now(model: nn.Module, example: Example) -> None:
    try:
        _plans(model).plan(model, example)
    except BaseException:
        _take_off(model)  # the model is as it was given
        raise


def find_blocks(model: nn.Module, blocks: BlockNames) -> dict[str, nn.Module]:
    """The blocks by their first names in the model, in the model's order.

    Args:
        blocks: modules of the model, or a pattern of names (`fnmatch`) such as ``"layers.*"``, or several. ``*`` does
            not match a dot, so that ``layers.*`` are the layers and not their parts.

    Raises:
        UsageError: no module is meant, one is not in the model, is the model itself, stands in another one, or is a
            block already.
    """
    named = dict(model.named_modules())
    if isinstance(blocks, nn.Module) and not isinstance(blocks, nn.ModuleList | nn.Sequential):
        blocks = [blocks]
    wanted = (
        [blocks] if isinstance(blocks, str) else list(blocks.values() if isinstance(blocks, nn.ModuleDict) else blocks)
    )
    names = {module: name for name, module in reversed(named.items())}
    meant: set[str] = set()
    for block in wanted:
        if isinstance(block, str):
            matched = {name for name in named if name and _matches(name, block)}
            if not matched:
                raise UsageError(
                    f"no module of {type(model).__name__} has a name like {block!r}; its parts are "
                    f"{', '.join(name for name, _ in model.named_children()) or 'none'}"
                )
            meant |= matched
        elif block in names:
            meant.add(names[block])
        else:
            raise UsageError(
                f"a {type(block).__name__} was given as a block, which is no part of {type(model).__name__}"
            )
    if not meant:
        raise UsageError("blocks has no module; give modules of the model, such as model.layers, or a pattern of names")
    found = {name: module for name, module in named.items() if name in meant}
    if isinstance(model, ScheduleWrapper):
        raise UsageError(
            "the model has a schedule already, which its blocks would take no part in; take it off first: "
            "monet_like.unwrap(model)"
        )
    _check_apart(found, type(model).__name__)
    return found


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _check_apart(found: Mapping[str, nn.Module], model: str) -> None:
    """Refuse blocks in one another, the model itself, and modules that have schedules."""
    if "" in found:
        raise UsageError(
            f"the {model} itself was given as a block; leave blocks out, and the whole model gets one schedule"
        )
    inner = {id(part): name for name, block in found.items() for part in block.modules() if part is not block}
    for name, block in found.items():
        if id(block) in inner:
            raise UsageError(
                f"{name} stands in {inner[id(block)]}, and both were given as blocks; give only one of them"
            )
        if scheduled := next((m for m in block.modules() if isinstance(m, ScheduleWrapper)), None):
            what = "has a schedule already" if scheduled is block else "has a part with a schedule"
            raise UsageError(f"{name} {what}; take the schedules off first (monet_like.unwrap)")


def _check_unsharded(model: nn.Module, found: Mapping[str, nn.Module]) -> None:
    for name, block in found.items():
        if not any(hasattr(parameter, "device_mesh") for parameter in block.parameters()):
            continue
        if any(map(is_sharded, model.modules())):
            raise UsageError(
                f"{name} is sharded already; call auto_schedule first, without example inputs, and then fully_shard on "
                "its blocks and on the model"
            )
        raise UsageError(
            f"{name} has parameters that are split among processes (DTensor, tensor parallelism), and a schedule holds "
            "only one process's own operators; give blocks= the parts that are not split, or shard by fully_shard "
            "after auto_schedule"
        )


def _replace(model: nn.Module, by: Mapping[Any, nn.Module]) -> None:
    """Replace modules wherever the model has them."""
    for module in list(model.modules()):
        if module in by:
            continue
        for name, part in list(module._modules.items()):
            if part in by:
                module._modules[name] = by[part]


def unwrap(model: nn.Module) -> nn.Module:
    """Take the schedules off a model that `auto_schedule` was given, or off its blocks.

    Args:
        model: what `auto_schedule` has returned, or a `ScheduleWrapper`.

    Returns:
        The plain model, with the present parameters and buffers; streamed weights are where they were before.

    Raises:
        UsageError: the blocks are sharded by ``fully_shard``, which keeps them.
    """
    if isinstance(model, ScheduleWrapper) and not isinstance(model, BlockSchedule):
        model = model._model
        if not blocks_of(model):
            return model
    if any(is_sharded(part) for block in blocks_of(model) for part in block.modules()):
        raise UsageError("the model's blocks are sharded by fully_shard; unwrap the model before, or build it anew")
    return _take_off(model)


def _take_off(model: nn.Module) -> nn.Module:
    """Take the schedules off a model's blocks."""
    blocks = blocks_of(model)
    unstream(model, blocks)
    _replace(model, {block: block._model for block in blocks})
    for module in model.modules():
        for number in [number for number, hook in module._forward_pre_hooks.items() if isinstance(hook, CallPlans)]:
            del module._forward_pre_hooks[number], module._forward_pre_hooks_with_kwargs[number]
    model._compiled_call_impl = None
    return model


def _plans(model: nn.Module) -> CallPlans:
    found = plans_of(model)
    assert found is not None
    return found


def block_plan(model: nn.Module) -> BlockPlan | None:
    """What the schedules of a model's blocks promise for the whole step; None before they are planned.

    Raises:
        UsageError: the model has no such blocks.
    """
    plan: BlockPlan | None = _blocks(model)[0]._block_plan
    return plan


def _blocks(model: nn.Module) -> tuple[BlockSchedule, ...]:
    if not (blocks := tuple(blocks_of(model))):
        raise UsageError(f"{type(model).__name__} has no blocks with schedules; give auto_schedule blocks=")
    return blocks


def plan_step(model: nn.Module, step: Callable[..., Any], *args: Any, **kwargs: Any) -> BlockPlan:
    """Plan the blocks of ``model`` for a training step that is more than one call of the model and its backward.

    The step is rehearsed as it is. Each call of a block whose forward has ended and whose backward has not carries what
    its schedule keeps, so that all micro-batches in flight count. Everything that can be reached from the model and
    the step is afterwards what it was; gradients that exist already count, and are added to.

    Args:
        model: what `auto_schedule` returned with ``blocks`` and without example inputs; in training mode. For a
            pipeline: the stage's module, or a `torch.nn.ModuleList` of several stages' modules.
        step: runs all forwards and backwards between two steps of the optimizer, and not the optimizer: the method
            ``step`` of a schedule of `torch.distributed.pipelining`, or a function with a loop over micro-steps. It is
            called three to seven times.
        args, kwargs: what ``step`` is called with.

    Returns:
        What the schedules promise for this process. In a pipeline (``same_plan=False``) each process has a plan of its
        own, all must call this, and an error of one is raised in all.

    Raises:
        UsageError: the model has no such blocks, or is in eval mode; the pipeline's schedule computes gradients of
            inputs and of parameters apart.
        InfeasibleError: no schedules fit; says what would.
        CaptureError: a block cannot be captured.
    """
    blocks = _blocks(model)
    if not model.training:
        raise UsageError("the model is in eval mode; call model.train() before plan_step")
    _check_whole_backward(step)
    settings = blocks[0]._block_settings
    if settings.sharing == "alone":
        settings = replace(settings, sharing="own")
    plan_no_more(model)
    if plans := plans_of(model):
        plans.plans.clear()  # they are for calls, this one is for a step
    return plan_blocks(Blocks(model, blocks), WholeStep(step, (args, kwargs), given=True), settings)


def _check_whole_backward(step: Callable[..., Any]) -> None:
    """Refuse a pipeline whose schedule has actions ``I`` and ``W``, before any process waits for another.

    A function that calls the schedule hides it: then the rehearsal notices (`monet_like.auto.rehearsal.stand_ins`).
    """
    schedule = getattr(step, "__self__", None)
    orders = getattr(schedule, "pipeline_order", None) or {}
    actions = [action for order in orders.values() for action in order if action]
    actions += [part for action in actions for part in getattr(action, "sub_actions", None) or ()]
    if any(action.computation_type.value in ("I", "W") for action in actions):
        raise apart(type(schedule).__name__)


#: The calls that models would have which plan at their first training call (`_plan_when_called`).
_waiting: weakref.WeakKeyDictionary[nn.Module, Callable[..., Any] | None] = weakref.WeakKeyDictionary()


def plan_no_more(model: nn.Module) -> None:
    """Let the model's next training call plan nothing."""
    if model in _waiting:
        model._compiled_call_impl = _waiting.pop(model)


def _plan_when_called(model: nn.Module) -> None:
    """Have the model plan when it is called in training mode for the first time.

    A hook would run after those of ``fully_shard``, in the middle of its step. `torch.nn.Module.compile` shows another
    place, before all hooks.
    """
    here = weakref.ref(model)
    before: Callable[..., Any] | None = model._compiled_call_impl
    _waiting[model] = before

    def first(module: Any, args: Any, kwargs: Any) -> None:
        module._compiled_call_impl = before
        try:
            _plans(module).plan(module, (args, kwargs))
            _waiting.pop(module, None)
        except NoBlockCalled as error:  # it needs no plan
            module._compiled_call_impl = planned_first
            warn_caller(f"nothing is planned for this call, but for the next one: {error}")
        except BaseException:
            module._compiled_call_impl = planned_first
            raise

    def call(*args: Any, **kwargs: Any) -> Any:
        module: Any = here()
        trains = module.training and torch.is_grad_enabled() and not is_observed()
        if trains and not is_for_shapes(tensors_of((args, kwargs))):
            _check_not_in_pipeline(type(module).__name__)
            with CAPTURING:
                if module in _waiting:  # or else another thread has planned
                    first(module, args, kwargs)
        return (before or module._call_impl)(*args, **kwargs)

    planned_first = torch.compiler.disable(call, reason="monet_like plans the schedules of blocks here")
    model._compiled_call_impl = planned_first


def _check_not_in_pipeline(model: str) -> None:
    """Refuse to plan inside a step of a pipeline, where other stages wait and the backward is not the model's own."""
    frame = sys._getframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("torch.distributed.pipelining"):
            raise UsageError(
                f"{model} is a stage of a pipeline and has no schedules yet, and its first call cannot plan: a step "
                "has several micro-batches, and needs the other stages; call monet_like.plan_step(model, "
                "schedule.step, ...) in every process before the first step, with the arguments of schedule.step"
            )
        frame = frame.f_back  # type: ignore[assignment]
