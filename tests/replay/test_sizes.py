"""Sizes that depend on values of tensors that are not learned: plain PyTorch's steps, to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from any_schedule import assert_as_plain, step
from deciding import Body, Forward, inputs, said_of_new_answers, trained
from replays import LOSS_BYTES, costs_of, replayed
from torch import nn
from torch.utils.checkpoint import checkpoint

import monet_like
from monet_like.capture.lower.step import capture
from monet_like.errors import CaptureError
from monet_like.ir.simulate import simulate
from monet_like.plan.random_schedules import random_schedule
from monet_like.variants import admitted

MODE = "inplace_multiway_newnode"


def masked(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    h, kept = m.hidden(x), t[:, 0] > 0
    return F.cross_entropy(m.last(h)[kept], t[kept].argmax(1), reduction="sum")


def selected(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return m.last(m.hidden(x)).masked_select(t[:, :1] > 0)


def numbered(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    h = m.hidden(x)
    rows, columns = torch.where(t > 0)
    return m.last(h)[rows] * h[rows, columns][:, None] + torch.argwhere(t[:, 0] > 0).sum()


def counted_alone(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Only the size is read, by Python."""
    return m.last(m.hidden(x)) * len((t[:, 0] > 0).nonzero())


def backward_alone(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """What is selected is read in the backward alone."""
    h = m.hidden(x)
    return m.last(h).index_select(0, (t[:, 0] > 0).nonzero()[:, 0]).sum() + h.mean()


def grouped(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    groups, group = torch.unique((t[:, 0] * 2).long(), return_inverse=True)
    rows, counts = torch.unique((t[:, :2] > 0).long(), dim=0, return_counts=True)
    _, runs = torch.unique_consecutive(t[:, 0] > 0, return_counts=True)
    h = m.last(m.hidden(x))
    sums = h.new_zeros(len(groups), 6).index_add(0, group, h)
    means = torch.stack([part.mean(0) for part in h.split(runs.tolist())])
    return torch.cat([sums, means, (rows * counts[:, None]).to(x.dtype) @ h[:2]])


def repeated(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    h, counts = m.hidden(x), (t[:, 0] > 0).long()
    return m.last(torch.repeat_interleave(h, counts + 1, dim=0))[: len(torch.bincount(counts)) * 4]


def one_of(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Numbers of classes that are given, and that are asked for."""
    classes = (t[:, 0] * 2).abs().long()
    few, all_of_them = F.one_hot(classes.clamp(max=5), 6), F.one_hot(classes)
    return m.last(m.hidden(x) * few).T @ all_of_them.to(x.dtype) + (t > 0).nonzero().sum()


def written(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """What has a gradient is written where a mask says; its gradient is read from there."""
    h, kept = m.hidden(x), t[:, 0] > 0
    padded = torch.zeros_like(h)
    padded[kept] = m.last(h[kept])
    padded[kept, 1:3] = m.last.bias[:2]
    padded = padded.index_put((t > 1,), m.last.bias.sum()).masked_scatter(t < -1, m.last(h))
    padded[t < -1.5] = 0
    return m.last(padded)


def drawn(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return m.drop(m.last(m.hidden(x))[torch.rand(8) > 0.5])


def in_place(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    t[:2].neg_()
    kept, h = t[:, 0] > 0, m.hidden(x)
    with torch.no_grad():
        m.average.add_(t[kept].sum(0))
    return m.last(h)[kept] + m.average


def checkpointed(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    def part(h: torch.Tensor) -> torch.Tensor:
        kept, whole = t[:, 0] > 0, torch.zeros_like(h)
        whole[kept] = m.last(m.drop(h[kept]))
        return whole + t[kept].sum() + sum((t[:2, 1] > 0).tolist())

    return m.last(checkpoint(part, m.norm(x), use_reentrant=False))


def warned_of(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Masks of bytes are deprecated, so an operator warns before the call may leave its branch."""
    h = m.last(m.hidden(x)).view(4, 2, 6)
    return h[(t[:4, 0] > 0).byte()].sum(0) + h[t[:4, 1] > 0, :, 2].sum()


def spoken(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """CTC loss of labels that a mask selects, as of wav2vec 2.0."""
    steps = m.last(m.hidden(x)).view(4, 2, 6).log_softmax(-1)
    labels = torch.where(t[:2] > 0, (t[:2] * 2).long().clamp(1, 5), -100)[:, :3]
    labels[:, 0] = 1
    known = labels >= 0
    return F.ctc_loss(
        steps, labels.masked_select(known), torch.full((2,), 4), known.sum(-1), reduction="sum", zero_infinity=True
    )


ALL = [
    masked, selected, numbered, counted_alone, backward_alone, grouped, repeated, one_of, written, drawn, in_place,
    checkpointed, warned_of, spoken,
]  # fmt: skip


@pytest.mark.slow(but=["masked", "counted_alone", "written", "drawn", "warned_of"], rare=2)
@pytest.mark.parametrize("decide", ALL, ids=lambda function: function.__name__)
def test_sizes_equal_plain_pytorch(decide: Forward) -> None:
    assert_as_plain(lambda: Body(decide), trained, seed=2)


def test_a_size_is_captured_once() -> None:
    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        (x, t), (_, more) = inputs(2)
        t[:, 0], more[:, 0] = torch.tensor([1, -1] * 4), torch.tensor([1, 1, 1, -1] * 2)
        for mask in (t, more, t.roll(1, 0), t, more.roll(1, 0)):
            note(step(called, x, mask), *(p.grad for p in model.parameters()))

    assert_as_plain(lambda: Body(masked), script, captures=2)


def learned_mask(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    h = m.hidden(x)
    return h[h[:, 0] > 0]


def learned_buffer(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """By way of memory that is written in place, without gradients."""
    h, scores = m.hidden(x), torch.zeros(8)
    with torch.no_grad():
        scores.copy_(h[:, 0])
    return h.index_select(0, (scores.view(2, 4).flatten() > 0).nonzero()[:, 0])


def learned_statistics(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """By a buffer that a batch norm writes without returning it."""
    h = m.hidden(x)
    return h.index_select(0, (m.norm.running_mean > 0).nonzero()[:, 0])


def learned_numbers(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Of a router: experts get the tokens that it sends them."""
    h = m.hidden(x)
    best = m.last(h).argmax(1)
    return torch.cat([m.first(h[torch.where(best == expert)[0]]) for expert in range(6)])


@pytest.mark.parametrize(
    "decide", [learned_mask, learned_buffer, learned_statistics, learned_numbers], ids=lambda f: f.__name__
)
def test_sizes_that_depend_on_what_is_learned_are_refused(decide: Forward) -> None:
    model, (given, *_) = Body(decide), inputs()
    for learned in (True, False):  # what is frozen decides no less
        model.first.requires_grad_(learned)
        model.norm.requires_grad_(learned)
        with pytest.raises(CaptureError, match=r"depends on the values of a tensor.*test_sizes.*blocks=") as caught:
            capture(model, given)
        assert caught.value.of_values


def test_sizes_that_are_new_in_every_call() -> None:
    def given() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(torch.randn(20, 6), (torch.arange(20) < n).float()[:, None].expand(20, 6) - 0.5) for n in range(2, 16)]

    said = said_of_new_answers(masked, given)
    assert "sizes depend on values" in said and "the size of index was [[11, 6]]" in said and "blocks=" in said


class Wide(nn.Module):
    """Layers of a few hundred kilobytes around a function that selects."""

    def __init__(self, select: Forward) -> None:
        super().__init__()
        self.select, self.first, self.last = select, nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.select(self, x, t)


def wide_loss(m: Wide, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    logits, kept = m.last(F.gelu(m.first(x))), t > 0
    return F.cross_entropy(logits[kept], t[kept])


def wide_select(m: Wide, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return m.last(F.gelu(m.first(x))).masked_select((t > 0)[:, None]).square().mean()


def wide_groups(m: Wide, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    groups, group = torch.unique(t, return_inverse=True)
    h = torch.repeat_interleave(F.gelu(m.first(x)), t.clamp(0, 2), dim=0)
    return m.last(h.new_zeros(len(groups), 64).index_add(0, group[: len(h)], h[: len(group)]))


def wide_speech(m: Wide, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    steps, labels = m.last(F.gelu(m.first(x))).view(64, 16, 32).log_softmax(-1), t[:160].view(16, 10)
    known = labels > 0
    return F.ctc_loss(steps, labels.masked_select(known), torch.full((16,), 64), known.sum(-1))


#: The state of PyTorch's generator, kept for a call that leaves its branch: not in the predicted peak.
KEPT = torch.get_rng_state().nbytes


@pytest.mark.slow(but=["wide_loss"])
@pytest.mark.parametrize("select", [wide_loss, wide_select, wide_groups, wide_speech], ids=lambda f: f.__name__)
def test_measured_peaks_are_the_predicted_ones(select: Forward) -> None:
    """Operators are measured on what they selected by at the capture."""
    model, given = Wide(select).train(), (torch.randn(1024, 32), torch.randint(-4, 9, (1024,)))
    example = (model, given, {})
    captured = admitted(capture(model, given), MODE)
    costs = costs_of(captured, example, MODE, timed=False)
    for seed, (drop, others) in enumerate([(0.0, 0.0), (0.5, 0.3), (0.9, 0.9)]):
        schedule = random_schedule(captured.program, seed, drop=drop, others=others)
        predicted = simulate(captured.program, schedule, costs).peak_bytes
        measured = captured.program.resident_bytes + replayed(example, captured, schedule, MODE).rise_bytes
        assert -64 <= measured - predicted - LOSS_BYTES <= KEPT, seed


def test_results_with_room_behind_them_count_whole() -> None:
    """``unique_consecutive`` has memory for as many elements as it reads, and fills a part."""

    def select(m: Wide, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return m.last(m.first(x)) * len(torch.unique_consecutive(t))

    t = torch.arange(512) // 4
    captured = capture(Wide(select), (torch.randn(8, 32), t))
    (sized,) = (task for task in captured.program.tasks if task.calls[-1].op == "monet_like.sized")
    meta = captured.metas[sized.writes[0]]
    assert meta.shape == (128,) and meta.storage_bytes == torch.unique_consecutive(t).untyped_storage().nbytes()


@pytest.mark.slow
def test_planned_sizes() -> None:
    """One plan serves all sizes that fit into its peak."""

    def train(plan: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, given = Wide(wide_loss), [(torch.randn(512, 32), torch.arange(512) % 32 - n) for n in (0, 9, 3, 9, 0, 3)]
        called: nn.Module = model
        if plan:
            called = monet_like.auto_schedule(
                model, given[0], memory_budget="90%", mode=MODE, effort="quick", verbose=False
            )
        results = [step(called, *each).detach() for each in given]
        if plan:
            assert len(called.records) == 1 and len(called._kept) == 3
        return [*results, *(p.grad for p in model.parameters() if p.grad is not None)]

    torch.testing.assert_close(train(True), train(False), rtol=0, atol=0)
