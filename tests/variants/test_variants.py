"""Variants: where each is offered, under which words, and what it spares."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import pytest
import torch
import zoo
from liger_decoders import small_decoder
from replays import FULL
from taking import error_of, taking
from torch import nn

from monet_like.capture.captured import Captured
from monet_like.capture.lower.step import capture
from monet_like.ir.mode import parse_mode
from monet_like.ir.program import Task
from monet_like.plan.baseline import store_all
from monet_like.profile.work import flops, touched_bytes
from monet_like.variants import admitted, with_variants


@functools.cache
def captured_alone(name: str) -> Captured:
    model, args, kwargs = zoo.MODELS[name]()
    return capture(model, args, kwargs)


@functools.cache
def offered(name: str) -> Captured:
    return with_variants(captured_alone(name))


def tasks_of(captured: Captured) -> tuple[Task, ...]:
    return captured.program.every_task()


@pytest.mark.slow(but=["activations-wanted5"])
@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("resnet18", {"batch_norm_clamp.train": 9, "batch_norm_add_clamp.train": 8, "batch_norm.apply": 20}),
        ("mobilenet_v2", {"batch_norm_clamp.train": 7, "batch_norm_add.train": 1, "batch_norm.apply": 10}),
        ("unet", {"conv.in_parts": 2, "pool.offsets": 2 * 2, "pool.pack": 2, "pool.packed": 2, "relu.pack": 10}),
        (
            "volumes",
            {
                "instance_norm_leaky_relu.train": 7,
                "instance_norm_add_leaky_relu.train": 4,
                "instance_norm_leaky_relu.backward": 7,
                "instance_norm.apply": 13,
            },
        ),
        ("decoder", {f"rms_norm.{what}": 4 for what in ("train", "apply", "backward")}),
        (
            "activations",
            {
                f"batch_norm_{name}.{what}": 1
                for name in ("leaky_relu", "hardswish", "silu")
                for what in ("apply", "backward")
            }
            | {"batch_norm_silu.train": 1, "batch_norm_add_leaky_relu.train": 1}
            | {"leaky_relu.packed": 2, "hardsigmoid.packed": 1, "pool.packed": 1},
        ),
    ],
)
def test_every_place_is_found(name: str, wanted: dict[str, int]) -> None:
    found = Counter(task.variant for task in tasks_of(offered(name)))
    assert {variant: found[variant] for variant in wanted} == wanted


def test_input_gradients_of_convolutions_need_no_input() -> None:
    captured = offered("unet")  # transposed convolutions among them
    slots = [slot for slot in captured.program.slots if "conv.shape_only" in {way.variant for way in slot}]
    assert len(slots) == 10  # two more make their gradient in parts
    for plain, swapped, *_ in slots:
        assert captured.program.forward_reads(swapped) == ()
        assert len(captured.program.forward_reads(plain)) == 1
        assert touched_bytes(captured, swapped) - touched_bytes(captured, plain) == 4  # the one element


@pytest.mark.parametrize(
    ("layer", "shape", "depthwise"),
    [
        (nn.Conv2d(4, 4, 3, padding=1, groups=4), (2, 4, 6, 6), True),
        (nn.Conv2d(4, 8, 3, groups=4), (2, 4, 6, 6), True),
        (nn.Conv1d(4, 4, 3, groups=4), (2, 4, 6), True),
        (nn.ConvTranspose2d(4, 4, 3, groups=4), (2, 4, 6, 6), True),
        (nn.Conv2d(4, 4, 3, groups=2), (2, 4, 6, 6), False),
        (nn.Conv2d(1, 4, 3), (2, 1, 6, 6), False),
    ],
)
def test_the_gradient_of_a_depthwise_convolution_is_another_kernel_on_cuda(
    layer: nn.Module, shape: tuple[int, ...], depthwise: bool
) -> None:
    inputs = (torch.randn(shape, requires_grad=True),)
    captured = capture(layer, inputs, target=torch.device("cuda", 0))
    for mode, expected in (("normal", not depthwise), ("conv_normal", True)):
        assert ("conv.transposed" in {task.variant for task in tasks_of(admitted(captured, mode))}) is expected
    words = {t.word for t in tasks_of(with_variants(capture(layer, inputs))) if t.variant == "conv.transposed"}
    assert words <= {"conv"}  # on a CPU


def test_gradients_of_batch_norm_and_its_relu_are_one_slot() -> None:
    captured = offered("resnet18")
    slots = [slot for slot in captured.program.slots if "batch_norm_clamp.backward" in {way.variant for way in slot}]
    assert len(slots) == 9  # the other eight of seventeen gradients also go to the shortcut
    for slot in slots:
        fused = slot[-1]
        assert fused.word == "conv"
        assert slot[0].variant == "aten" and slot[0].overwrites in slot[0].reads
        sizes = [sum(captured.program.values[v].bytes for v in captured.program.forward_reads(way)) for way in slot]
        assert sizes[-1] == min(sizes)  # it reads what the batch norm's gradient reads anyhow
        # What one operator hands to the next is written once and read once.
        between = captured.program.values[fused.writes[0]].bytes
        for way, more in ((slot[0], 2 * between), (fused, 0)):
            outside = sum(captured.metas[v].storage_bytes for v in (*way.reads, *way.writes))
            assert touched_bytes(captured, way) == outside + more


@pytest.mark.slow(but=["inplace_conv_multiway_newnode"])
@pytest.mark.parametrize("mode", ["normal", "conv_normal", "inplace_multiway", "newnode", FULL])
def test_a_mode_admits_what_its_words_name(mode: str) -> None:
    captured, words = captured_alone("mobilenet_v2"), parse_mode(mode)
    everything = Counter((t.variant, t.word) for t in tasks_of(with_variants(captured, words)))
    here = Counter((t.variant, t.word) for t in tasks_of(admitted(captured, mode)))
    assert here == Counter({key: n for key, n in everything.items() if not key[1] or key[1] in words})
    assert {word for _, word in everything} == {"", "conv", "multiway", "newnode", "inplace"}
    assert here["batch_norm_clamp.backward", "conv"] == (7 if "conv" in words else 0)


def test_slots_are_merged_for_conv_alone() -> None:
    """Apart, PyTorch's operators need less memory: something may be run again between them."""
    model, args, _ = small_decoder()  # norms, an MLP, and a head with its loss
    captured = capture(model, args)
    apart, merged = (admitted(captured, mode).program.slots for mode in ("inplace_multiway_newnode", FULL))
    assert [ways[0] for ways in apart] == [ways[0] for ways in captured.program.slots]
    assert len(merged) < len(apart) / 2


class _Shortcut(nn.Module):
    """A residual addition whose operands are both batch norms, the second one shared."""

    def __init__(self, share: bool) -> None:
        super().__init__()
        self.one, self.other, self.share = nn.BatchNorm2d(3), nn.BatchNorm2d(3), share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.one(x), self.other(x * 2)
        return torch.relu(a + b) * (a if self.share else 1)


@pytest.mark.parametrize("share", [False, True])
def test_one_batch_norm_takes_an_addition_along(share: bool) -> None:
    found = Counter(
        t.variant for t in tasks_of(with_variants(capture(_Shortcut(share).train(), (torch.randn(4, 3, 5, 5),))))
    )
    # Where the first operand is read elsewhere too, it has to exist, and the second one takes the addition.
    assert found["batch_norm_add_clamp.train"] == found["batch_norm_add_clamp.apply"] == 1
    assert found["batch_norm.apply"] == 2


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")
def test_linear_layers_by_onednn_agree() -> None:
    model = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 32, bias=False), nn.Tanh(), nn.Linear(32, 8))
    args = (torch.randn(3, 7, 24, requires_grad=True),)
    captured = admitted(capture(model, args), FULL)
    tasks = [task for task in tasks_of(captured) if task.variant == "linear.onednn"]
    assert len(tasks) == 6 and all(task.word == "conv" for task in tasks)
    layers = [2 * 21 * inputs * outputs for inputs, outputs in ((24, 40), (40, 32), (32, 8))]
    assert [flops(captured, task) for task in tasks] == [*layers, *reversed(layers)]
    assert error_of((model, args, {}), captured, taking(captured, "linear.onednn")) <= 1e-6


class _Grouped(nn.Module):
    """What diffusion models are made of: group norm and SiLU before each convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(4, 8), nn.GroupNorm(2, 8, affine=False)])
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = conv(nn.functional.silu(norm(conv(x)))) + x
        return x


def test_group_norm_runs_again_from_its_statistics() -> None:
    args = (torch.randn(3, 8, 5, 7, requires_grad=True),)
    example = (_Grouped().train(), args, {})
    captured = admitted(capture(example[0], args), FULL)
    found = Counter(task.variant for task in tasks_of(captured))
    assert found["group_norm.apply"] == found["group_norm_silu.apply"] == 2
    program = captured.program
    for mode, tolerance in (("group_norm.apply", 0.0), ("group_norm_silu.apply", 1e-6)):
        again = next(p for p, task in enumerate(program.tasks) if task.variant == mode)
        (made,) = program.tasks[again].writes
        slot = next(s for s, ways in enumerate(program.slots) if made in ways[0].reads)
        kept = store_all(program)
        schedule = replace(kept, again=tuple((again,) if s == slot else () for s in range(len(program.slots))))
        assert error_of(example, captured, schedule) <= tolerance


class _Joined(nn.Module):
    """Three tensors made by convolutions, joined and read by ``reader``."""

    def __init__(self, reader: nn.Module, frozen: bool = False, again: bool = False) -> None:
        super().__init__()
        self.makers = nn.ModuleList(nn.Conv2d(3, channels, 3, padding=1) for channels in (2, 4, 6))
        self.reader, self.frozen, self.again = reader, frozen, again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [maker(x) for maker in self.makers]
        if self.frozen:
            parts[1] = parts[1].detach()
        joined = torch.cat(parts, 1)
        return self.reader(joined) * (joined.mean() if self.again else 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reader", "frozen", "layout", "parts"),
    [
        (nn.Conv2d(12, 5, 3, stride=2, padding=1), False, torch.contiguous_format, [2, 4, 6]),
        (nn.Conv2d(12, 5, 3, dilation=2), False, torch.channels_last, [2, 4, 6]),
        (nn.ConvTranspose2d(12, 5, 3, stride=2, output_padding=1), False, torch.contiguous_format, [2, 4, 6]),
        (nn.Conv2d(12, 5, 1, bias=False), True, torch.contiguous_format, [2, 6]),
    ],
)
@pytest.mark.parametrize("variant", ["aten", "conv.in_parts"])
def test_a_concatenations_gradient_is_made_in_parts(
    reader: nn.Module, frozen: bool, layout: torch.memory_format, parts: list[int], variant: str
) -> None:
    model = _Joined(reader, frozen).to(memory_format=layout)
    args = (torch.randn(2, 3, 9, 8).to(memory_format=layout).requires_grad_(),)
    captured = admitted(capture(model, args), FULL)
    program = captured.program
    (slot,) = (s for s, ways in enumerate(program.slots) if "conv.in_parts" in {way.variant for way in ways})
    assert [captured.metas[v].shape[1] for v in program.slots[slot][0].writes] == parts
    one, apart = program.slots[slot]
    assert flops(captured, apart) * 12 == flops(captured, one) * sum(parts)
    assert program.forward_reads(apart) == ()
    schedule = taking(captured, ways=[variant])
    assert error_of((model, args, {}), captured, schedule) <= (0.0 if variant == "aten" else 1e-6)
    # Plain PyTorch's own schedule is not touched by it.
    assert len(captured.plain.slots[slot]) == len(captured.plain.slots[slot][0].writes) == 1


@pytest.mark.parametrize(
    "model", [_Joined(nn.Conv2d(12, 4, 3, groups=2)), _Joined(nn.Conv2d(12, 4, 3, padding=1), again=True)]
)
def test_a_concatenations_gradient_stays_whole(model: nn.Module) -> None:
    captured = with_variants(capture(model, (torch.randn(2, 3, 9, 8),)))
    assert "conv.in_parts" not in {task.variant for task in tasks_of(captured)}


class _Dense(nn.Module):
    """A dense block: every layer reads all results before it, joined, through a batch norm."""

    def __init__(self, activation: nn.Module, layers: int = 3, seen: bool = False) -> None:
        super().__init__()
        self.activation, self.seen = activation, seen
        self.norms = nn.ModuleList(nn.BatchNorm2d(6 + 4 * n) for n in range(layers))
        self.layers = nn.ModuleList(nn.Conv2d(6 + 4 * n, 4, 3, padding=1, bias=False) for n in range(layers))
        self.first, self.last = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6 + 4 * layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [self.first(x)]
        for norm, layer in zip(self.norms, self.layers, strict=True):
            found.append(layer(self.activation(norm(torch.cat(found, 1)))))
        return self.activation(self.last(torch.cat(found, 1))) * (found[1].mean() if self.seen else 1)


@pytest.mark.slow(every=3)
@pytest.mark.parametrize(
    ("activation", "variant", "layout"),
    [
        (nn.ReLU(), "aten", torch.contiguous_format),
        (nn.ReLU(), "aten", torch.channels_last),
        (nn.ReLU(), "batch_norm_clamp.backward", torch.contiguous_format),
        (nn.ReLU(), "batch_norm_clamp.backward", torch.channels_last),
        (nn.LeakyReLU(), "batch_norm_leaky_relu.backward", torch.contiguous_format),
        (nn.Identity(), "aten", torch.contiguous_format),
        (nn.Tanh(), "batch_norm.backward_met", torch.channels_last),
    ],
)
def test_gradients_that_meet_in_a_dense_block_are_one(
    activation: nn.Module, variant: str, layout: torch.memory_format
) -> None:
    model = _Dense(activation).to(memory_format=layout)
    args = (torch.randn(4, 3, 9, 8).to(memory_format=layout).requires_grad_(),)
    captured, met = _met(model, args, variant)
    assert [captured.metas[own.writes[0]].shape[1] for own, _ in met] == [14, 10, 6]
    assert sum(ways[0].calls[-1].op.startswith("aten.add") for ways in captured.program.slots) == 3
    for own, way in met if variant != "aten" else []:
        result = captured.metas[own.writes[0]].storage_bytes
        assert touched_bytes(captured, own) - touched_bytes(captured, way) >= 2 * result  # written, and read again


@pytest.mark.parametrize("variant", ["aten", "batch_norm.backward_met"])
def test_a_batch_norms_gradient_meets_another_of_the_same_input(variant: str) -> None:
    model, args = _Joined(nn.BatchNorm2d(12), again=True), (torch.randn(2, 3, 9, 8),)
    captured, ((own, _),) = _met(model, args, variant)
    assert captured.metas[own.writes[0]].shape[1] == 12


def test_gradients_that_meet_elsewhere_are_added_as_before() -> None:
    model, args = _Dense(nn.ReLU(), seen=True), (torch.randn(4, 3, 9, 8),)
    captured, met = _met(model, args, "aten")
    assert [captured.metas[own.writes[0]].shape[1] for own, _ in met] == [6]
    alone = admitted(capture(model, args), "inplace_multiway_newnode")
    assert not any(value.name.endswith(".met") for value in alone.program.values)


def _met(model: nn.Module, args: tuple[torch.Tensor, ...], variant: str) -> tuple[Captured, list[tuple[Task, Task]]]:
    """What is captured, and the own and another way of all slots in which gradients meet; all are replayed so."""
    captured = admitted(capture(model, args), FULL)
    program = captured.program
    chosen = {
        slot: next(k for k, way in enumerate(ways) if way.variant == variant)
        for slot, ways in enumerate(program.slots)
        if program.values[ways[0].writes[0]].name.endswith(".met")
    }
    schedule = replace(store_all(program), ways=tuple(chosen.get(slot, 0) for slot in range(len(program.slots))))
    assert error_of((model, args, {}), captured, schedule) <= (0.0 if variant == "aten" else 1e-4)
    return captured, [(program.slots[slot][0], program.slots[slot][k]) for slot, k in chosen.items()]


def test_rates_count_of_a_view_what_it_shows() -> None:
    captured = capture(_Dense(nn.ReLU()), (torch.randn(4, 3, 9, 8),))
    added = [ways[0] for ways in captured.program.slots if ways[0].calls[-1].op == "aten.add.Tensor"]
    apart = [task for task in added if len(task.calls) == 3]
    assert [captured.metas[task.writes[0]].shape[1] for task in apart] == [6, 4, 4]
    for task in apart:
        assert touched_bytes(captured, task) == 3 * captured.metas[task.writes[0]].storage_bytes


@pytest.mark.parametrize(
    ("variant", "tolerance"),
    [
        ("batch_norm_clamp.train_joined", 0.0),
        ("batch_norm_clamp.train_in_vectors_joined", 1e-4),
        ("batch_norm_clamp.apply_joined", 0.0),
        ("batch_norm_clamp.backward_joined", 1e-4),
    ],
)
def test_a_batch_norm_reads_the_parts_of_what_is_joined_where_they_are(variant: str, tolerance: float) -> None:
    model, args = _Dense(nn.ReLU()), (torch.randn(4, 3, 9, 8, requires_grad=True),)
    captured = admitted(capture(model, args), FULL)
    program = captured.program
    joined = {task.writes[0] for task in program.tasks if task.calls[-1].op == "aten.cat.default"}
    assert len(joined) == 4
    named = [t for t in program.every_task() if t.variant == variant]
    assert len(named) == 4
    assert not any(joined.intersection(task.reads) for task in named)
    schedule = taking(captured, again=variant) if "apply" in variant else taking(captured, variant)
    assert error_of((model, args, {}), captured, schedule) <= tolerance


@pytest.mark.parametrize(
    "model",
    [
        _Dense(nn.ReLU()).to(memory_format=torch.channels_last),
        _Joined(nn.BatchNorm2d(12)).to(memory_format=torch.channels_last),
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)),
    ],
)
def test_what_lies_otherwise_or_is_not_joined_is_read_as_one(model: nn.Module) -> None:
    x = torch.randn(4, 3, 9, 8).to(memory_format=torch.channels_last)
    found = with_variants(capture(model, (x,)))
    assert not any("joined" in task.variant for task in tasks_of(found))
