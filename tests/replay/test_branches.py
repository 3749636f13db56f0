"""Python code that asks for values of tensors: every branch is plain PyTorch's, to the bit, whenever it is taken."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from any_schedule import AnySchedule, assert_as_plain, step
from deciding import Body, Forward, inputs, said_of_new_answers, trained
from torch import nn
from torch.utils.checkpoint import checkpoint

import monet_like
from monet_like.capture.captured import fake_mode
from monet_like.capture.lower.step import capture
from monet_like.capture.trace.answers import recorded_answers
from monet_like.errors import CaptureError


def masked(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    h = m.hidden(x)
    return m.last(h * t) if (t < 0).any() else m.last(h)


def early(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    h = m.hidden(x)
    return h.tanh() if t.sum() > 0 else m.last(h)


def repeated(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    h = m.hidden(x) * (1 + t.abs().max())
    while h.norm() > 4:
        h = h * 0.5
    return m.last(h)


def in_place(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    x.mul_(0.5)
    h = m.hidden(x)
    return m.last(h) if (t < 0).any() else h + x


def averaged(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    h = m.hidden(x)
    with torch.no_grad():
        m.average.mul_(0.9).add_(h.mean(0), alpha=0.1)
        if t.sum() > 0:
            m.average.add_(1)
    return m.last(h) + m.average


def drawn(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    h = m.first(x)
    for _ in range(2):  # layer drop
        if torch.rand([]) > 0.5:
            h = m.drop(m.last(h)).tanh()
    return h


def caught(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    h = m.hidden(x)
    try:
        small = not bool((t < 0).any())
    except Exception:  # of a trace, which has no values
        return h.tanh()
    return m.last(h) if small else h


def asserted(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    assert torch.isfinite(t).all(), "not finite"
    torch._check_tensor_all(t.abs() < 1e9)
    return m.last(m.hidden(x))


def listed(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    h = m.hidden(x)
    for number, each in enumerate((t[:2, 0] > 0).tolist()):
        h = h.roll(number + 1, 0) if each else h
    return m.last(h)


def formatted(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    h = m.hidden(x)
    text = f"{h.sum():.1f}: {(t < 0).any()}, {torch.arange(3).sum():2d}"
    return m.last(h) if "True" in text else h * len(text)


def compared(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    h = m.hidden(x)
    return h if torch.equal(t, t.abs()) or torch.allclose(t, t[0], atol=0.1) else m.last(h)


def indexed(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return m.last(m.hidden(x))[: int((t[:, 0] > 0).sum()) + 1]


def spread(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    h = m.hidden(x)
    return F.gaussian_nll_loss(h, t, m.last(h).square() + 0.1) + torch.cov(h.T, aweights=t.abs()[:, 0]).sum()


def distributed(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    normal = torch.distributions.Normal(m.hidden(x), F.softplus(m.last(x)), validate_args=True)
    return normal.rsample().tanh().mean() - normal.log_prob(t).mean()


def checkpointed(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    def part(h: torch.Tensor) -> torch.Tensor:
        h = m.drop(m.first(h)).tanh()
        return m.last(h * 2) if (h.norm() > 2) or (t < 0).any() else h

    h = m.norm(x)
    for _ in range(2):
        h = checkpoint(part, h, use_reentrant=False)
    return h


ALL = [
    early, repeated, in_place, averaged, drawn, caught, asserted, listed, formatted, compared, indexed, spread,
    distributed, checkpointed,
]  # fmt: skip


@pytest.mark.parametrize("decide", ALL, ids=lambda function: function.__name__)
def test_branches_equal_plain_pytorch(decide: Forward) -> None:
    assert_as_plain(lambda: Body(decide), trained, seed=2)


def test_a_branch_is_captured_once() -> None:
    assert_as_plain(lambda: Body(masked), trained, captures=2)


def test_what_differs_in_nothing_else_asks_all_the_same() -> None:
    """The program of both answers is one, and captured for each: what the forward's Python code does is not known."""
    captured = capture(Body(early), inputs()[0])
    assert [(answer.op, answer.value) for answer in captured.answers] == [("aten._local_scalar_dense.default", False)]
    assert sum(task.calls[-1].op == "monet_like.ask" for task in captured.program.tasks) == 1


def test_a_plain_forward_that_is_asked_leaves_no_trace() -> None:
    model = Body(averaged)
    calls: list[int] = []
    model.first.register_forward_hook(lambda *_: calls.append(0))
    (x, t), before = inputs()[1], {name: tensor.clone() for name, tensor in model.state_dict().items()}
    versions = [buffer._version for buffer in model.buffers()]
    state = torch.get_rng_state()
    answers = recorded_answers(model, (x, t), {})
    assert [answer.value for answer in answers] == [True] and calls == []
    assert torch.equal(torch.get_rng_state(), state) and all(p.grad is None for p in model.parameters())
    assert [buffer._version for buffer in model.buffers()] == versions
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_a_plain_forward_that_is_asked_saves_nothing() -> None:
    """It needs the memory of a forward without autograd, but runs with gradients enabled, as plain PyTorch's does."""

    def decide(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        h = m.first(x)
        assert h.requires_grad and bool(h.isfinite().all())
        node: Any = h.tanh().grad_fn
        with pytest.raises(RuntimeError, match="no tensor was saved"):
            node._saved_result  # noqa: B018
        return h

    assert len(recorded_answers(Body(decide), inputs()[0], {})) == 1


def test_a_forward_that_asks_for_gradients_itself() -> None:
    def decide(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        h = m.first(x).square()
        if torch.autograd.grad(h.sum(), m.first.weight, retain_graph=True)[0].sum() > 0:
            return m.last(h)
        return h

    assert [type(answer.value) for answer in recorded_answers(Body(decide), inputs()[0], {})] == [bool]


def test_a_mask_of_ones_is_left_out_as_in_plain_pytorch() -> None:
    """Libraries ask whether they are compiled, and take the general path then, which keeps the square of the length."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 18)

        def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            q, k, v = self.inner(x)[:, None].chunk(3, -1)
            if mask is None or (not torch.compiler.is_compiling() and mask.all()):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
            square = mask[:, None, None].bool().expand(-1, -1, x.shape[1], -1).tril()
            return F.scaled_dot_product_attention(q, k, v, attn_mask=square)

    ones, padded = torch.ones(2, 37), torch.ones(2, 37)
    padded[0, 30:] = 0
    x = torch.randn(2, 37, 6)
    programs = [capture(Attention(), (x, mask)).program for mask in (None, ones, padded)]
    assert ["37, 37" in str([value.spec for value in program.values]) for program in programs] == [False, False, True]

    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        for mask in (ones, padded, ones, None, padded):
            note(step(called, x, mask), *(p.grad for p in model.parameters()))

    assert_as_plain(Attention, script, captures=3)


def test_the_users_own_error_is_raised() -> None:
    """Also in the middle of the training, which can go on."""

    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        for number, (x, t) in enumerate(inputs(4)):
            if number == 2:
                t[0, 0] = torch.nan
                with pytest.raises(AssertionError, match="not finite"):
                    called(x, t)
                continue
            note(step(called, x, t))

    assert_as_plain(lambda: Body(asserted), script, captures=1)


def test_invalid_parameters_of_a_distribution_are_an_error_as_in_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    # PyTorch checks them by default, until something in the process is compiled.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)

    def decide(m: Body, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Normal(m.first(x), t).rsample()

    model = AnySchedule(Body(decide))
    x, t = inputs()[1]
    step(model, x, t)
    with pytest.raises(ValueError, match="Expected parameter scale"):
        model(x, -t)
    step(model, x, t)
    assert model.captures == 1


def test_numbers_that_are_new_in_every_call() -> None:
    said = said_of_new_answers(lambda m, x, t: m.last(m.hidden(x)) * t.abs().max().item(), lambda: inputs(14))
    assert "compute with tensors instead" in said and "the answer of _local_scalar_dense was" in said


def test_fake_inputs_have_no_values() -> None:
    with (
        fake_mode() as mode,
        pytest.raises(
            CaptureError,
            match=r"Body cannot be captured.*depends on the values of a tensor.*"
            r"auto_schedule\(model, memory_budget=.*names them as blocks=",
        ),
    ):
        capture(Body(early), tuple(mode.from_tensor(tensor) for tensor in inputs()[0]))


def test_a_schedule_file_without_an_example() -> None:
    """Fake inputs cannot be asked, so the first call is captured."""
    torch.manual_seed(0)
    model, given = Body(masked), inputs(3)
    found = monet_like.problem(model, given[0], device="cpu", mode="normal", profile="roofline:cpu").plan(
        "200%", strategy="store_all"
    )
    plain = copy.deepcopy(model)
    scheduled = monet_like.ScheduleWrapper(model, found.record)
    for called in (plain, scheduled):
        torch.manual_seed(1)
        for x, t in (given[0], given[2]):
            step(called, x, t)
    for ours, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert its.grad is not None and torch.equal(ours.grad, its.grad)


class Stack(nn.Module):
    """Equal blocks that decide by their inputs."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, t)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [None, "blocks.*"])
def test_planned_branches(blocks: str | None) -> None:
    def train(model: nn.Module, planned: bool) -> list[torch.Tensor]:
        called = model
        torch.manual_seed(1)
        given = inputs()
        if planned:
            with torch.random.fork_rng():
                called = monet_like.auto_schedule(
                    model,
                    memory_budget="200%",
                    mode="inplace_multiway_newnode",
                    effort="quick",
                    verbose=False,
                    blocks=blocks,
                )
        results = [step(called, *each).detach() for each in given]
        return [*results, *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]

    def made() -> nn.Module:
        torch.manual_seed(0)
        return Stack([Body(masked) for _ in range(3)])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = train(made(), True)
    torch.testing.assert_close(found, train(made(), False), rtol=0, atol=0)
