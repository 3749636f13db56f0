"""What fits on which card: the step by pieces against the simulator on the whole model, LoRA, the command."""

from __future__ import annotations

import functools
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from monet_like import fits
from monet_like.auto.fits.answer import Answer
from monet_like.auto.fits.fits import CARDS
from monet_like.auto.fits.pieces import CUDA, Capturing, Pieces
from monet_like.auto.fits.points import alike, checkpointed, own_point, priced
from monet_like.auto.fits.question import Question, read_question
from monet_like.auto.fits.step import step_of
from monet_like.auto.fits.table import Fits
from monet_like.capture.lower.step import capture
from monet_like.cli import main
from monet_like.errors import CaptureError, UsageError
from monet_like.ir.schedule import kept_values
from monet_like.ir.simulate import Report, simulate
from monet_like.ir.step import peak_of
from monet_like.ir.units import parse_budget
from monet_like.models import Decoder, Shape
from monet_like.plan.baseline import plain_report, store_all
from monet_like.plan.bound.pieces import Prices, amounts_of, block_relaxation
from monet_like.plan.random_schedules import random_schedule
from monet_like.profile.card_budget import on_card
from monet_like.profile.devices import DEVICES, DeviceLimits
from monet_like.profile.roofline import roofline
from monet_like.solvers.pool import Pool

CARD = DEVICES["a100"]


@dataclass(frozen=True)
class Small:
    """A small decoder; its captures are shared by all tests that ask for the same."""

    blocks: int = 2
    tied: bool = False
    vocabulary: int = 512

    def made(self) -> Decoder:
        shape = Shape(
            width=64, blocks=self.blocks, heads=4, groups=2, hidden=192, vocabulary=self.vocabulary, tied=self.tied
        )
        with torch.device("meta"):
            return Decoder(shape, length=128)


def plain_whole(model: Small, batch: int = 2) -> Report:
    """Plain PyTorch's step of the whole model in bfloat16."""
    inputs = tuple(torch.zeros(batch, 128, dtype=torch.long, device="meta") for _ in range(2))
    captured = capture(model.made().to(torch.bfloat16), inputs, target=CUDA, capability=CARD.capability)
    return plain_report(captured.plain, roofline(captured, CARD), 0, autograd_nodes=captured.autograd_nodes)


def read(model: Small | str, **options: object) -> Question:
    return read_question(model if isinstance(model, str) else model.made(), **options)  # type: ignore[arg-type]


@functools.cache
def _captured(model: Small | str, *sizes: Any, **options: object) -> Pieces:
    return Capturing(read(model, **options)).at(*sizes)


def captured_pieces(
    model: Small | str, batch: int = 2, length: int = 128, capability: tuple[int, int] | None = CARD.capability,
    **options: object,
) -> Pieces:  # fmt: skip
    """The pieces of a model, which do not depend on an optimizer whose step is apart."""
    return _captured(model, batch, length, capability, **options)


def by_pieces(
    model: Small | str, way: str, batch: int = 2, length: int = 128, card: DeviceLimits = CARD, cublas: bool = False,
    optimizer: str = "none", **options: object,
) -> tuple[int, str, Pieces]:  # fmt: skip
    """Peak and moment of a way by pieces, with or without what cuBLAS keeps; the model gets the question's dtype."""
    pieces = captured_pieces(model, batch, length, card.capability, **options)
    prices = {piece: priced(piece.captured, (), roofline(piece.captured, card)) for piece in pieces.kinds}
    points = [prices[piece].of(way) for piece in pieces.order]
    asked = read(model, optimizer=optimizer, **options)
    step = step_of(asked, pieces, card.cublas_bytes if cublas else 0, [point.shared for point in points])
    return *peak_of(step, points), pieces


@pytest.mark.slow(but=["512-False"])
@pytest.mark.parametrize(("vocabulary", "tied"), [(2, False), (512, False), (256, True)])
def test_plain_by_pieces_is_plain_of_the_whole(vocabulary: int, tied: bool) -> None:
    """To the byte, whether the peak is in a layer or in the head, where all is kept."""
    model = Small(tied=tied, vocabulary=vocabulary)
    peak, moment, pieces = by_pieces(model, "plain")
    expected = plain_whole(model)
    assert peak == expected.peak_bytes
    assert moment == f"backward of {'layers.1' if vocabulary == 2 else 'what is after layers.1'}"
    assert [part.kind for part in pieces.ranges] == [0, 1, 1, 2]
    seconds = sum(
        simulate(p.captured.plain, store_all(p.captured.plain), roofline(p.captured, CARD)).seconds
        for p in pieces.order
    )
    assert seconds == pytest.approx(expected.seconds, rel=0.02)


def test_a_checkpoint_keeps_the_stream_alone_and_runs_the_block_again() -> None:
    peak, _, pieces = by_pieces(Small(), "checkpoint")
    kept, _, _ = by_pieces(Small(), "plain")
    block = pieces.kinds[1]
    point = priced(block.captured, (), roofline(block.captured, CARD)).checkpoint
    plain = block.captured.plain
    assert point.carried_bytes == 0 and plain.values[point.shared[0]].name == "input0"
    schedule = checkpointed(plain)
    again = [plain.tasks[index] for index in schedule.again[0]]
    # All but the last residual sum: nothing in the backward needs it or the product before it.
    assert len(again) == len(store_all(plain).forward) - 2
    assert peak < kept


def test_frozen_weights_have_no_gradients() -> None:
    """The embedding has no backward, so the first layer's input has no gradient: that layer is a piece of its own."""
    _, _, pieces = by_pieces(Small(), "plain", lora=4)
    assert [part.kind for part in pieces.ranges] == [-1, 0, 1, 2]
    for piece in pieces.kinds[:2]:
        assert len(piece.captured.parameter_gradients) == 14
    assert not pieces.kinds[0].captured.input_gradients and len(pieces.kinds[1].captured.input_gradients) == 1
    assert not pieces.kinds[2].captured.parameter_gradients


def test_bytes_of_quantised_weights_are_those_of_bitsandbytes() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def theirs(**options: object) -> torch.nn.Module:
        return bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", **options).to("cpu")  # type: ignore[no-any-return]

    def ours(quant: str) -> dict[str, tuple[torch.dtype, int]]:
        modules = read(Small(1), lora=4, quant=quant).model.named_modules()
        layer = next(module for name, module in modules if name.endswith("q_proj.base"))
        return {name: (buffer.dtype, buffer.numel()) for name, buffer in layer.named_buffers()}

    def of(tensor: torch.Tensor) -> tuple[torch.dtype, int]:
        return tensor.dtype, tensor.numel()

    plain, nested = theirs(compress_statistics=False), theirs(compress_statistics=True)
    state, inner = plain.weight.quant_state, nested.weight.quant_state  # type: ignore[union-attr]
    assert ours("nf4") == {"weight": of(plain.weight), "scales": of(state.absmax)}  # type: ignore[arg-type, union-attr]
    assert ours("nf4_double") == {
        "weight": of(nested.weight), "scales": of(inner.absmax), "second": of(inner.state2.absmax),  # type: ignore[arg-type, union-attr]
        "code": of(inner.state2.code), "offset": of(inner.offset),  # type: ignore[arg-type, union-attr]
    }  # fmt: skip
    eight = bitsandbytes.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False).to("cpu")
    assert ours("int8") == {"weight": of(eight.weight), "scales": of(eight.weight.SCB)}


@pytest.mark.slow(but=["nf4"])
@pytest.mark.parametrize("quant", ["nf4", "int8"])
def test_quantised_weights_are_made_again_and_never_kept(quant: str) -> None:
    pytest.importorskip("bitsandbytes")
    _, _, pieces = by_pieces(Small(), "plain", lora=4, quant=quant)
    plain = pieces.kinds[1].captured.plain
    made = "aten._to_copy.default" if quant == "int8" else "bitsandbytes.dequantize_4bit.default"
    again = [call.op for task in plain.tasks if task.runs == "again" for call in task.calls]
    assert again.count(made) == (14 if quant == "int8" else 7)  # the scales are cast as well
    wide = {f"bfloat16[{rows}, {columns}]" for rows, columns in ((64, 64), (32, 64), (192, 64), (64, 192))}
    kept = {plain.values[v].spec for v in kept_values(plain, store_all(plain))}
    assert kept and not wide & kept


@pytest.mark.slow(but=["untied"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_an_optimizer_in_the_backward_frees_gradients(tied: bool) -> None:
    """And a tied weight's waits for the embedding's."""
    model = Small(tied=tied)
    pieces = captured_pieces(model, optimizer="adamw8bit", optimizer_in_backward=True)
    asked = read(model, optimizer="adamw8bit", optimizer_in_backward=True)
    for piece in pieces.kinds:
        gradients = {tensor.value for _, tensor in piece.captured.parameter_gradients}
        assert not gradients & set(piece.captured.program.gradients)
    kept: list[tuple[int, ...]] = [()] * len(pieces.order)
    moments = {moment.name: moment.base_bytes for moment in step_of(asked, pieces, 0, kept).moments}
    assert "the optimizer's step" not in moments
    apart = captured_pieces(model)
    later = step_of(read(model, optimizer="adamw8bit"), apart, 0, kept)
    whole_step = {moment.name: moment.base_bytes for moment in later.moments}
    head = sum(size for _, size in apart.ranges[-1].gradients)
    first = whole_step["backward of layers.1"] - moments["backward of layers.1"]
    assert first == head - 512 * 64 * 2 * tied


@pytest.mark.slow(rare=1)
def test_full_fine_tuning_with_an_optimizer_in_the_backward_is_planned_at_sixty_percent() -> None:
    asked = {"optimizer": "adamw8bit", "optimizer_in_backward": True}
    plain, _, _ = by_pieces("3B", "plain", 8, 2048, DEVICES["h200"], True, **asked)  # type: ignore[arg-type]
    budget = int(0.6 * plain)
    card = replace(DEVICES["h200"], name="less", memory_bytes=budget)
    found = fits("3B", batch=8, cards=[card], reserve="0", largest="", **asked)  # type: ignore[arg-type]
    assert found.row("less", "plain").peak_bytes == plain
    ours = found.row("less", "ours")
    assert ours.fits and ours.peak_bytes <= budget and ours.seconds is not None and ours.bound_seconds is not None
    assert ours.bound_seconds <= ours.seconds <= 1.01 * ours.bound_seconds
    assert not found.row("less", "plain").fits


def test_random_schedules_cost_no_less_than_the_bound() -> None:
    """Of the head of a small decoder, at random prices; the cheapest of our schedules comes near."""
    rng = random.Random(0)
    piece = captured_pieces(Small()).kinds[2]
    program, costs = piece.captured.program, roofline(piece.captured, CARD)
    relaxation = block_relaxation(program, costs)
    points = [own_point(piece.captured, random_schedule(program, seed), costs) for seed in range(60)]
    seconds = points[0].seconds
    prices = [Prices(*(rng.choice((0.0, seconds / 2 ** rng.randint(14, 26))) for _ in range(3))) for _ in range(25)]
    matrices = [matrix for price in prices for matrix in relaxation.programs(price)]
    with Pool() as pool:
        answers = pool.solve(matrices, 10.0, 1e-6, lambda: 100.0)
    near = 0
    for price, matrix, answer in zip(prices, matrices, answers, strict=True):
        assert answer is not None and answer["x"] is not None
        bound = (answer["bound"] + matrix.offset) * matrix.seconds_per_unit
        found = own_point(piece.captured, relaxation.schedule(answer["x"]), costs)
        least = min(price.of(amounts_of(point)) for point in (*points, found))
        assert bound <= least * (1 + 1e-9)
        near += bound >= 0.97 * least
    assert near >= 10


@pytest.fixture(scope="module")
def answered() -> Fits:
    """Two cards, and one with a megabyte to use, on which nothing fits; the largest batch of each way on them."""
    free = int(39.9 * 2**30)
    cards: list[str | DeviceLimits] = [CARD, "h100", replace(CARD, name="less", memory_bytes=free + 2**20)]
    found = fits(
        Small(2).made(), batch=2, length=128, cards=cards, attention="flash", optimizer="none", reserve="39.9 GB"
    )  # fmt: skip
    assert found.reserve_bytes == free
    return found


def test_a_step_may_use_what_the_budget_card_is() -> None:
    """Of a card that is free; that budget is rounded down to a whole number of units."""
    answer = Answer(read_question("8B"), 1, 2048, None, print)
    for name in (*CARDS, "rtx3070"):
        card = DEVICES[name]
        budget = on_card(parse_budget("card"), torch.device("cpu"), nn.Module(), absent=card).bytes
        assert 0 <= answer.budget(card) - budget < 256 * 2**20
    assert "; 5 % of each card, at least 1.00 GB, are left free" in Fits("", 1, 1, "", None, (), {}).note


@pytest.mark.slow
def test_rows_and_frame(answered: Fits) -> None:
    assert [(row.card, row.way) for row in answered.rows] == [
        (name, way) for name in ("a100", "h100", "less") for way in ("plain", "checkpoint", "ours")
    ]
    frame = answered.to_frame()
    assert list(frame["way"]) == ["plain", "checkpoint", "ours"] * 3 and frame["seconds"].dtype == "float64"
    plain, again, ours = (answered.row("a100", way) for way in ("plain", "checkpoint", "ours"))
    assert plain.fits and ours.fits and ours.seconds is not None and plain.seconds is not None
    assert ours.seconds <= plain.seconds <= (again.seconds or 0)
    assert 2 <= (plain.largest or 0) < (again.largest or 0) <= (ours.largest or 0)
    assert plain.gap is None and ours.gap is not None and 0 <= ours.gap < 0.01
    assert "predicted" in answered.note and "39.90 GB of each card are left free" in answered.note


@pytest.mark.slow
def test_the_largest_batch_fits_and_the_next_does_not(answered: Fits) -> None:
    """Against captures at these batches: plain and checkpoint per block, whose schedules do not depend on the size."""
    assert answered.reserve_bytes is not None
    budget = CARD.memory_bytes - answered.reserve_bytes
    for way in ("plain", "checkpoint"):
        most = answered.row("a100", way).largest
        assert most is not None and most > 2
        fit, more = (by_pieces(Small(2), way, batch, cublas=True, attention="flash")[0] for batch in (most, most + 1))
        assert fit <= budget < more, way


@pytest.mark.slow
def test_gradients_are_made_last_alike_at_all_sizes() -> None:
    """Which ones that pays for depends on the size, and a schedule is for one order of the slots."""
    capturing = Capturing(read_question("8B"))
    first = capturing.at(1, 2048, (9, 0))
    own, alike_here = (capturing.at(1, 4096, (9, 0), like) for like in (None, first))
    assert first.kinds[1].captured.made_last != own.kinds[1].captured.made_last
    assert not alike(first.kinds[1].captured, own.kinds[1].captured)
    assert all(alike(a.captured, b.captured) for a, b in zip(first.kinds, alike_here.kinds, strict=True))


@pytest.mark.slow
def test_what_does_not_fit_says_by_how_much(answered: Fits) -> None:
    for way in ("plain", "checkpoint", "ours"):
        row = answered.row("less", way)
        assert not row.fits and row.missing_bytes == row.peak_bytes - (row.memory_bytes - answered.reserve_bytes)
    assert answered.row("less", "ours").peak_bytes <= answered.row("less", "checkpoint").peak_bytes
    assert " too much" in answered.table()[1][2][4]
    with pytest.raises(
        UsageError, match=r"^the table has no row for card '24GB' and way 'ours'; it has the cards .*less"
    ):
        answered.row("24GB", "ours")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cards": ["rtx9"]}, r"^card 'rtx9' is unknown; choose one of p100, a100"),
        ({"cards": ["cpu"]}, r"^card 'cpu' is unknown"),
        ({"largest": "width"}, r"^largest 'width' is unknown; give batch, length or nothing$"),
        ({"batch": 0}, r"^batch 0 must be at least 1"),
        (
            {"quant": "nf4"},
            r"^--quant nf4 is for frozen weights, and without --lora all weights are trained; add --lora 16$",
        ),
        ({"quant": "fp3", "lora": 4}, r"^quantisation 'fp3' is unknown; give nf4, nf4_double or int8$"),
        ({"lora": -1}, r"^LoRA rank -1 must be at least 1$"),
        ({"optimizer": "lion"}, r"^optimizer 'lion' is unknown"),
        ({"attention": "paged"}, r"^attention 'paged' is unknown"),
    ],
)
def test_wrong_arguments(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fits(Small(1).made(), **options)  # type: ignore[arg-type]


def test_models_that_cannot_be_asked_about() -> None:
    with torch.device("meta"):
        net = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with pytest.raises(CaptureError, match=r"not run on fake tensors: .*its input was taken to be \['batch', 3, 22"):
        fits(net, cards=["a100"])
    with pytest.raises(CaptureError, match=r"no result that requires a gradient"):
        fits(net, torch.zeros(2, 4), cards=["a100"], loss=lambda result: result.detach())
    with pytest.raises(UsageError, match=r"^Sequential is not on the meta device, and its weights are not needed here"):
        fits(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    with pytest.raises(UsageError, match=r"there\.json is not the config\.json of a model"):
        fits("transformers:LlamaForCausalLM(there.json)")
    with pytest.raises(UsageError, match=r"^the step of Sequential has no length that could be another"):
        fits(net, torch.zeros(2, 4), length=5)


SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}


def of_transformers(kind: str, folder: Path, batch: int = 2, **options: object) -> Pieces:
    """The pieces of a small decoder of Transformers, by its config."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(num_hidden_layers=2, vocab_size=512, **SIZES, **options)
    config.architectures = [f"{kind}ForCausalLM"]
    config.save_pretrained(folder)
    return Capturing(read_question(str(folder), optimizer="none")).at(batch, 128, CARD.capability)


def test_a_model_of_transformers_is_the_same_step(tmp_path: Path) -> None:
    pieces, mine = of_transformers("Llama", tmp_path), captured_pieces(Small())
    assert [part.kind for part in pieces.ranges] == [part.kind for part in mine.ranges]
    for one, other in zip(pieces.ranges, mine.ranges, strict=True):
        assert sorted(size for _, size in one.gradients) == sorted(size for _, size in other.gradients)


@pytest.mark.slow(rare=2)
@pytest.mark.parametrize("kind", ["Qwen3", "Phi3", "Olmo2", "Mixtral", "SmolLM3"])
def test_decoders_of_transformers_have_equal_layers(kind: str, tmp_path: Path) -> None:
    pieces = of_transformers(kind, tmp_path, pad_token_id=0)
    assert [part.kind for part in pieces.ranges] == [0, 1, 1, 2]


def test_a_mask_is_refused_where_only_the_gpu_knows_how_it_is_read(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MistralConfig(num_hidden_layers=2, vocab_size=512, sliding_window=64, **SIZES)
    config.save_pretrained(tmp_path)
    with pytest.raises(CaptureError, match="use is_causal=True instead of the mask, or name it with --attention math"):
        fits(f"transformers:MistralForCausalLM({tmp_path})", length=65)


@pytest.mark.slow
def test_whisper_has_layers_of_two_kinds(tmp_path: Path) -> None:
    """And its inputs are sounds; all lengths follow from its config."""
    transformers = pytest.importorskip("transformers")
    sizes = {"layers": 2, "ffn_dim": 64, "attention_heads": 4}
    both = {f"{part}_{of}": size for part in ("encoder", "decoder") for of, size in sizes.items()}
    config = transformers.WhisperConfig(
        d_model=64, vocab_size=512, max_source_positions=100, max_target_positions=64, decoder_start_token_id=1,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, architectures=["WhisperForConditionalGeneration"], **both,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    asked = read_question(f"transformers:{tmp_path / 'config.json'}", optimizer="none")
    assert asked.steps.sizes == {"batch": 1}
    kinds = [part.kind for part in Capturing(asked).at(1, 64, CARD.capability).ranges]
    assert len(kinds) == 7 and kinds[1] == kinds[2] != kinds[4] == kinds[5]


def test_attention_that_a_card_does_not_take_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"depends on the card|does not take these arguments"):
        Capturing(read(Small(1), attention="cudnn")).at(1, 1, CARD.capability)


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Fits] = []

    def once(*args: object, **options: object) -> Fits:
        answers.extend([] if answers else [fits(*args, **options)])  # type: ignore[arg-type]
        return answers[0]

    monkeypatch.setattr("monet_like.cli.fits.predict", once)
    file = tmp_path / "small.py"
    file.write_text(
        "from monet_like.models import Decoder, Shape\n\n\ndef make():\n"
        "    return Decoder(Shape(width=64, blocks=2, heads=4, groups=2, hidden=192, vocabulary=512))\n"
    )
    arguments = ["fits", f"{file}:make", "--seq", "128", "--cards", "a100", "--largest", "off", "--optimizer", "none"]
    shown = CliRunner(env={"COLUMNS": "160"}).invoke(
        main, [*arguments, "--csv", str(tmp_path / "fits.csv")], catch_exceptions=False
    )
    assert shown.exit_code == 0, shown.output
    lines = [line.rstrip() for line in shown.stdout.splitlines()]
    assert lines[0].endswith("make, all parameters trained, bfloat16, none; batch 1, 128 tokens")
    assert lines[1].split("  ")[0] == "card" and "checkpoint per block" in lines[1] and "our plan" in lines[1]
    assert lines[2].startswith("a100") and " MB, +" in lines[2]
    assert lines[3].startswith("predicted: bytes as the simulator counts them, seconds from datasheet rates")
    rows = (tmp_path / "fits.csv").read_text().splitlines()
    assert rows[0].startswith("card,memory_bytes,way,fits,peak_bytes,") and len(rows) == 4
    told = CliRunner().invoke(main, [*arguments, "--json"], catch_exceptions=False)
    content = json.loads(told.stdout)
    assert [row["way"] for row in content["rows"]] == ["plain", "checkpoint", "ours"]
    assert content["rows"][0]["peak_bytes"] == int(rows[1].split(",")[4])
    wrong = CliRunner().invoke(main, ["fits", "8B", "--cards", ","])
    assert wrong.exit_code == 2 and "--cards names no card" in wrong.stderr
