"""What fits on which card: the step by parts against the simulator on the whole model, LoRA, optimizers,
the command.
"""

from __future__ import annotations

import functools
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from monet_like import fits
from monet_like.capture.captured import allocated_bytes
from monet_like.capture.lower.step import capture
from monet_like.cards.decoder import Question, read_question
from monet_like.cards.largest import largest_where
from monet_like.cards.pieces import CUDA, Capturing, Pieces
from monet_like.cards.points import alike, checkpointed, own_point, priced
from monet_like.cards.step import step_of, with_way
from monet_like.cards.table import Fits
from monet_like.cli import main
from monet_like.errors import CaptureError, UsageError
from monet_like.ir.schedule import kept_values
from monet_like.ir.simulate import Report, simulate
from monet_like.ir.step import peak_of
from monet_like.models import Decoder, Shape
from monet_like.plan.baseline import plain_report, store_all
from monet_like.plan.bound.pieces import Prices, amounts_of, block_relaxation
from monet_like.plan.random_schedules import random_schedule
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
def captured_parts(
    model: Small | str, batch: int = 2, length: int = 128, capability: tuple[int, int] | None = CARD.capability,
    **options: object,
) -> Pieces:  # fmt: skip
    """The parts of a model, which do not depend on an optimizer whose step is apart."""
    return Capturing(read(model, **options)).at(batch, length, capability)


def by_parts(
    model: Small | str, way: str, batch: int = 2, length: int = 128, card: DeviceLimits = CARD, cublas: bool = False,
    optimizer: str = "none", **options: object,
) -> tuple[int, str, Pieces]:  # fmt: skip
    """Peak and moment of a way by parts, with or without what cuBLAS keeps; the model gets the dtype of
    the question.
    """
    pieces = captured_parts(model, batch, length, card.capability, **options)
    prices = {piece: priced(piece.captured, (), roofline(piece.captured, card)) for piece in pieces.every}
    step = step_of(read(model, optimizer=optimizer, **options), pieces, card.cublas_bytes if cublas else 0)
    return *peak_of(step, with_way(pieces, lambda piece: prices[piece].of(way))), pieces


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_plain_by_parts_is_plain_of_the_whole(tied: bool) -> None:
    """The peak is in the head, where all is kept: equal but for scalars that the parts count apart."""
    model = Small(tied=tied)
    peak, moment, pieces = by_parts(model, "plain")
    expected = plain_whole(model)
    assert "head" in moment
    assert abs(peak - expected.peak_bytes) <= 4 * 512, (peak, expected.peak_bytes)
    assert len(pieces.kinds) == 1 and len(pieces.kind_of) == model.blocks
    seconds = sum(
        simulate(p.captured.plain, store_all(p.captured.plain), roofline(p.captured, CARD)).seconds * count
        for p, count in zip(pieces.every, (model.blocks, 1, 1), strict=True)
    )
    assert seconds == pytest.approx(expected.seconds, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("vocabulary", "part"), [(2, "backward of block 1"), (256, "backward of the head and loss")])
def test_the_peak_is_the_same_wherever_it_is(vocabulary: int, part: str) -> None:
    model = Small(vocabulary=vocabulary)
    peak, moment, _ = by_parts(model, "plain")
    assert (peak, moment) == (plain_whole(model).peak_bytes, part)


def test_a_checkpoint_keeps_the_stream_alone_and_runs_the_block_again() -> None:
    peak, _, pieces = by_parts(Small(), "checkpoint")
    kept, _, _ = by_parts(Small(), "plain")
    (block,) = pieces.kinds
    point = priced(block.captured, (), roofline(block.captured, CARD)).checkpoint
    plain = block.captured.plain
    assert point.carried_bytes == 0 and plain.values[point.shared[0]].name == "input0"
    schedule = checkpointed(plain)
    again = [plain.tasks[index] for index in schedule.again[0]]
    # All but the last residual sum: nothing in the backward needs it or the product before it.
    assert len(again) == len(store_all(plain).forward) - 2
    assert peak < kept


def test_frozen_weights_have_no_gradients() -> None:
    _, _, pieces = by_parts(Small(), "plain", lora=4)
    (block,) = pieces.kinds
    names = [
        name for (index, _) in block.captured.parameter_gradients for name in [block.captured.parameters[index][0]]
    ]
    assert len(names) == 14 and all("lora_" in name for name in names)
    assert pieces.start is None and not pieces.end.captured.parameter_gradients


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
@pytest.mark.parametrize("quant", ["nf4", "nf4_double", "int8"])
def test_quantised_weights_are_made_again_and_never_kept(quant: str) -> None:
    pytest.importorskip("bitsandbytes")
    _, _, pieces = by_parts(Small(), "plain", lora=4, quant=quant)
    (block,) = pieces.kinds
    plain = block.captured.plain
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
    pieces = captured_parts(model, optimizer="adamw8bit", optimizer_in_backward=True)
    asked = read(model, optimizer="adamw8bit", optimizer_in_backward=True)
    assert [piece.gradient_bytes for piece in pieces.every] == [0, 0, 0]
    moments = {moment.name: moment.base_bytes for moment in step_of(asked, pieces, 0).moments}
    assert "the optimizer's step" not in moments
    apart = captured_parts(model)
    later = step_of(read(model, optimizer="adamw8bit"), apart, 0)
    whole_step = {moment.name: moment.base_bytes for moment in later.moments}
    weights = 512 * 64 * 2
    first = whole_step["backward of block 1"] - moments["backward of block 1"]
    assert first == apart.end.gradient_bytes - weights * tied


@pytest.mark.slow
def test_full_fine_tuning_with_an_optimizer_in_the_backward_is_planned_at_sixty_percent() -> None:
    asked = {"optimizer": "adamw8bit", "optimizer_in_backward": True}
    plain, _, _ = by_parts("3B", "plain", 8, 2048, DEVICES["h200"], True, **asked)  # type: ignore[arg-type]
    budget = int(0.6 * plain)
    card = replace(DEVICES["h200"], name="less", memory_bytes=budget)
    found = fits("3B", batch=8, cards=[card], reserve="0", largest="", **asked)  # type: ignore[arg-type]
    assert found.row("less", "plain").peak_bytes == plain
    ours = found.row("less", "ours")
    assert ours.fits and ours.peak_bytes <= budget and ours.seconds is not None and ours.bound_seconds is not None
    assert ours.bound_seconds <= ours.seconds <= 1.01 * ours.bound_seconds
    assert not found.row("less", "plain").fits


@pytest.mark.slow(but=["head and loss"])
@pytest.mark.parametrize("name", ["block", "head and loss"])
def test_random_schedules_cost_no_less_than_the_bound(name: str) -> None:
    """Of the parts of a small decoder, at random prices; the cheapest of our schedules comes near."""
    rng = random.Random(0)
    piece = next(piece for piece in captured_parts(Small()).every if piece.name == name)
    program, costs = piece.captured.program, roofline(piece.captured, CARD)
    relaxation = block_relaxation(program, costs)
    points = [own_point(piece.captured, random_schedule(program, seed), costs) for seed in range(60)]
    seconds = points[0].seconds
    prices = [Prices(*(rng.choice((0.0, seconds / 2 ** rng.randint(14, 26))) for _ in range(3))) for _ in range(25)]
    matrices = [relaxation.priced(price) for price in prices]
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
    cards = [CARD, "h100", replace(CARD, name="less", memory_bytes=free + 2**20)]
    found = fits(
        Small(2).made(), batch=2, length=128, cards=cards, attention="flash", optimizer="none", reserve="39.9 GB"
    )  # fmt: skip
    assert found.reserve_bytes == free
    return found


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
    budget = CARD.memory_bytes - answered.reserve_bytes
    for way in ("plain", "checkpoint"):
        most = answered.row("a100", way).largest
        assert most is not None and most > 2
        fit, more = (by_parts(Small(2), way, batch, cublas=True, attention="flash")[0] for batch in (most, most + 1))
        assert fit <= budget < more, way


@pytest.mark.slow
def test_gradients_are_made_last_alike_at_all_sizes() -> None:
    """Which ones that pays for depends on the size, and a schedule is for one order of the slots."""
    capturing = Capturing(read_question("8B"))
    first = capturing.at(1, 2048, (9, 0))
    own, alike_here = (capturing.at(1, 4096, (9, 0), like) for like in (None, first))
    assert first.kinds[0].captured.made_last != own.kinds[0].captured.made_last
    assert not alike(first.kinds[0].captured, own.kinds[0].captured)
    assert all(alike(a.captured, b.captured) for a, b in zip(first.every, alike_here.every, strict=True))


def test_the_largest_number() -> None:
    for most in (0, 1, 2, 7, 8, 100):
        for begin in (1, 4, 9):
            assert largest_where(lambda n, most=most: n <= most, begin) == most  # type: ignore[misc]


@pytest.mark.slow
def test_what_does_not_fit_says_by_how_much(answered: Fits) -> None:
    for way in ("plain", "checkpoint", "ours"):
        row = answered.row("less", way)
        assert not row.fits and row.missing_bytes == row.peak_bytes - (row.memory_bytes - answered.reserve_bytes)
    assert answered.row("less", "ours").peak_bytes <= answered.row("less", "checkpoint").peak_bytes
    assert " too much" in answered.table()[1][2][4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cards": ["rtx9"]}, r"^card 'rtx9' is unknown; choose of p100, a100"),
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


def test_models_without_parts_and_with_weights() -> None:
    with torch.device("meta"):
        net = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with pytest.raises(
        UsageError, match=r"^Sequential is not a decoder whose blocks are known: it has no model\.embed_tokens, "
    ):
        fits(net)
    with pytest.raises(UsageError, match=r"^Sequential is not on the meta device, and its weights are not needed here"):
        fits(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    with pytest.raises(UsageError, match=r"there\.json is not the config\.json of a model"):
        fits("transformers:LlamaForCausalLM(there.json)")


def test_a_model_of_transformers_has_the_parts(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    transformers.LlamaConfig(num_hidden_layers=2, vocab_size=512, **sizes).save_pretrained(tmp_path)
    asked = read_question(f"transformers:LlamaForCausalLM({tmp_path})", optimizer="none")
    pieces = Capturing(asked).at(2, 128, CARD.capability)
    mine = captured_parts(Small())
    assert pieces.kind_of == mine.kind_of == (0, 0)
    assert [piece.gradient_bytes for piece in pieces.every] == [piece.gradient_bytes for piece in mine.every]


@pytest.mark.parametrize(
    ("model", "config", "options", "said"),
    [
        (
            "Gemma2ForCausalLM",
            "Gemma2Config",
            {},
            r"computes attention by code of its own \(caps or sinks of its scores",
        ),
        ("Gemma3ForCausalLM", "Gemma3TextConfig", {}, "has rotary positions for each kind of layer"),
        ("MistralForCausalLM", "MistralConfig", {"sliding_window": 64}, "look 64 tokens back.*a length of at most 64"),
    ],
)
def test_a_decoder_of_transformers_that_is_counted_wrongly_is_refused(
    model: str, config: str, options: dict[str, int], said: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    getattr(transformers, config)(num_hidden_layers=2, vocab_size=512, **sizes, **options).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=said):
        fits(f"transformers:{model}({tmp_path})", length=65)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Qwen3", "Phi3", "Olmo2", "Mixtral", "SmolLM3"])
def test_decoders_of_transformers_have_the_parts(kind: str, tmp_path: Path) -> None:
    """The parts, one after the other, have the parameters of the whole model."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, f"{kind}Config")(num_hidden_layers=2, vocab_size=512, pad_token_id=0, **sizes)
    config.save_pretrained(tmp_path)
    asked = read_question(f"transformers:{kind}ForCausalLM({tmp_path})", optimizer="none")
    pieces = Capturing(asked).at(2, 128, CARD.capability)
    assert pieces.kind_of == (0, 0)
    head = asked.model.lm_head.weight
    tied = [head] if head is asked.model.model.embed_tokens.weight else []  # has a gradient at either end
    counted = [pieces.start, *pieces.kinds, *pieces.kinds, pieces.end]
    expected = [allocated_bytes(p.numel() * p.element_size(), CUDA) for p in (*asked.model.parameters(), *tied)]
    assert sum(piece.gradient_bytes for piece in counted if piece) == sum(expected)


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
