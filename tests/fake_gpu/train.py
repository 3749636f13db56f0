"""Run on the fake GPU: models captured, profiled, planned and blocks, and what the allocator saw of it.

``python train.py WHAT:CASE...`` prints one line of JSON for each: a function of `WHAT` about a case of `CASES`. Without
arguments it serves: see `serve`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import math
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import convolutions
import streamed
import torch
import torchvision
from block_models import plan_briefly
from rehearsals import REHEARSALS
from torch import nn

import monet_like
from monet_like.auto import offloaded
from monet_like.compiler import layouts
from monet_like.compiler.costs import measured_costs
from monet_like.compiler.request import Request, captured_for
from monet_like.compiler.sources import Given
from monet_like.errors import MonetError
from monet_like.ir.defaults import MODE
from monet_like.ir.program import Cost
from monet_like.ir.simulate import running as moments
from monet_like.ir.units import Budget
from monet_like.job.job import Job
from monet_like.models.unet import UNet
from monet_like.profile.cublas import measured_bytes
from monet_like.profile.devices import DEVICES
from monet_like.profile.measure import allocated_peak, seconds_of
from monet_like.profile.workspaces import own_need
from monet_like.replay.graphs import model as graphs_of_models
from monet_like.replay.graphs import trial
from monet_like.replay.graphs.model import WARM_UP
from monet_like.replay.graphs.recorder import CudaRecorder
from monet_like.replay.graphs.step import _Parts
from monet_like.replay.verify.steps import resident_bytes, step_peak, unsaved_loss
from monet_like.report.live import live_step
from monet_like.runtime import offload as host_copies
from monet_like.runtime.out_of_memory import silent

plan_briefly()

Made = tuple[nn.Module, tuple[Any, ...]]
CUDA = torch.device("cuda", 0)
#: Of the caching allocator: it splits the rest of a block above this size off only if that rest is larger than this.
UNSPLIT_BYTES = 2**20


class Decoder(nn.Module):
    """A decoder as Llama's, small: RMS norms, causal attention, gated feed-forward layers, tied embeddings."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2, tokens: int = 256) -> None:
        super().__init__()
        self.heads, self.embedding = heads, nn.Embedding(tokens, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * layers + 1))
        self.attention = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(layers))
        self.joined = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.gate = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width, bias=False) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for i, (attention, joined) in enumerate(zip(self.attention, self.joined, strict=True)):
            queries, keys, values = (
                part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for part in attention(self.norms[2 * i](x)).chunk(3, -1)
            )
            heads = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
            x = x + joined(heads.transpose(1, 2).flatten(-2))
            y = self.norms[2 * i + 1](x)
            x = x + self.down[i](nn.functional.silu(self.gate[i](y)) * self.up[i](y))
        return self.norms[-1](x) @ self.embedding.weight.T


class Ramp(nn.Module):
    """Makes a tensor on its parameters' device, and its only argument is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, scale: float) -> torch.Tensor:
        return (torch.arange(64.0, device=self.weight.device) * self.weight * scale).relu()


class OnTwoDevices(nn.Module):
    """Layers on the first GPU between an embedding and a head on another device."""

    def __init__(self, other: str) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(4))
        self.embedding, self.layers = nn.Embedding(64, 256, device=other), nn.Sequential(*layers).to(CUDA)
        self.head = nn.Linear(256, 16, device=other)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.head(self.layers(x.to(CUDA)).to(x.device))


def image(batch: int, size: int) -> torch.Tensor:
    return torch.randn(batch, 3, size, size, device=CUDA)


def mobilenet() -> Made:
    """Its first six blocks, of seventeen."""
    blocks = [[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 3, 2]]
    model = torchvision.models.MobileNetV2(num_classes=10, inverted_residual_setting=blocks)
    images = image(16, 64).to(memory_format=torch.channels_last)
    return model.to(memory_format=torch.channels_last), (images,)


def vit(patch: int, layers: int, width: int, hidden: int, batch: int, dropout: float = 0.0) -> Made:
    model = torchvision.models.VisionTransformer(64, patch, layers, 4, width, hidden, dropout, num_classes=10)
    return model, (image(batch, 64),)


def decoder(batch: int) -> Made:
    return Decoder(), (torch.randint(0, 256, (batch, 128), device=CUDA),)


#: Models; those whose names say bfloat16 are trained in autocast to it.
CASES: dict[str, Callable[[], Made]] = {
    "mobilenet channels_last bfloat16": mobilenet,
    "vit bfloat16": lambda: vit(16, 3, 64, 128, batch=16),
    "vit with dropout": lambda: vit(16, 2, 64, 128, batch=16, dropout=0.1),
    "large vit": lambda: vit(8, 2, 256, 768, batch=128),
    "unet": lambda: (UNet(width=8, depth=2), (image(6, 64),)),
    "unet bfloat16": lambda: (UNet(width=8, depth=2), (image(6, 64),)),
    "decoder": lambda: decoder(8),
    "decoder bfloat16": lambda: decoder(8),
    "large decoder": lambda: decoder(128),
    "resnet18": lambda: (torchvision.models.resnet18(num_classes=10), (image(32, 64),)),
}


def casting(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", dtype) if dtype else nullcontext()


class InAutocast(nn.Module):
    """A model whose every call is made in autocast, as `step_peak` wants it."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, *args: Any) -> Any:
        with casting(self.dtype):
            return self.model(*args)


def planned(
    name: str, device: torch.device = CUDA, *, link: float = 1e6, **options: Any
) -> tuple[Any, tuple[Any, ...], nn.Module]:
    """A model with a schedule, its arguments, and the same in its autocast. It has no CUDA graphs by default.

    Args:
        link: bytes a second to the host; by default too few for any copy to pay.
    """
    offloaded.host_rate = lambda _: link  # type: ignore[assignment]
    model, args = CASES[name]()
    model, args = model.to(device), tuple(arg.to(device) for arg in args)
    dtype = torch.bfloat16 if "bfloat16" in name else None
    with casting(dtype):
        usual = {"memory_budget": "80%", "effort": "quick", "cuda_graphs": False}
        wrapped = monet_like.auto_schedule(model, args, **{**usual, **options})
    running = InAutocast(wrapped, dtype)
    return wrapped, args, running


def mean_square(result: torch.Tensor) -> torch.Tensor:
    return result.float().square().mean()


def wide_loss(result: torch.Tensor) -> torch.Tensor:
    """A loss of three tensors of 64 MiB."""
    wide = result.float().mean() * torch.ones(2**24, device=result.device)
    return wide.square().mean()


def step(model: nn.Module, args: tuple[Any, ...], loss: Callable[[torch.Tensor], torch.Tensor] = mean_square) -> None:
    """One training step without an optimizer; every parameter gets a gradient where it is."""
    model.zero_grad(set_to_none=True)
    loss(model(*args)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad.shape, parameter.grad.device) == (parameter.shape, parameter.device), name


class Free(dict[str, Cost]):
    """Costs of tasks that take neither time nor workspace."""

    def __missing__(self, key: str) -> Cost:
        return Cost(0.0, 0)


def large_values(wrapped: Any) -> int:
    """Values above the allocator's least size for them that are alive at once, at most, residents included."""
    (kept,) = wrapped._kept
    program, large = kept.captured.program, UNSPLIT_BYTES
    always = sum(value.bytes > large for value in program.values if value.kind in ("parameter", "buffer", "input"))
    alive = (
        sum(count > large for count in moment.alive.values()) + len(moment.task.writes)
        for moment in moments(program, wrapped.record.schedule, Free())
    )
    return always + max(alive)


def train(name: str) -> dict[str, Any]:
    """One schedule: what it predicts without cuBLAS's workspaces, and what the allocator counts while it runs."""
    wrapped, args, running = planned(name)
    extra = wrapped.record.extra_bytes
    asked = step_peak(running, (args, {}), CUDA)
    running.zero_grad(set_to_none=True)
    torch.cuda.synchronize(CUDA)
    torch.cuda.reset_peak_memory_stats(CUDA)
    before = torch.cuda.memory_allocated(CUDA)
    step(running, args)
    rise = torch.cuda.max_memory_allocated(CUDA) - before
    plain = InAutocast(wrapped._model, running.dtype)
    return {
        "predicted": wrapped.record.peak_bytes - extra,
        "asked": asked,
        "plain predicted": wrapped.record.plain_peak_bytes - extra,
        "plain asked": step_peak(plain, (args, {}), CUDA),
        "allocated": resident_bytes(wrapped, (args, {})) + rise,
        "unsplit": UNSPLIT_BYTES * large_values(wrapped),
    }


def in_channels_last(name: str) -> dict[str, Any]:
    """`train` where convolutions in channels-last are taken to be faster, and where they are not: the modes as well."""
    modes = []
    for share, layouts.WORTH in ((79, 0.0), (80, math.inf)):  # `train` finds the second plan in the cache
        wrapped, args, running = planned(name, memory_budget=f"{share}%")
        modes.append(wrapped.record.mode)
        strides = running(*args).stride()
    plain = InAutocast(wrapped._model, running.dtype)
    return {**train(name), "modes": modes, "in rows": strides == plain(*args).stride()}


def whole(name: str) -> dict[str, Any]:
    """All that the allocator has given out at once, at most, counted from when it had given out nothing."""
    assert not torch.cuda.memory_allocated(CUDA)
    wrapped, args, running = planned(name)
    gc.collect()
    torch.cuda.synchronize(CUDA)
    torch.cuda.reset_peak_memory_stats(CUDA)
    result = running(*args)
    unsaved_loss([result]).backward()
    record = wrapped.record
    return {
        "most": torch.cuda.max_memory_allocated(CUDA),
        "asked": torch.cuda.memory_stats(CUDA)["requested_bytes.all.peak"],
        "predicted": record.peak_bytes,
        "plain predicted": record.plain_peak_bytes,
        "cublas": record.cublas_bytes,
        "unsplit": UNSPLIT_BYTES * large_values(wrapped),
    }


def rehearsals(name: str) -> dict[str, Any]:
    """The moments of a step, counted on fake tensors and on real ones."""
    found = [REHEARSALS[name].rehearsed(fake=fake, device=CUDA) for fake in (True, False)]
    said = [[(m.what, m.base_bytes) for each in steps for m in each.step.moments] for steps, _ in found]
    held = [[sorted((b, *sorted(v)) for b, v in each.held.items()) for each in steps] for steps, _ in found]
    return {"moments": said, "held": held, "on fakes": found[0][1]}


def two_devices(name: str) -> dict[str, Any]:
    """Planned on the second GPU, then moved to the first, and back."""
    second = torch.device("cuda", 1)
    wrapped, args, running = planned(name, second)
    peaks = [step_peak(running, (args, {}), second)]
    for device in (CUDA, second):
        running.to(device)
        moved = tuple(arg.to(device) for arg in args)
        step(running, moved)
        peaks.append(step_peak(running, (moved, {}), device))
    record = wrapped.record
    return {"predicted": record.peak_bytes - record.extra_bytes, "peaks": peaks, "plans": len(wrapped.records)}


#: Warnings of PyTorch's: of its first product, and until 2.11 of a gradient that another stream's thread has made.
_PYTORCHS = ("no current CUDA context", "The AccumulateGrad node's stream does not match")


def several_devices(other: str) -> dict[str, Any]:
    """A model on the first GPU and on another device: what is predicted, and what GPUs allocate."""
    model, x = OnTwoDevices(other), torch.zeros(2048, dtype=torch.long, device=other)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        wrapped = monet_like.auto_schedule(model, x, memory_budget="80%", effort="quick")
        step(wrapped, (x,))
        wrapped.zero_grad()
        gc.collect()
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
        step(wrapped, (x,))
    record = wrapped.record
    return {
        "predicted": record.peak_bytes - record.extra_bytes,
        "plain": record.plain_peak_bytes - record.extra_bytes,
        "gradients": sum(parameter.nbytes for parameter in model.layers.parameters()),
        "asked": [torch.cuda.memory_stats(device).get("requested_bytes.all.peak", 0) for device in devices],
        "said": [
            told for told in (str(each.message) for each in said) if not any(words in told for words in _PYTORCHS)
        ],
    }


def offload(name: str) -> dict[str, Any]:
    """With copies on the host."""
    wrapped, args, running = planned(name, mode="offload", memory_budget="75%")
    torch.empty(1, pin_memory=True)  # what the profile has freed is given back when the next block is asked for
    torch.cuda.reset_peak_host_memory_stats()
    step(running, args)
    extra = wrapped.record.extra_bytes
    return {
        "predicted": wrapped.record.peak_bytes - extra,
        "asked": step_peak(running, (args, {}), CUDA),
        "plain": wrapped.record.plain_peak_bytes - extra,
        "pinned predicted": wrapped.record.counts["host_bytes"],
        "pinned": torch.cuda.host_memory_stats()["active_bytes.peak"],
    }


def offloads(name: str) -> dict[str, Any]:
    """Without a word of the mode: by what the link to the host carries, by the budget, and with a mode that is given.

    ``pinned`` is all that was ever pinned, after three steps that nobody waits for. The next start finds the
    first plan in the cache.
    """
    fast: dict[str, Any] = {"memory_budget": "60%", "link": 1e13}
    wrapped, args, running = planned(name, **fast)
    for _ in range(3):
        step(running, args)
    pinned = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    record, extra = wrapped.record, wrapped.record.extra_bytes
    found = {
        "predicted": record.peak_bytes - extra,
        "asked": step_peak(running, (args, {}), CUDA),
        "plain": record.plain_peak_bytes - extra,
        "pinned": pinned,
        "again": planned(name, **fast)[0].record == record,
    }
    others: list[dict[str, Any]] = [{"mode": MODE}, {"memory_budget": "200%"}, {"memory_budget": "61%", "link": 1e7}]
    records = [record, *(planned(name, **{**fast, **other})[0].record for other in others)]

    def full(count: int) -> torch.Tensor:
        raise MonetError("the host is full")

    host_copies._pinned = full
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step(running, args)
    found["said"] = sorted({str(each.message) for each in said})
    return found | {"records": [[each.mode, each.counts.get("host_bytes", 0)] for each in records]}


def large_blocks() -> int:
    """Bytes that the allocator has reserved for blocks of more than 1 MiB; smaller ones are never cut from these."""
    return int(torch.cuda.memory_stats(CUDA)["reserved_bytes.large_pool.current"])


def reserve(name: str) -> dict[str, Any]:
    """What is reserved before the first step is all that the steps take."""
    # Every operator measured, and an integer program, as by default; the other plans are made in seconds.
    wrapped, args, running = planned(name, effort="full", time_limit_seconds=1.0)
    step_peak(running, (args, {}), CUDA)  # cuBLAS has its workspaces, as after the steps of another model
    running.zero_grad(set_to_none=True)
    wanted = monet_like.reserve(wrapped.record)
    before = large_blocks()
    step_peak(running, (args, {}), CUDA)
    return {
        "wanted": wanted,
        "cublas": wrapped.record.cublas_bytes,
        "resident": resident_bytes(wrapped, (args, {})),
        "predicted": wrapped.record.peak_bytes,
        "before": before,
        "after": large_blocks(),
    }


def placed(name: str) -> dict[str, Any]:
    """With the tensors of a step cut from one block: what the allocator has taken from the device after some steps."""
    wrapped, args, running = planned(name, mode="normal", memory_budget="70%")
    step(running, args)
    running.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    without = torch.cuda.memory_allocated(CUDA)
    step(running, args)
    running.zero_grad(set_to_none=True)
    usual = torch.cuda.memory_reserved(CUDA)
    monet_like.place_memory(wrapped)
    for _ in range(4):
        step(running, args)
    (memory,) = (each.step.memory for each in wrapped._kept)
    assert memory is not None
    counts = memory.counts
    running.zero_grad(set_to_none=True)
    result = wrapped(*args)
    result.record_stream(torch.cuda.Stream())  # freed, its place waits for that stream
    inside = memory.counts
    del result
    step(running, args)
    return {
        "without": without,
        "usual": usual,
        "block": memory.placed_bytes,
        "counts": counts,
        "inside": inside,
        "again": memory.counts,
        "allocated": torch.cuda.memory_allocated(CUDA),
        "reserved": torch.cuda.memory_reserved(CUDA),
        "predicted": wrapped.record.peak_bytes,
    }


def counted(run: Callable[[], Any]) -> dict[str, int]:
    """What the fake GPU counts while something runs."""
    library, names = ctypes.CDLL(None), ("launches", "graph_launches", "recorded", "mallocs", "forbidden")
    counts = [ctypes.c_long.in_dll(library, f"fake_gpu_{name}") for name in names]
    before = [count.value for count in counts]
    run()
    torch.cuda.synchronize(CUDA)
    return {name: count.value - was for name, count, was in zip(names, counts, before, strict=True)}


def graphed(name: str) -> dict[str, Any]:
    """Steps that are blocks as CUDA graphs: what is launched, the pool's memory, and how far the generator is."""
    wrapped, args, running = planned(name, memory_budget="150%" if "dropout" in name else "80%", cuda_graphs=True)
    record, pool, session = wrapped.record, list[int](), CudaRecorder.session
    torch.cuda.manual_seed(0)
    plain = InAutocast(wrapped._model, running.dtype)
    loss = counted(lambda: mean_square(plain(*args).detach().requires_grad_()).backward())["launches"]
    loss -= counted(lambda: plain(*args))["launches"]
    torch.cuda.manual_seed(0)
    for _ in range(7):
        step(plain, args)
    drawn = torch.cuda.get_rng_state(CUDA)
    torch.cuda.manual_seed(0)

    @contextmanager
    def watched(recorder: CudaRecorder) -> Iterator[None]:
        with session(recorder):
            torch.cuda.reset_peak_memory_stats(CUDA)
            before = torch.cuda.memory_stats(CUDA)
            yield
            after = torch.cuda.memory_stats(CUDA)
            pool.append(after["requested_bytes.all.peak"] - before["requested_bytes.all.current"])

    CudaRecorder.session = watched  # type: ignore[method-assign]
    steps = [counted(partial(step, running, args)) for _ in range(7)]
    moved = torch.cuda.get_rng_state(CUDA).equal(drawn)
    held = torch.cuda.memory_allocated(CUDA)

    def twice() -> None:
        result = mean_square(running(*args))
        result.backward(retain_graph=True)
        result.backward()

    def pending() -> None:
        (mean_square(running(*args)) + mean_square(running(*args))).backward()

    (kept,) = wrapped._kept
    return {
        "steps": steps,
        "loss": loss,
        "segments": len(kept.step.segments),
        "why not": wrapped._graphs.why_not,
        "generators equal": moved,
        "pool": pool,
        "residents": resident_bytes(wrapped, (args, {})),
        "predicted": record.peak_bytes,
        "retained": counted(twice),
        "pending": counted(pending),
        "held": torch.cuda.memory_allocated(CUDA) - held,
    }


@contextmanager
def trials_won() -> Iterator[None]:
    """By a clock that knows nothing but graphs. What kernels would compute is taken for equal."""
    launched, now = ctypes.c_long.in_dll(ctypes.CDLL(None), "fake_gpu_graph_launches"), [0.0, 0.0]

    def seconds(_: CudaRecorder) -> float:
        now[:] = now[0] + (0.1 if launched.value > now[1] else 0.2), launched.value
        return now[0]

    alike = lambda one, other: one is other or one.shape == other.shape  # noqa: E731
    with (
        mock.patch.object(CudaRecorder, "seconds", seconds),
        mock.patch.object(trial, "_same_bits", alike),
        mock.patch.object(graphs_of_models, "unneeded", return_value=""),  # this GPU has no times
    ):
        yield


def graphs_tried(name: str) -> dict[str, Any]:
    """Steps of a model for which nobody has asked for graphs: what is launched, and the memory of the trial."""
    wrapped, args, running = planned(name, memory_budget="300%", cuda_graphs=None)
    session, said, found = CudaRecorder.session, messages(logging.INFO), dict[str, Any]()

    @contextmanager
    def watched(recorder: CudaRecorder) -> Iterator[None]:
        with session(recorder):
            free, before = torch.cuda.mem_get_info(CUDA)[0], torch.cuda.memory_stats(CUDA)
            torch.cuda.reset_peak_memory_stats(CUDA)
            yield
            after = torch.cuda.memory_stats(CUDA)
            found["pool"] = after["requested_bytes.all.peak"] - before["requested_bytes.all.current"]
            found["taken"] = free - torch.cuda.mem_get_info(CUDA)[0]
        found["reserved"] = recorder.pool_bytes
        torch.cuda.reset_peak_memory_stats(CUDA)

    with trials_won(), mock.patch.object(CudaRecorder, "session", watched):
        steps = [counted(partial(step, running, args)) for _ in range(WARM_UP)]
        running.zero_grad()
        elsewhere = torch.cuda.memory_stats(CUDA)["requested_bytes.all.current"] - resident_bytes(wrapped, (args, {}))
        steps += [counted(partial(step, running, args)) for _ in range(3)]
    (kept,) = wrapped._kept
    copies = [
        kept.captured.metas[v].allocated_bytes for v in (*kept.captured.inputs, *(v for _, v in kept.step.tangents))
    ]
    pool, outside = trial.pool_bytes(kept.step), torch.cuda.memory_stats(CUDA)["requested_bytes.all.peak"] - elsewhere
    return {
        **found,
        "steps": steps,
        "segments": len(kept.step.segments),
        "predicted": pool,
        "all predicted": wrapped.record.peak_bytes + pool + sum(copies),
        "all": found["pool"] + outside,
        "said": [message for message in said if "CUDA graphs" in message],
    }


def graphs_without_memory(name: str) -> dict[str, Any]:
    """What is free for graphs; and steps where the plan, or in the capture the device, has no room for them."""
    narrow, args, running = planned(name, cuda_graphs=None)
    said = messages(logging.INFO)
    with trials_won():
        usual = [counted(partial(step, running, args)) for _ in range(5)]
        wrapped, args, running = planned(name, memory_budget="300%", cuda_graphs=None)
        steps = [counted(partial(step, running, args)) for _ in range(WARM_UP)]
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(CUDA)
        recorder, held = CudaRecorder(CUDA), torch.cuda.memory_reserved(CUDA)
        free = [recorder.free_bytes(0), recorder.free_bytes(2**30)]
        torch.cuda.set_per_process_memory_fraction(0.5, CUDA)
        free.append(recorder.free_bytes(0))
        record = CudaRecorder.record

        def without_memory(recorder: CudaRecorder, function: Callable[[], Any]) -> Any:
            torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved(CUDA) / (80 * 2**30), CUDA)
            try:
                return record(recorder, function)
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0, CUDA)

        with mock.patch.object(CudaRecorder, "record", without_memory):
            steps += [counted(partial(step, running, args)) for _ in range(3)]
    running.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()
    return {
        "usual": usual,
        "steps": steps,
        "captures": [each._graphs.captures for each in (narrow, wrapped)],
        "free": free,
        "held": [held, torch.cuda.memory_reserved(CUDA)],
        "said": [message for message in said if "CUDA graphs" in message],
    }


def capture_fails(name: str) -> dict[str, Any]:
    """A step in whose capture an operator waits for the GPU: the run goes on, and random numbers are drawn."""
    _, args, running = planned(name, cuda_graphs=True)
    calls, of_segment = [], _Parts.of_segment

    def waiting(parts: Any, number: int) -> Callable[[], Any]:
        def run() -> Any:
            calls.append(number)
            if calls.count(3) == 2:  # in the rehearsal it may
                torch.rand(1, device=CUDA)
                torch.cuda.synchronize(CUDA)
            return of_segment(parts, number)()

        return run

    _Parts.of_segment = waiting  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        steps = [counted(partial(step, running, args)) for _ in range(5)]
    torch.rand(1, device=CUDA)  # the generator is not believed to be captured
    return {"steps": steps, "told": [str(each.message) for each in told if "graphs" in str(each.message)]}


def distributed(name: str) -> dict[str, Any]:
    """In DistributedDataParallel, a group of one; and planned without the group before."""
    alone, _, _ = planned(name)
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", f"file://{folder}/meeting", rank=0, world_size=1)
        wrapped, args, running = planned(name)
        step(nn.parallel.DistributedDataParallel(running, device_ids=[0]), args)
        torch.distributed.destroy_process_group()
    return {"predicted": wrapped.record.peak_bytes, "alone": alone.record.peak_bytes}


def workspaces(name: str) -> dict[str, Any]:
    """What the profile says that operators take beside their results, by the operator's name."""
    model, args = CASES[name]()
    request = Request(model.to(CUDA), (args, {}), "normal")
    captured = captured_for(request, request.example)
    costs, _ = measured_costs(request, captured, CUDA, timed=False)
    found: dict[str, int] = {}
    for task in captured.program.tasks:
        operator = task.calls[-1].op.split(".")[1]
        found[operator] = max(found.get(operator, 0), costs[task.cost].workspace_bytes)
    return {"bytes": found, "odd": [cost.workspace_bytes for cost in costs.values() if cost.workspace_bytes % 512]}


def copies(name: str) -> dict[str, Any]:
    """A profile; what is copied meanwhile is between two lines on stderr, after them a copy from the host."""
    model, args = CASES[name]()
    request = Request(model.to(CUDA), (args, {}), "normal")
    captured = captured_for(request, request.example)
    print("profiled", file=sys.stderr, flush=True)
    measured_costs(request, captured, CUDA)
    print("profiled", file=sys.stderr, flush=True)
    torch.zeros(2**20).to(CUDA)
    return {}


def messages(level: int = logging.WARNING) -> list[str]:
    """What is logged from now on."""
    said: list[str] = []
    handler, log = logging.Handler(level), logging.getLogger("monet_like")
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(level)
    return said


def all_memory(but: int) -> list[torch.Tensor]:
    """Takes what is free on the device, and of what the allocator has all blocks of 4 MiB."""
    torch.cuda.empty_cache()
    taken = [torch.empty(torch.cuda.mem_get_info(CUDA)[0] - but, dtype=torch.uint8, device=CUDA)]
    with silent(), suppress(torch.OutOfMemoryError):
        while True:
            taken.append(torch.empty(2**22, dtype=torch.uint8, device=CUDA))
    return taken


def out_of_memory_in_blocks(name: str) -> dict[str, Any]:
    """What is said when memory ends in the backward of the first block, and in a forward.

    A thread of autograd may release what the backward had after the memory is taken: a forward or two then find room.
    """
    said, held = messages(), []
    offloaded.ROOM = 0.0  # so that the first block's backward is where most is needed
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)) for _ in range(3)))
    x = torch.randn(2**14, 256, device=CUDA)
    blocks: Any = monet_like.auto_schedule(model.to(CUDA), x, memory_budget="90%", blocks="*", effort="quick")
    first = blocks[0](x)
    result = blocks[2](blocks[1](first))
    first.register_hook(lambda _: held.append(all_memory(2**21)))
    with suppress(torch.OutOfMemoryError):
        result.sum().backward()
    del first, result
    held.clear()
    gc.collect()
    held.append(all_memory(2**21))
    forwards: list[int] = []
    with suppress(torch.OutOfMemoryError):
        for number in range(3):
            forwards.append(number)
            x = blocks[number](x)
    return {"said": said, "blocks": [0, forwards[-1]], "moments": dict(monet_like.block_plan(blocks).moments)}


def out_of_memory(name: str) -> dict[str, Any]:
    """What is said when memory ends after a step, in a forward, and while operators are measured."""
    said = messages()
    wrapped, args, running = planned(name)
    step(running, args)
    held = [torch.empty(2**28, dtype=torch.uint8, device=CUDA) for _ in range(2)]  # of the loop

    def too_much() -> None:
        with suppress(torch.OutOfMemoryError):
            torch.empty(2**40, dtype=torch.uint8, device=CUDA)

    too_much()
    with silent():
        too_much()
    running.zero_grad(set_to_none=True)
    held.append(all_memory(2**21))
    with suppress(torch.OutOfMemoryError):
        step(running, args)
    return {"said": said, "predicted": wrapped.record.peak_bytes, "budget": wrapped.record.budget_bytes}


def card(name: str) -> dict[str, Any]:
    """What "card" means beside other tensors, for a whole model and for blocks."""
    held = torch.empty(3 * 2**30, dtype=torch.uint8, device=CUDA)
    wrapped, _, _ = planned(name, memory_budget="card")
    again, _, _ = planned(name, memory_budget="card")
    del held
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3))).to(CUDA)
    x = torch.randn(8, 64, device=CUDA)
    blocks = monet_like.auto_schedule(model, x, memory_budget="card", blocks="*", effort="quick")
    return {
        "whole": [wrapped.record.budget_bytes, again.record.budget_bytes],
        "blocks": monet_like.block_plan(blocks).budget_bytes,
    }


def live(name: str) -> dict[str, Any]:
    """The most memory of a step of the report's, the first in its process, and what is predicted."""
    wrapped, args, _ = planned(name)
    (kept,) = wrapped._kept
    schedule = wrapped.record.schedule
    found = live_step(wrapped._model, kept.captured, schedule, (args, {}), wrapped.record.extra_bytes, "a fake GPU")
    return {"bytes": max(found.bytes), "predicted": wrapped.record.peak_bytes}


def placed_loss(name: str) -> dict[str, Any]:
    """As `placed`, with a loss that allocates much between the forward and the backward."""
    wrapped, args, running = planned(name, mode="normal", memory_budget="70%")
    monet_like.place_memory(wrapped)
    for _ in range(5):
        step(running, args, wide_loss)
    (memory,) = (each.step.memory for each in wrapped._kept)
    assert memory is not None
    return {
        "block": memory.placed_bytes,
        "counts": memory.counts,
        "allocated": torch.cuda.memory_allocated(CUDA),
        "reserved": torch.cuda.memory_reserved(CUDA),
    }


def moved(name: str) -> dict[str, Any]:
    """A model that makes a tensor where it is, from the second GPU to the first."""
    wrapped = monet_like.auto_schedule(Ramp().to("cuda:1"), (2.0,), memory_budget="100%", effort="quick")
    wrapped(2.0).sum().backward()
    wrapped.to(CUDA).zero_grad()
    result = wrapped(2.0)
    result.sum().backward()
    return {"device": str(result.device), "plans": len(wrapped.records)}


def timed(name: str) -> dict[str, Any]:
    """An operator is timed on the second GPU."""
    second = torch.device("cuda", 1)
    x = torch.ones(8, device=second)
    print("timed", file=sys.stderr, flush=True)
    seconds = seconds_of(lambda: x.add_(1).mul_(2), second, repeats=1)
    print("timed", file=sys.stderr, flush=True)
    slow_launch = partial(time.sleep, 0.02)
    launches = [seconds_of(slow_launch, second, repeats=1, of_launches=counted) for counted in (False, True)]
    return {"seconds": seconds, "launches": launches}


def cublas(_: str) -> dict[str, Any]:
    """What the workspaces of cuBLAS take in a step's threads, and in a product beside its result."""
    x = torch.ones(8, 8, device=CUDA)
    kept = measured_bytes(CUDA)
    return {"kept": kept, "of a product": allocated_peak(lambda: x @ x, CUDA) - x.nbytes}


def by_rates(name: str) -> dict[str, Any]:
    """Schedules of a datasheet's rates at several budgets: the variants they take, and what they need."""
    model, args = CASES[name]()
    example = (args, {})
    request = Request(
        model.to(CUDA), example, "inplace_conv_multiway_newnode", strategy="heuristic", solver="heuristic"
    )
    captured = captured_for(request, example)
    found: dict[str, Any] = {"variants": [], "predicted": [], "asked": []}
    for share in (0.9, 0.6, 0.45):
        record = Job(request, CUDA, Given(DEVICES["h100"]), captured=captured).plan(Budget(share=share)).record
        wrapped = monet_like.ScheduleWrapper(model, record, example=example, captured=captured)
        found["variants"] += [running.task.variant for running in moments(captured.program, record.schedule, Free())]
        found["predicted"].append(record.peak_bytes - record.extra_bytes)
        found["asked"].append(step_peak(wrapped, example, CUDA))
    return found


#: Samples, heads of queries and of keys, their lengths, and the width of a head.
ATTENTION = [
    (2, 8, 8, 512, 512, 64), (2, 8, 8, 500, 300, 128), (2, 8, 8, 512, 512, 80), (2, 8, 2, 384, 384, 64),
    (1, 4, 4, 130, 130, 16), (2, 10, 10, 4096, 77, 64),
]  # fmt: skip


def attention(_: str) -> dict[str, Any]:
    """What gradients of fused attention take beside their results, and what a datasheet's profile says."""
    found = {}
    for kind in ("flash", "efficient"):
        forward = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention")
        backward = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention_backward")
        for samples, heads, shared, length, keys, width in ATTENTION:
            given = [
                torch.zeros(samples, rows, count, width, device=CUDA, dtype=torch.bfloat16).transpose(1, 2)
                for rows, count in ((length, heads), (keys, shared), (keys, shared))
            ]
            if kind == "flash":
                out, norms, *lengths, seed, offset, _ = forward(*given)
                run = partial(backward, out, *given, out, norms, *lengths, 0.0, False, seed, offset)
            else:
                out, norms, seed, offset = forward(*given, None, True)
                wanted = [True, True, True, False]
                run = partial(backward, out, *given, None, out, norms, seed, offset, 0.0, wanted)
            run()
            made = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in run()[:3]}
            estimated = own_need(f"{backward._qualified_op_name.replace('::', '.')}.default", run.args, None)
            taken = allocated_peak(run, CUDA) - sum(made.values())
            found[f"{kind} {samples, heads, shared, length, keys, width}"] = [taken, estimated.gpu_bytes]
    return found


def saved(path: str) -> dict[str, Any]:
    """A schedule of a small net in a file, from a datasheet's rates."""
    model, example = torchvision.models.resnet18().to(CUDA), ((image(2, 64),), {})
    request = Request(model, example, "normal", "torchvision.models.resnet18()", strategy="store_all")
    Job(request, CUDA, Given(DEVICES["h100"])).plan(2**40).record.save(Path(path))
    return {}


def compiled(asked: str) -> dict[str, Any]:
    """What Inductor launches; with PyTorch 2.11 its modules use the GPU when they are loaded, and a process that does
    cannot be forked.
    """
    import lowered

    return lowered.compiled(asked)


def blocks(asked: str) -> dict[str, Any]:
    """What a plan of blocks launches that Inductor compiles."""
    import compiled_blocks

    return compiled_blocks.counted(asked)


WHAT = {
    what.__name__: what
    for what in (
        train, in_channels_last, whole, rehearsals, two_devices, offload, reserve, placed, distributed, workspaces,
        placed_loss, timed, by_rates, attention, saved, copies, live, out_of_memory, out_of_memory_in_blocks, card,
        moved, several_devices, cublas, streamed.races, streamed.two_streams, streamed.weights, streamed.larger,
        streamed.no_room, streamed.replicated, streamed.offloaded, streamed.offloading_blocks, convolutions.cudnn_calls,
        offloads, graphed, graphs_tried, graphs_without_memory, capture_fails, compiled, blocks,
    )
}  # fmt: skip


def answer(asked: Sequence[str]) -> NoReturn:
    """Say what is asked for, a line each, and end the process."""
    try:
        for each in asked:
            what, name = each.split(":", 1)
            print(json.dumps({"asked for": each, **WHAT[what](name)}), flush=True)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stderr.flush()
    os._exit(0)  # autograd's threads may want the interpreter while it ends, and then abort the process


def serve() -> None:
    """Answer lines such as ``{"asked": ["train:unet"], "environment": {}}``, each in a process that has loaded all from
    its start.

    A last line says how the process ended: ``{"ended": 0}``.
    """
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()  # the GPU is not in use yet
        if not child:
            os.environ.update(request["environment"])
            answer(request["asked"])
        print(json.dumps({"ended": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}), flush=True)


if __name__ == "__main__":
    answer(sys.argv[1:]) if sys.argv[1:] else serve()
