"""The last linear layer and its loss in parts: the gradients of the whole, without the logits of the whole."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from replays import CPU, FULL, costs_of, record_for
from taking import taking
from torch import Tensor, nn
from torch.nn import functional as F
from training import twin

from monet_like.capture.captured import Captured
from monet_like.capture.lower.step import capture
from monet_like.ir.program import Task
from monet_like.ir.schedule import Schedule
from monet_like.ir.simulate import simulate
from monet_like.plan.baseline import store_all
from monet_like.profile.devices import DEVICES
from monet_like.profile.measure import allocated_peak
from monet_like.profile.roofline import roofline
from monet_like.profile.work import flops
from monet_like.replay.wrapper import ScheduleWrapper
from monet_like.variants import admitted
from monet_like.variants.linear_cross_entropy import PARTS

TOKENS, WIDTH, CLASSES = (3, 43), 24, 1500
#: By which product the logits are made.
COLUMNS, KEPT = "_columns", "_kept"
KINDS = ("", "_onednn") if torch.backends.mkldnn.is_available() else ("",)


class Head(nn.Module):
    """A language model without its body: embedding, norm, and a head that gives the loss alone."""

    def __init__(self, bias: bool, reduction: str, wide: bool, weighted: bool) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(CLASSES, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        self.reduction, self.wide = reduction, wide
        self.register_buffer("weight", torch.linspace(0.5, 2.0, CLASSES) if weighted else None)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.norm(self.embed(tokens)))
        logits = logits.float() if self.wide else logits
        return F.cross_entropy(
            logits.view(-1, CLASSES), targets.view(-1), self.weight, ignore_index=7, reduction=self.reduction
        )


def example() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(0, CLASSES, TOKENS, generator=generator) for _ in range(2))
    targets[0, :9] = 7  # left out of the loss
    return tokens, targets


def in_parts(captured: Captured, parts: int, kind: str = "") -> Schedule:
    """Store-all, with the head in parts."""
    name = "linear_cross_entropy.kept" if kind == KEPT else f"linear_cross_entropy.{parts}{kind}"
    return taking(captured, name, name.removesuffix(COLUMNS))


def step(model: nn.Module, args: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
    loss = model(*args)
    (3 * loss).backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.slow(every=4)
@pytest.mark.parametrize(
    ("dtype", "wide", "tolerance", "kind"),
    [
        (torch.float64, False, 1e-12, ""),
        *((torch.float32, False, 1e-5, kind) for kind in KINDS),
        *((torch.bfloat16, True, 1e-2, kind) for kind in ("", COLUMNS, KEPT)),
        (torch.float16, True, 1e-3, COLUMNS),
        (torch.float32, False, 1e-5, KEPT),
        (torch.float64, False, 1e-12, KEPT),
    ],
)
@pytest.mark.parametrize(
    ("bias", "reduction", "weighted", "parts"),
    [(False, "mean", False, min(PARTS)), (True, "mean", True, max(PARTS)), (True, "sum", False, max(PARTS))],
)
def test_gradients_are_those_of_the_whole(
    dtype: torch.dtype, wide: bool, tolerance: float, kind: str, bias: bool, reduction: str, weighted: bool, parts: int
) -> None:
    model = Head(bias, reduction, wide, weighted).to(dtype)
    if weighted and wide:
        model.weight = model.weight.float()  # as the logits
    args = example()
    captured = admitted(capture(model, args), FULL)
    if kind == "" and dtype == torch.bfloat16 and not weighted:
        pytest.skip("by columns instead")
    schedule = in_parts(captured, parts, kind)
    if kind in (COLUMNS, KEPT):
        taken = {slot[way].variant for slot, way in zip(captured.program.slots, schedule.ways, strict=True)}
        name = f"linear_cross_entropy.{parts}{COLUMNS}" if kind == COLUMNS else "linear_cross_entropy.kept"
        assert (name in taken) != weighted  # weights of classes go by rows alone
    record = record_for(captured, schedule, FULL, (model, args, {}))
    wrapped = ScheduleWrapper(twin(model), record, example=(args, {}), captured=captured)
    loss, plain = step(twin(model), args)
    other, gradients = step(wrapped, args)
    torch.testing.assert_close(other, loss, rtol=tolerance, atol=0)
    for name, gradient in plain.items():
        found = gradients[f"module.{name}" if f"module.{name}" in gradients else name]
        assert gradient is not None and found is not None
        difference = (found.double() - gradient.double()).norm() / gradient.double().norm()
        assert difference <= tolerance, name


def test_fewer_rows_than_parts_have_the_same_program_and_the_same_gradients() -> None:
    """Such as a last batch: some parts are empty."""
    model, args = Head(True, "mean", False, False), tuple(t[:2, 10:17].contiguous() for t in example())
    large, small = (admitted(capture(model, inputs), FULL) for inputs in (example(), args))
    assert small.program.fingerprint == large.program.fingerprint
    schedule = in_parts(large, max(PARTS))
    record = record_for(large, schedule, FULL, (model, example(), {}))
    wrapped = ScheduleWrapper(twin(model), record, example=(example(), {}))
    (loss, gradients), (expected, others) = step(wrapped, args), step(twin(model), args)
    torch.testing.assert_close(loss, expected)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[name], msg=name)


def test_by_columns_no_tensor_is_as_large_as_the_weight() -> None:
    """But its gradient, which is written once: in float32 it would be twice as large."""
    args = tuple(t[:, :10].contiguous() for t in example())
    model = Head(False, "mean", True, False).to(torch.bfloat16)
    captured = admitted(capture(model, args), FULL)
    weight = 2 * CLASSES * WIDTH
    needs = {way.variant: work_of(captured, way) for slot in captured.program.slots for way in slot}
    assert needs[f"linear_cross_entropy.16{COLUMNS}"] < weight and "linear_cross_entropy.16" not in needs
    weighted = Head(False, "mean", True, True).to(torch.bfloat16)
    weighted.weight = weighted.weight.float()
    captured = admitted(capture(weighted, args), FULL)
    needs = {way.variant: work_of(captured, way) for slot in captured.program.slots for way in slot}
    assert needs["linear_cross_entropy.16"] >= 2 * weight


def work_of(captured: Captured, way: Task) -> int:
    return roofline(captured, DEVICES["cpu"])[way.cost].workspace_bytes


def test_logits_never_exist_at_once() -> None:
    model, args = Head(False, "mean", False, False), example()
    captured = admitted(capture(model, args), FULL)
    costs = costs_of(captured, (model, args, {}), FULL, timed=False)
    program = captured.program
    logits = 4 * args[0].numel() * CLASSES
    whole = simulate(program, store_all(program), costs).peak_bytes - program.resident_bytes
    assert whole > 3 * logits
    for parts, kind in product(PARTS, KINDS):
        schedule = in_parts(captured, parts, kind)
        predicted = simulate(program, schedule, costs).peak_bytes - program.resident_bytes
        record = record_for(captured, schedule, FULL, (model, args, {}))
        wrapped = ScheduleWrapper(twin(model), record, example=(args, {}), captured=captured)
        rise = allocated_peak(lambda w=wrapped: step(w, args), CPU)  # type: ignore[misc]
        assert abs(rise - predicted) <= 64  # the loss, three times it, and its gradients
        weights = 2 * 4 * CLASSES * WIDTH  # gradients of the head and of the embedding
        assert predicted < 3.3 * logits / parts + weights


def test_roofline_counts_every_part() -> None:
    captured = admitted(capture(Head(True, "mean", False, False), example()), FULL)
    for parts, kind in product(PARTS, KINDS):
        name = f"linear_cross_entropy.{parts}{kind}"
        (forward,) = (task for task in captured.program.tasks if task.variant == name)
        backward = next(w for slot in captured.program.slots for w in slot if w.variant == forward.variant)
        once = 2 * example()[0].numel() * WIDTH * CLASSES
        assert flops(captured, forward) == once
        assert flops(captured, backward) == 3 * once


class Leaky(Head):
    """Logits that something else reads too."""

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = self.head(self.norm(self.embed(tokens))).view(-1, CLASSES)
        return F.cross_entropy(logits, targets.view(-1)), logits.mean()


def test_logits_that_are_read_elsewhere_are_made() -> None:
    captured = admitted(capture(Leaky(False, "mean", False, False), example()), FULL)
    assert not any("linear_cross_entropy" in task.variant for task in captured.program.tasks)
