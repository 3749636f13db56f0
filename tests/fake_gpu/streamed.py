"""Run on the fake GPU: streamed weights and offloaded activations under PyTorch's CUDA stream sanitizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from block_models import Decoder, loss_of, tokens
from streamed_models import adapted_decoder, adapted_layer, stream
from torch import nn
from torch.cuda._sanitizer import CUDASanitizerDispatchMode, TensorInfo
from torch.testing._internal.distributed.fake_pg import FakeStore

import monet_like
from monet_like.auto.block import blocks_of
from monet_like.errors import MonetError
from monet_like.runtime import frozen_weights, offload
from monet_like.runtime.streamed_weights import WeightStream

CUDA = torch.device("cuda", 0)
OPTIONS: dict[str, Any] = {"mode": "normal", "effort": "quick", "loss": loss_of, "blocks": "layers.*"}


@contextmanager
def watched() -> Iterator[list[str]]:
    """The races that the sanitizer finds meanwhile, in the order in which they are found.

    It goes by addresses, and here it remembers what was done at one also where memory was freed and is used again.
    """
    mode, found = CUDASanitizerDispatchMode(), []
    launch, accessed = mode.event_handler._handle_kernel_launch, mode.event_handler.tensors_accessed
    accessed.delete_tensor = lambda _: None  # type: ignore[method-assign]
    accessed.create_tensor = lambda at, trace: accessed.accesses.setdefault(at, TensorInfo(trace))  # type: ignore

    def noted(*what: Any) -> list[Any]:
        found.extend(map(str, launch(*what)))
        return []

    mode.event_handler._handle_kernel_launch = noted  # type: ignore[method-assign]
    with mode:
        yield found


def train(model: nn.Module, x: torch.Tensor) -> None:
    loss_of(model(x)).backward()
    model.zero_grad()


def no_wait(self: WeightStream) -> None:
    """The fault: a block does not wait for the copy of its weights."""
    fill = self._fill

    def without_event(slot: Any, block: int) -> Any:
        before = torch.cuda.current_stream(CUDA).record_event()
        fill(slot, block).filled = before
        return slot

    self._fill = without_event  # type: ignore[method-assign]


def too_early(of: int) -> Callable[[WeightStream], None]:
    """The fault: the slot of a block is given to another one when the block begins."""

    def plant(self: WeightStream) -> None:
        come, read, began = self._come, self._read, {}

        def noted(block: int, *what: Any) -> Any:
            slot = come(block, *what)
            began[id(slot)] = torch.cuda.current_stream(CUDA).record_event()
            return slot

        def early(slot: Any) -> None:
            read(slot)
            if slot.block == of:
                slot.read[torch.cuda.current_stream(CUDA)] = began[id(slot)]

        self._come, self._read = noted, early  # type: ignore[method-assign]

    return plant


FAULTS: dict[str, Callable[[WeightStream], None]] = {
    "none": lambda _: None, "no wait": no_wait, "the first": too_early(0), "the last": too_early(3),
}  # fmt: skip


def races(fault: str) -> dict[str, Any]:
    """Steps and a forward without gradients whose weights are streamed, with a fault."""
    model, x = adapted_decoder().to(CUDA), tokens(4, 8).to(CUDA)
    model = monet_like.auto_schedule(model, x, memory_budget="100%", **OPTIONS)
    made = stream(model)
    train(model, x)  # captures
    FAULTS[fault](made)
    with watched() as found:
        for _ in range(3):
            train(model, x)
        in_training = len(found)
        with torch.no_grad():
            model.eval()(x)
    return {"races": len(found), "in training": in_training, "first": found[0][:500] if found else ""}


def two_streams(fault: str) -> dict[str, Any]:
    """Two calls of a block at once, each on a stream of its own, and then calls that take its place.

    Args:
        fault: ``no wait``: the second does not wait for the copy; ``forgotten``: nobody waits for the second;
            or ``none``.
    """
    model, x = adapted_decoder().to(CUDA), tokens(4, 8).to(CUDA)
    made = stream(monet_like.auto_schedule(model, x, memory_budget="100%", **OPTIONS))
    other, read, wait = torch.cuda.Stream(CUDA), made._read, torch.cuda.Stream.wait_event

    def compute() -> None:
        for weight in made.weights[0]:
            weight.tensors[0].sum()

    def forgetting(slot: Any) -> None:
        if fault != "forgotten" or torch.cuda.current_stream(CUDA) != other:
            read(slot)

    def may_wait(at: Any, event: Any) -> None:
        if fault != "no wait" or at != other:
            wait(at, event)

    made._read = forgetting  # type: ignore[method-assign]
    torch.cuda.Stream.wait_event = may_wait  # type: ignore[method-assign]
    with watched() as found:
        with made.there(0, "forward"):
            with torch.cuda.stream(other):
                second = made.there(0, "forward")
                second.__enter__()
                compute()
            compute()
        with torch.cuda.stream(other):
            second.__exit__(None, None, None)
        for block in (1, 2, 3):
            with made.there(block, "forward"):
                pass
    return {"races": len(found), "first": found[0][:500] if found else ""}


def weights(share: str) -> dict[str, Any]:
    """A plan that streams: what it predicts, and what the allocator sees."""
    model, x = adapted_decoder(6).to(CUDA), tokens(2, 8).to(CUDA)
    own = sum(p.nbytes for p in model.parameters())
    model = monet_like.auto_schedule(model, x, memory_budget=share, weights="auto", **OPTIONS)
    plan = monet_like.block_plan(model)
    assert plan is not None
    train(model, x)
    torch.cuda.reset_peak_memory_stats(CUDA)
    segments = len(torch.cuda.memory_snapshot())
    for _ in range(3):
        train(model, x)
    streams = [block._streamed.stream for block in blocks_of(model) if block._streamed]
    idle = [t for b in blocks_of(model) if b._streamed for w in b._streamed.weights for t in w.tensors]
    return {
        "own": own,
        "streamed": sum(point.ahead > 0 for point in plan.points),
        "peak": torch.cuda.max_memory_allocated(CUDA),
        "predicted": plan.peak_bytes,
        "pinned": bool(idle) and all(t.is_pinned() for t in idle),
        "ring": streams[0].ring_bytes if streams else 0,
        "grown": len(torch.cuda.memory_snapshot()) - segments,
        "device": str(next(iter(model.to(CUDA).parameters())).device),
    }


def larger(how: str) -> dict[str, Any]:
    """A model whose layers are on the host and never whole on the device: planned, trained, evaluated, taken apart.

    Args:
        how: a budget and, after a comma, when the model's other parts come to the device: "before" it is given to
            auto_schedule, or "after" that, as the Trainer does it; or then from float64.
    """
    budget, when = how.split(", ")
    torch.manual_seed(0)
    model, x = Decoder(adapted_layer, 6, width=256), tokens(1, 4).to(CUDA)
    model.embedding.requires_grad_(False)
    own = sum(p.nbytes for p in model.parameters())
    if when == "before":
        for part in (model.embedding, model.norm, model.head):
            part.to(CUDA)
    torch.cuda.reset_peak_memory_stats(CUDA)
    if when == "from float64":
        model.double()
    model = monet_like.auto_schedule(model, memory_budget=budget, weights="auto", **OPTIONS)
    model.to(CUDA, torch.float32)
    with torch.no_grad():
        model.eval()(x)
    model.train()
    for _ in range(3):
        train(model, x)
    plan = monet_like.block_plan(model)
    assert plan is not None
    trained = {p.device.type for p in model.parameters() if p.requires_grad}
    most = torch.cuda.max_memory_allocated(CUDA)
    torch.cuda.reset_peak_memory_stats(CUDA)
    train(model, x)
    layers = monet_like.unwrap(model).layers
    return {
        "own": own,
        "most": most,
        "peak": torch.cuda.max_memory_allocated(CUDA),
        "predicted": plan.peak_bytes,
        "streamed": sum(point.ahead > 0 for point in plan.points),
        "trained on": sorted(trained),
        "afterwards": [
            (layer.qkv.base.weight.device.type, point.ahead) for layer, point in zip(layers, plan.points, strict=True)
        ],
    }


def no_room(_: str) -> dict[str, Any]:
    """A model on the host is given another dtype on its way, for which the host has no room."""
    model = Decoder(adapted_layer, 6, width=256).half()
    model.embedding.requires_grad_(False)
    model = monet_like.auto_schedule(model, memory_budget="14 MB", weights="auto", **OPTIONS)
    needed = sum(p.nbytes for p in model.layers.parameters() if not p.requires_grad)
    frozen_weights.available_bytes = lambda: needed
    said = ""
    try:
        model.to(CUDA, torch.float32)
    except MonetError as error:
        said = str(error)
    found = {"said": said, "are": sorted({f"{p.dtype} {p.device.type}" for p in model.parameters()})}
    model.to(CUDA)
    return found | {"then": sorted({f"{p.dtype} {p.device.type}" for p in model.parameters() if p.requires_grad})}


def replicated(budget: str) -> dict[str, Any]:
    """As `larger`, in `DistributedDataParallel`: one of two processes; the other one says what this one says."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    dist.all_gather_object = lambda every, mine: every.__setitem__(slice(None), [mine] * 2)
    model, x = Decoder(adapted_layer, 6, width=256), tokens(1, 4).to(CUDA)
    for part in (model.embedding.requires_grad_(False), model.norm, model.head):
        part.to(CUDA)
    model = monet_like.auto_schedule(model, memory_budget=budget, weights="auto", **OPTIONS)
    on_host = [name for name, parameter in model.named_parameters() if parameter.device.type == "cpu"]
    left_alone = list(model._ddp_params_and_buffers_to_ignore)
    wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[0])

    def sent(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        found: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[CUDA])
        found.set_result(bucket.buffer())
        return found

    wrapped.register_comm_hook(None, lambda _, bucket: sent(bucket))
    for _ in range(2):
        train(wrapped, x)
    plan = monet_like.block_plan(model)
    assert plan is not None
    return {
        "on the host": on_host, "left alone": left_alone, "streamed": sum(point.ahead > 0 for point in plan.points)
    }  # fmt: skip


def watch_waits(fault: str, step: Callable[[], None]) -> None:
    """Let memory that was copied to the host be written to right after the wait for the copy, as its next owner does.

    Args:
        fault: ``no wait``: there is none for any copy; ``out first``, ``out last``, ``back first``, ``back last``: none
            for that copy of a step.
        step: says how many copies there are.
    """
    wait, copy, sources = offload._wait, offload._copy_beside, {}
    seen: dict[str, int] = {"out": 0, "back": 0}
    counts = dict(seen)

    def noted(to: torch.Tensor, source: torch.Tensor, *more: Any) -> Any:
        sources[to.data_ptr()] = source
        return copy(to, source, *more)

    def may_wait(tensor: Any, device: torch.device) -> None:
        way = "out" if tensor.device.type == "cpu" else "back"
        place, count = seen[way] % max(counts[way], 1), counts[way]
        seen[way] += 1
        faulty = ("no wait", f"{way} first" * (place == 0), f"{way} last" * (place == count - 1))
        if not count or fault not in faulty:
            wait(tensor, device)
        source = sources.pop(tensor.data_ptr())
        if way == "out":
            source.data.zero_()  # counts no version, which autograd would look at

    offload._wait, offload._copy_beside = may_wait, noted
    step()
    counts |= seen
    assert min(counts.values()) > 1


def offloaded(fault: str) -> dict[str, Any]:
    """Steps whose activations are copied to the host and back, with a fault of `watch_waits` or ``none``."""
    model, x = Decoder(blocks=3).to(CUDA), tokens(16, 32).to(CUDA)
    options = {**OPTIONS, "mode": "normal_offload"}
    model = monet_like.auto_schedule(model, x, memory_budget="85%", **options)
    train(model, x)
    watch_waits(fault, lambda: train(model, x))
    with watched() as found:
        for _ in range(2):
            train(model, x)
    return {"races": len(found), "first": found[0][:500] if found else ""}


def offloading_blocks(fault: str) -> dict[str, Any]:
    """Steps of a decoder whose blocks offload what they carry, with a fault of `watch_waits` or ``none``."""
    model, x = Decoder(blocks=12, width=64).to(CUDA), tokens(12, 64).to(CUDA)  # sizes in several parts
    options = {name: value for name, value in OPTIONS.items() if name != "mode"}
    model = monet_like.auto_schedule(model, x, memory_budget="50%", exact=True, **options)
    plan = monet_like.block_plan(model)
    assert plan is not None
    train(model, x)
    torch.cuda.synchronize()
    torch.empty(1, pin_memory=True)  # what was freed is given back when the next block is asked for
    torch.cuda.reset_peak_host_memory_stats()
    torch.cuda.reset_peak_memory_stats(CUDA)
    for _ in range(2):  # nobody waits for them
        train(model, x)
    pinned = torch.cuda.host_memory_stats()["active_bytes.peak"]
    peak = torch.cuda.max_memory_allocated(CUDA)
    watch_waits(fault, lambda: train(model, x))
    with watched() as found:
        for _ in range(2):
            train(model, x)
    return {
        "races": len(found),
        "first": found[0][:500] if found else "",
        "offloaded": [point.offloaded_bytes for point in plan.points],
        "pinned": pinned,
        "peak": peak,
        "predicted": plan.peak_bytes,
        "plain": plan.plain_peak_bytes,
    }
