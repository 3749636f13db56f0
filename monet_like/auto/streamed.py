"""Plans which blocks' frozen weights lie on the host and are streamed, and moves them."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..capture.captured import allocated_bytes
from ..capture.checks import is_sharded
from ..capture.example_inputs import device_of
from ..capture.quantised import is_quantised
from ..errors import UsageError
from ..ir.step import Point, Step, Streaming, Visit, slots_of
from ..ir.units import format_bytes
from ..profile.rates import host_rate
from ..replay.kept_steps import tensor_slots
from ..runtime.frozen_weights import Weight, check_host, frozen_weights, host_bytes, more_on_host, move_rest, slot_bytes
from ..runtime.streamed_block import Streamed
from ..runtime.streamed_weights import WeightStream
from .agreement import Sharing, all_do, gathered, processes
from .block import BlockSchedule, blocks_of
from .planning import Settings
from .rehearsal.memory import Blocks


def check_streams(model: nn.Module, settings: Settings) -> None:
    """Refuse to stream weights of which each process has a shard."""
    if settings.weights != "device" and any(map(is_sharded, model.modules())):
        raise UsageError(
            f"weights='auto' streams weights that are whole in each process, and {type(model).__name__} is sharded by "
            "fully_shard; leave weights out there, and let fully_shard move its shards (CPUOffloadPolicy), or train "
            "with DistributedDataParallel, where every process streams its own copy"
        )


def frozen_layers(model: nn.Module) -> list[nn.Module]:
    """The outermost layers of the model, in lists of two or more of one class, that have frozen weights."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        layers = list(module.children())
        if module in inside or not isinstance(module, nn.ModuleList | nn.Sequential) or len(set(layers)) < 2:
            continue
        own = [weight for weights in frozen_weights(model, layers) for weight in weights]
        if len({type(layer) for layer in layers}) == 1 and own:
            found += layers
            inside.update(part for layer in layers for part in layer.modules())
    if not found:
        raise UsageError(
            f"weights='auto' streams frozen weights of layers, one after the other, and {type(model).__name__} has no "
            "list of equal layers with frozen weights; name them (blocks=), train an adapter (LoRA) on frozen weights, "
            "or take an optimizer with a smaller state (8 bits), or one that steps in the backward"
        )
    return found


def streaming_of(of: Blocks, settings: Settings) -> Streaming | None:
    """What the planner has to know of the blocks' frozen weights; None: they stay on the device."""
    check_streams(of.model, settings)
    if settings.weights == "device":
        return None
    device, found = device_of(of.model), _weights_of(of)
    sizes = tuple(map(slot_bytes, found))
    freed = tuple(sum(allocated_bytes(weight.bytes, device) for weight in own) for own in found)
    rate = min(gathered(host_rate(device) if any(sizes) else 1.0, settings.sharing))
    given = [0 if _is_provisional(block) else _ahead(block) for block in of.blocks]
    return Streaming(sizes, freed, tuple(size / rate for size in sizes), tuple(given) if any(given) else None)


def _ahead(block: BlockSchedule) -> int:
    return block._streamed.stream.ahead if block._streamed is not None and block._streamed.weights else 0


def _is_provisional(block: BlockSchedule) -> bool:
    """Whether a block's weights were on the host before there was a plan."""
    return block._streamed is not None and block._streamed.stream.provisional


def _weights_of(of: Blocks) -> list[list[Weight]]:
    """By block the frozen weights that its program reads: an adapter that is not in use may be trained next."""
    found = []
    for block, own in zip(of.blocks, frozen_weights(of.model, [block._model for block in of.blocks]), strict=True):
        if block._streamed is not None and block._streamed.weights:
            if not _is_provisional(block):
                found.append(block._streamed.weights)
                continue
            own = block._streamed.weights
        call = block._block_call
        if call is None:  # nothing in it has a gradient: plain PyTorch runs it
            found.append([])
            continue
        read = {id(owner[name]) for owner, name in tensor_slots(block._model, call.captured, "_parameters")}
        read |= set(map(id, call.captured.constants.tensors.values()))
        found.append([w for w in own if read & {id(w.owner), *map(id, w.tensors)}])
    return found


def stream(of: Blocks, step: Step, points: Sequence[Point], sharing: Sharing) -> None:
    """Move the weights of blocks to the host that a plan streams, and all others to the device, unless an earlier plan
    has done so.

    Raises:
        MonetError: the host has no room for them.
        UsageError: processes that have one plan have other weights.
    """
    if step.streaming is None:
        return
    given = step.streaming.given is not None
    weights = {number: own for number, own in enumerate(_weights_of(of)) if points[number].ahead and not given}
    made = next((block._streamed.stream for block in of.blocks if block._streamed is not None), None)
    if made is None and weights:
        made = WeightStream(device_of(of.model))
    _check_together(made, weights, sharing)
    if made is None or given:
        return
    made.keep(weights)
    made.arrange(step.visits, slots_of(step, points), max(point.ahead for point in points))
    for number, block in enumerate(of.blocks):
        block._streamed = Streamed(made, number) if number in weights else None
    _leave_alone(of.model, made, sharing)


def _check_together(made: WeightStream | None, weights: Mapping[int, Sequence[Weight]], sharing: Sharing) -> None:
    """Check that the host has room for the weights of all processes on it, and that processes with one plan have the
    same weights, because `NotSent` are those that are streamed.
    """
    _check_room(made.more_on_host(weights) if made else 0, made.device if made else None, sharing)
    if processes() == 1 or sharing != "same":
        return
    named = [weight for own in {**(made.weights if made else {}), **weights}.values() for weight in own]
    sums = gathered([weight.sum() for weight in named], sharing)
    for rank, theirs in enumerate(sums):
        for weight, first, other in zip(named, sums[0], theirs, strict=True):
            if first != other:
                raise UsageError(
                    f"the frozen weight {weight.name} of {weight.bytes} bytes is another one in rank 0 than in rank "
                    f"{rank}, and DistributedDataParallel does not send weights that are streamed; load the same in "
                    "every process, or give auto_schedule same_plan=False"
                )


def _check_room(wanted: int, device: torch.device | None, sharing: Sharing) -> None:
    """Check that the host has room for so many bytes of this process and for those of the others on it."""
    every = gathered([platform.node(), wanted], "alone" if sharing == "alone" else "same")
    here = [count for host, count in every if host == platform.node()]
    all_do(lambda: check_host(sum(here), device, len(here)) if device else None, sharing)


class NotSent:
    """Names of streamed parameters, where `DistributedDataParallel` looks for what it leaves alone: it sends all else
    to all processes, from device to device.

    Args:
        own: names that the model has there itself.
    """

    def __init__(self, model: nn.Module, stream: WeightStream, own: Iterable[str]) -> None:
        self.model, self.stream, self.own = model, stream, tuple(own)

    def __iter__(self) -> Iterator[str]:
        mine = {id(weight.owner) for own in self.stream.weights.values() for weight in own}
        yield from self.own
        yield from (n for n, p in self.model.named_parameters() if id(p) in mine and not p.requires_grad)


class CheckedFirst:
    """The ``_apply`` of a module, for ``to``, ``half`` and others, that asks all blocks within it before it changes
    anything; and leaves their frozen weights on the host when they would leave it the first time.

    Args:
        model: that the module is, or is a part of.
    """

    def __init__(self, module: nn.Module, model: nn.Module, sharing: Sharing) -> None:
        self.module, self.model, self.sharing = module, model, sharing

    def __call__(self, change: Any, *options: Any, **named: Any) -> nn.Module:
        of_class = type(self.module)._apply
        blocks = [block for block in self.module.modules() if isinstance(block, BlockSchedule)]
        there = change(torch.empty(0, device="cpu")).device
        if there.type not in _HOST and not any(block._streamed or block.record for block in blocks):
            dtypes = {tensor.dtype for tensor in (*self.module.parameters(), *self.module.buffers())}
            becomes = {dtype: change(torch.empty(0, dtype=dtype, device="cpu")).dtype for dtype in dtypes}
            if any(dtype != other for dtype, other in becomes.items()):
                now = [weight for own in _on_host(self.model, blocks_of(self.model)).values() for weight in own]
                after = [_as(weight, becomes) for weight in now]
                grown = sum(weight.bytes for weight in after) - sum(weight.bytes for weight in now)
                _check_room(max(0, grown) + more_on_host(after, there), there, self.sharing)
                of_class(self.module, lambda tensor: tensor.to(becomes.get(tensor.dtype, tensor.dtype)))
            stream_from_host(self.model, blocks_of(self.model), self.sharing, there)
        for block in blocks:
            if block._streamed is not None:
                block._streamed.check_change(change, block._block_name)
        return of_class(self.module, change, *options, **named)


def _leave_alone(model: nn.Module, made: WeightStream, sharing: Sharing) -> None:
    """Have `DistributedDataParallel` leave streamed weights alone that are the same in all processes."""
    own = getattr(model, _NOT_SENT, ())
    if processes() > 1 and sharing == "same" and not isinstance(own, NotSent):
        model.__dict__[_NOT_SENT] = NotSent(model, made, own)


def _around(model: nn.Module, blocks: Sequence[BlockSchedule]) -> list[nn.Module]:
    """The modules that have a block in them."""
    mine = set(blocks)
    return [module for module in model.modules() if module not in mine and not mine.isdisjoint(module.modules())]


#: Devices whose tensors take no memory of a GPU.
_HOST = ("cpu", "meta")
#: Where `DistributedDataParallel` looks.
_NOT_SENT = "_ddp_params_and_buffers_to_ignore"


def may_stream(model: nn.Module, blocks: Sequence[BlockSchedule], sharing: Sharing) -> None:
    """Have the frozen weights of blocks stay on the host that are there, until a plan says which are streamed: now, if
    the model's other parts are on a device, and else when the model is moved to one.
    """
    for module in _around(model, blocks):
        module.__dict__["_apply"] = CheckedFirst(module, model, sharing)
    inside = {id(tensor) for block in blocks for tensor in (*block.parameters(), *block.buffers())}
    rest = (tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in inside)
    if (device := next((tensor.device for tensor in rest if tensor.device.type not in _HOST), None)) is not None:
        stream_from_host(model, blocks, sharing, device)


def stream_from_host(model: nn.Module, blocks: Sequence[BlockSchedule], sharing: Sharing, device: torch.device) -> None:
    """Stream the frozen weights of blocks that are on the host, until a plan says which are; all else of these blocks
    goes to the device.

    So a model that is larger than the device is never whole on it. Weights that bitsandbytes quantises on their way to
    the device are not streamed before a plan.
    """
    weights = _on_host(model, blocks)
    if not weights:
        return
    made = WeightStream(device)
    _check_together(made, weights, sharing)
    made.keep(weights)
    made.provisional = True
    order: list[Visit] = [(number, "forward") for number in range(len(blocks))]
    order += [(number, "backward") for number in reversed(range(len(blocks)))]
    made.arrange(order, 2, 1)
    for number in weights:
        blocks[number]._streamed = Streamed(made, number)
        move_rest(blocks[number]._model, weights[number], device)
    _leave_alone(model, made, sharing)


def _on_host(model: nn.Module, blocks: Sequence[BlockSchedule]) -> dict[int, list[Weight]]:
    """The frozen weights of blocks that are on the host, by block; none while some are to be quantised on their way."""
    if not is_quantised(model):
        return {}
    found = frozen_weights(model, [block._model for block in blocks])
    on_host = ([w for w in own if w.tensors[0].device.type == "cpu"] for own in found)
    return {number: own for number, own in enumerate(on_host) if own}


def _as(weight: Weight, becomes: Mapping[torch.dtype, torch.dtype]) -> Weight:
    """A weight of as many bytes as after a change of dtype."""
    dtype = weight.tensors[0].dtype
    return replace(weight, bytes=weight.bytes * becomes.get(dtype, dtype).itemsize // dtype.itemsize)


def unstream(model: nn.Module, blocks: Sequence[BlockSchedule]) -> None:
    """Put streamed weights where they were before."""
    for module in _around(model, blocks):
        module.__dict__.pop("_apply", None)
    if isinstance(before := getattr(model, _NOT_SENT, None), NotSent):
        del model.__dict__[_NOT_SENT]
        if before.own:
            model.__dict__[_NOT_SENT] = before.own
    for block in blocks:
        if block._streamed is not None:
            block._streamed.release(given=True)
            block._streamed = None


def in_words(of: Blocks) -> str:
    """What of a plan is streamed, for people; "": nothing."""
    streamed = [block for block in of.blocks if _ahead(block)]
    if not streamed:
        return ""
    found = streamed[0]._streamed
    assert found is not None
    return (
        f"; frozen weights of {len(streamed)} blocks on the host ({format_bytes(found.stream.host_bytes)}), streamed "
        f"through {format_bytes(found.stream.ring_bytes)} of the device"
    )


def why_not_more(of: Blocks, streaming: Streaming | None) -> str:
    """What else helps where no schedules fit, for people."""
    device = device_of(of.model)
    if streaming is None:
        own = [w for block in frozen_weights(of.model, [block._model for block in of.blocks]) for w in block]
        size = sum(host_bytes(weight.bytes, device) for weight in own)
        return f"; or give weights='auto': {format_bytes(size)} of frozen weights may lie on the host" if size else ""
    if any(streaming.bytes):
        return ""
    return (
        "; weights='auto' streams frozen weights alone, and the blocks have none: a weight that is trained stays on "
        "the device. Train an adapter (LoRA) on frozen weights, or take an optimizer with a smaller state "
        "(8 bits), or one that steps in the backward"
    )
