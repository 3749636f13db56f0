"""Lossy caches: the forward stays exact, gradients are what the definitions say, and bytes are counted exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from dropped_models import (
    LAYERS,
    MODELS,
    Attention,
    Made,
    assert_only_changed,
    batch_normed,
    dropped,
    expected_weight_gradients,
)
from replays import costs_of, record_for, replayed
from taking import taking
from torch import Tensor, nn
from training import Outcome, run, twin

import monet_like
from monet_like.capture.captured import Captured
from monet_like.capture.lower.step import capture
from monet_like.capture.precision import autocast_as
from monet_like.ir.program import Cost
from monet_like.ir.schedule import Schedule
from monet_like.ir.simulate import simulate
from monet_like.ops import caches
from monet_like.ops.caches import LARGEST_BLOCK, int8_bytes, kept_of_block, largest_bytes, largest_kept
from monet_like.plan.baseline import store_all
from monet_like.plan.instance import Instance
from monet_like.plan.local_search.searcher import find_start
from monet_like.plan.random_schedules import random_schedule
from monet_like.profile.devices import DEVICES
from monet_like.profile.roofline import roofline
from monet_like.variants import admitted, with_variants

FULL = "inplace_conv_multiway_newnode"


def with_ways(captured: Captured, variant: str, *others: str) -> Schedule:
    """Plain PyTorch's schedule, but for the slots that have a way of this name, or of others, and what makes their
    caches.
    """
    return taking(captured, f"{variant}.pack", ways=(*others, variant))


@pytest.mark.slow(every=4)
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("share", [0.5, 0.97])  # by a bit for each element, and by places
def test_only_weight_gradients_change_and_they_are_the_definitions(name: str, share: float) -> None:
    model, args = made = MODELS[name]()
    mode = f"normal_dropit{share}"
    captured = admitted(capture(model, args), mode)
    plain = run(twin(model), args, {})
    wanted = expected_weight_gradients(made, lambda x: dropped(x, share))
    for schedule in (with_ways(captured, "dropit"), with_ways(captured, "dropit", "dropit.product")):
        outcome = replayed((model, args, {}), captured, schedule, mode, measured=False)
        changed = assert_only_changed(plain, outcome, wanted, 0.01 if name == "bfloat16" else 1e-6)
        assert changed == set(wanted) or share == 0.5  # a ReLU's zeros can be dropped


@pytest.mark.slow(but=["attention-4"])
@pytest.mark.parametrize(
    ("name", "count"),
    [("mlp", 2), ("three_dimensions", 2), ("attention", 4), ("batch_normed", 1), ("convolutions", 0)],
)
def test_products_of_what_is_kept(name: str, count: int) -> None:
    """Offered for every layer whose input is one operand row by row, Conv1D's other way round; not for convolutions."""
    model, args = MODELS[name]()
    program = admitted(capture(model, args), "dropit0.9").program
    ways = [way for ways in program.slots for way in ways if way.variant == "dropit.product"]
    assert len(ways) == count
    transposed = [way.calls[-1].args[-1] for way in ways]
    assert transposed.count(True) == (name == "attention")


@pytest.mark.parametrize(
    ("name", "share"), [("attention", 0.5), ("attention", 0.97), ("channels_last", 0.97), ("bfloat16", 0.5)]
)
def test_what_is_not_dropped_in_8_bits(name: str, share: float) -> None:
    """With both words: the same elements, each within half a 127th of the largest of its 256."""
    model, args = made = MODELS[name]()
    mode = f"normal_dropit{share}_lowp8"
    captured = admitted(capture(model, args), mode)
    plain = run(twin(model), args, {})
    outcome = replayed((model, args, {}), captured, with_ways(captured, "dropit.int8"), mode, measured=False)

    def in_8_bits(x: Tensor) -> Tensor:
        left = dropped(x, share)
        keep = kept_of_block(share)
        packed = caches.pack_largest(x, keep)
        size = largest_kept(x.numel(), keep) * x.element_size()
        values = rounded(packed[:size].view(x.dtype), "lowp8")
        again = torch.cat((values.view(torch.uint8), packed[size:]))
        found = caches.unpack_largest(again, keep, x.shape, x.dtype, x.stride())
        assert torch.equal(found != 0, left != 0) and not torch.equal(found, left)
        assert (found - left).abs().max() <= left.abs().max() * (0.5 / 127 + 2 * torch.finfo(x.dtype).eps)
        return found

    wanted = expected_weight_gradients(made, in_8_bits)
    assert assert_only_changed(plain, outcome, wanted, 0.01 if name == "bfloat16" else 1e-6) == set(wanted)


def test_autocast() -> None:
    model, args = MODELS["attention"]()
    mode = "normal_dropit0.5"
    with autocast_as("bfloat16", torch.device("cpu")):
        captured = admitted(capture(model, args), mode)
        assert {captured.metas[call.args[0].name].dtype for call in packs_of(captured)} == {torch.bfloat16}
        plain = run(twin(model), args, {})
        wrapped = monet_like.ScheduleWrapper(
            twin(model),
            replace(record_for(captured, with_ways(captured, "dropit"), mode, (model, args, {})), autocast="bfloat16"),
            example=(args, {}),
            captured=captured,
        )
        outcome = run(wrapped, args, {})
    changed = {key for key, difference in plain.differences(outcome).items() if difference}
    assert changed == {f"gradient {name}.weight" for name in ("qkv", "out", "wide", "narrow")}


def packs_of(captured: Captured) -> list[Any]:
    return [task.calls[-1] for task in captured.program.tasks if task.variant == "dropit.pack"]


def test_nothing_is_offered_unless_its_word_is_in_the_mode() -> None:
    for name in ("attention", "batch_normed"):
        model, args = MODELS[name]()
        raw = capture(model, args)
        exact = admitted(raw, FULL).program
        assert not any("drop" in t.variant or "lowp" in t.variant for t in with_variants(raw).program.every_task())
        assert admitted(raw, f"{FULL}_dropit0").program.fingerprint == exact.fingerprint
        prints = {exact.fingerprint}
        for word in ("dropit0.9", "lowp16", "lowp8"):
            program = admitted(raw, f"{FULL}_{word}").program
            prints.add(program.fingerprint)
            assert {task.word for task in program.every_task()} - {t.word for t in exact.every_task()} == {word}
        assert len(prints) == 4


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("word", ["dropit0.5_lowp16", "dropit0.99_lowp8"])
def test_the_fingerprint_is_that_of_any_batch(word: str) -> None:
    model = Attention()
    found = {admitted(capture(model, (torch.randn(n, 6, 32),)), word).program.fingerprint for n in (1, 200)}
    assert len(found) == 1


def test_layers_opt_out() -> None:
    model, args = MODELS["attention"]()
    model.wide.no_dropit = True
    captured = admitted(capture(model, args), "dropit0.9")
    plain = run(twin(model), args, {})
    outcome = replayed((model, args, {}), captured, with_ways(captured, "dropit"), "dropit0.9", measured=False)
    changed = {key for key, difference in plain.differences(outcome).items() if difference}
    assert changed == {f"gradient {name}.weight" for name in ("qkv", "out", "narrow")}


def test_a_weight_used_twice_and_one_of_nothing_but_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = nn.Linear(6, 6, bias=False), nn.Parameter(torch.randn(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x.sin()).sin()) @ (self.other.cos() @ self.layer.weight)

    captured = admitted(capture(Tied(), (torch.randn(5, 6),)), "dropit0.5")
    ways = [way for ways in captured.program.slots for way in ways if way.variant == "dropit"]
    # The layer's two calls. Of the last product both operands are made anew cheaply or no layer's input.
    assert len(ways) == 2


@pytest.mark.parametrize(
    ("numel", "share", "itemsize", "wanted"),
    [
        (10, 0.9, 4, 1 * 4 + 2),
        (100, 0.9, 4, 10 * 4 + 13),
        (1000, 0.9, 4, 100 * 4 + 125),
        (1 << 20, 0.9, 4, 64 * 1638 * 4 + (1 << 17)),  # 13.1 % of float32
        (1 << 20, 0.5, 2, (1 << 20) + (1 << 17)),  # 56 % of bfloat16, where int32 places take 150 %
        (1 << 20, 0.99, 2, 64 * 164 * (2 + 2)),
    ],
)
def test_bytes_of_a_cache(numel: int, share: float, itemsize: int, wanted: int) -> None:
    assert largest_bytes(numel, kept_of_block(share), itemsize) == wanted
    assert largest_kept(numel, LARGEST_BLOCK) == numel


def test_caches_count_what_they_hold() -> None:
    model, args = MODELS["batch_normed"]()
    program = admitted(capture(model, args), f"{FULL}_dropit0.9_lowp16_lowp8").program
    elements = 4 * 16 * 10 * 10
    kept = largest_kept(elements, 1638)
    sizes = {
        "largest": largest_bytes(elements, 1638, 4),
        "largest.int8": int8_bytes(kept),
        "largest.index": elements // 8,
        "bfloat16": 2 * elements,
        "int8": int8_bytes(elements),
    }
    for suffix, size in sizes.items():
        found = [value.bytes for value in program.values if value.name.endswith(f".{suffix}")]
        assert found.count(size) >= 3, suffix


# ---- lower precision ----


def restoring(captured: Captured, word: str) -> Schedule:
    """Everything that has a copy in fewer bits is kept as that, and made again before the first slot that reads it."""
    program = captured.program
    schedule = store_all(program)
    packs = {p for p, task in enumerate(program.tasks) if task.variant == f"{word}.pack"}
    restores = {task.writes[0]: p for p, task in enumerate(program.tasks) if task.variant == f"{word}.restore"}
    again = []
    for slot, ways in enumerate(program.slots):
        wanted = [restores.pop(v) for v in program.forward_reads(ways[schedule.ways[slot]]) if v in restores]
        again.append(tuple(sorted((*schedule.again[slot], *wanted))))
    return replace(schedule, forward=tuple(sorted((*schedule.forward, *packs))), again=tuple(again))


def rounded(x: Tensor, word: str) -> Tensor:
    """What comes back of a tensor from its copy in fewer bits."""
    if "lowp8" in word:
        return torch.ops.monet_like.unpack_int8(torch.ops.monet_like.pack_int8(x), x.shape, x.dtype, x.stride())
    return x.bfloat16().to(x.dtype)


def with_saved_tensors_rounded(made: Made, word: str) -> Outcome:
    """Plain PyTorch, what autograd saves of the forward rounded: the definition of the words.

    Statistics are exempt: they have one dimension, or one number or (attention's) one per position in the last.
    """
    model, args = twin(made[0]), made[1]
    exempt = {t.data_ptr() for t in (*model.parameters(), *model.buffers(), *args)}

    def pack(t: Tensor) -> Tensor:
        small = t.dim() < 2 or t.shape[-1] in (1, args[0].shape[1])
        free = t.is_floating_point() and t.untyped_storage().data_ptr() not in exempt and not small
        return rounded(t.detach(), word) if free else t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        return run(model, args, {})


@pytest.mark.parametrize("name", ["attention", "convolutions", "channels_last", "batch_normed"])
@pytest.mark.parametrize("word", ["lowp16", "lowp8"])
def test_lower_precision_is_rounding_what_autograd_saves(name: str, word: str) -> None:
    model, args = made = MODELS[name]()
    captured = admitted(capture(model, args), word)
    plain = run(twin(model), args, {})
    outcome = replayed((model, args, {}), captured, restoring(captured, word), word, measured=False)
    differences = plain.differences(outcome)
    assert {d for key, d in differences.items() if key.startswith(("output", "buffer"))} == {0.0}
    assert 1e-4 < max(differences.values()) <= (0.01 if word == "lowp16" else 0.05)
    if (name, word) != ("attention", "lowp8"):  # whose heads autograd saves as views, in blocks of other elements
        assert max(with_saved_tensors_rounded(made, word).differences(outcome).values()) <= 1e-5


def test_lowp16_leaves_16_bits_alone() -> None:
    model, args = MODELS["bfloat16"]()
    raw = capture(model, args)
    assert admitted(raw, "lowp16").program == admitted(raw, "normal").program
    assert "lowp8.pack" in {task.variant for task in admitted(raw, "lowp8").program.tasks}


def test_no_forward_task_can_read_what_is_restored() -> None:
    model, args = MODELS["batch_normed"]()
    program = admitted(capture(model, args), f"{FULL}_lowp16_lowp8_dropit0.9").program
    lossy = [task for task in program.tasks if task.word in ("lowp16", "lowp8", "dropit0.9")]
    assert {task.runs for task in lossy if "pack" in task.variant} == {"first"}
    assert {task.runs for task in lossy if "restore" in task.variant} == {"again"}
    outputs = set(program.outputs)
    assert not any(outputs & set(task.writes) for task in lossy)


@pytest.mark.slow(every=4)
@pytest.mark.parametrize("name", ["attention", "batch_normed"])
@pytest.mark.parametrize("word", ["lowp16_dropit0.5", "lowp8_dropit0.9"])
def test_any_schedule_has_an_exact_forward(name: str, word: str) -> None:
    model, args = MODELS[name]()
    mode = f"inplace_multiway_newnode_{word}"
    captured = admitted(capture(model, args), mode)
    plain = run(twin(model), args, {})
    for seed in range(3):
        schedule = random_schedule(captured.program, seed, drop=0.5, others=0.7)
        differences = plain.differences(replayed((model, args, {}), captured, schedule, mode, measured=False))
        assert {d for key, d in differences.items() if key.startswith(("output", "buffer"))} == {0.0}


def test_dropouts_mask_is_exact() -> None:
    model, args = Attention(dropout=0.3), (torch.randn(2, 6, 32, requires_grad=True),)
    captured = admitted(capture(model, args), "lowp8")
    noises = {v for v, value in enumerate(captured.program.values) if value.name.endswith(".noise")}
    assert len(noises) == 2
    assert not any(noises & set(task.writes) for task in captured.program.tasks if task.word == "lowp8")


# ---- the planner's choice ----


def planned(made: Made, mode: str, share: float) -> tuple[Captured, Mapping[str, Cost], Schedule]:
    """A plan at a share of plain PyTorch's peak: seconds by a device's rates, workspace measured."""
    model, args = made
    captured = admitted(capture(model, args), mode)
    space = costs_of(captured, (model, args, {}), mode, timed=False)
    quick = replace(DEVICES["cpu"], launch_seconds=1e-9)
    costs = {key: Cost(c.seconds, space[key].workspace_bytes) for key, c in roofline(captured, quick).items()}
    program = captured.program
    peak = simulate(program, store_all(program), costs).peak_bytes
    schedule = find_start(Instance(program, costs), int(share * peak), evaluations=1000)
    assert schedule is not None
    return captured, costs, schedule


def chosen(captured: Captured, schedule: Schedule) -> list[str]:
    program = captured.program
    again = [p for tasks in schedule.again for p in tasks]
    names = [program.tasks[p].variant for p in (*schedule.forward, *again)]
    return names + [program.slots[s][k].variant for s, k in enumerate(schedule.ways)]


def dropping(names: list[str]) -> int:
    return names.count("dropit") + names.count("dropit.product")


def test_it_drops_where_that_pays() -> None:
    """Each layer's input is read by its weight's gradient alone, and costs a product to make again."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    captured, _, schedule = planned((model, (torch.randn(2048, 64),)), "dropit0.9", 0.7)
    names = chosen(captured, schedule)
    assert dropping(names) == names.count("dropit.pack") > 0
    assert schedule.rerun_count == 0


@pytest.mark.slow
def test_copies_are_worth_more_than_running_again() -> None:
    """The search finds them beside reruns: a step that fits by either is faster with both."""
    made = batch_normed(), (torch.randn(64, 3, 24, 24),)
    seconds = {}
    for word in ("normal", "lowp16", "lowp8"):
        captured, costs, schedule = planned(made, f"inplace_multiway_newnode_{word}", 0.5)
        seconds[word] = simulate(captured.program, schedule, costs).seconds
    assert seconds["lowp8"] < seconds["lowp16"] < seconds["normal"]


@pytest.mark.slow
def test_it_does_not_drop_what_is_held_anyhow() -> None:
    """ReLU's gradient reads what the next layer's weight gradient reads."""
    model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.ReLU())))
    for share in (1.0, 0.7):
        captured, _, schedule = planned((model, (torch.randn(2048, 64),)), "dropit0.9", share)
        assert dropping(chosen(captured, schedule)) == 0
    # With ReLU's signs in bits they are no longer held.
    captured, _, schedule = planned((model, (torch.randn(2048, 64),)), "newnode_dropit0.9", 0.55)
    assert dropping(chosen(captured, schedule)) > 0


@pytest.mark.slow(but=["lowp8-batch_normed", "dropit0.9-batch_normed"])
@pytest.mark.parametrize("kind", ["attention", "batch_normed"])
@pytest.mark.parametrize("word", ["dropit0.9", "lowp16", "lowp8", "dropit0.9_lowp8"])
def test_end_to_end(kind: str, word: str) -> None:
    """Plan, replay: the forward's bits, gradients that differ where they may, the peak in bytes."""
    blocks = nn.Sequential(*(Attention(64) for _ in range(2))), (torch.randn(16, 64, 64, requires_grad=True),)
    made = blocks if kind == "attention" else (batch_normed(), (torch.randn(64, 3, 24, 24, requires_grad=True),))
    mode = f"inplace_multiway_newnode_{word}"
    captured, costs, schedule = planned(made, mode, 0.5)
    names = chosen(captured, schedule)
    lossy = sum(name.startswith(("dropit", "lowp")) for name in names)
    plain = run(twin(made[0]), made[1], {})
    outcome = replayed((*made, {}), captured, schedule, mode)
    differences = plain.differences(outcome)
    assert {d for key, d in differences.items() if key.startswith(("output", "buffer"))} == {0.0}
    assert lossy > 0 and max(differences.values()) > 0
    weights = {f"gradient {name}.weight" for name, layer in made[0].named_modules() if type(layer).__name__ in LAYERS}
    if "lowp" in word:
        # ReLU's signs, made again from batch norm's input in 8 bits, flip within half a unit (about 1.6 % of a
        # deviation) of zero: 0.3 % of them, each wholly wrong, so 6 % of a gradient's norm, and that in up to three
        # layers.
        assert max(d for key, d in differences.items() if "dropit" not in word or key not in weights) <= 0.25
    else:
        assert {key for key, d in differences.items() if d} <= weights
    predicted = simulate(captured.program, schedule, costs).peak_bytes
    measured = captured.program.resident_bytes + outcome.rise_bytes
    assert abs(measured - predicted) <= 0.002 * predicted
