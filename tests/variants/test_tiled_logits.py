"""What is computed from logits row by row, in parts of the rows: everything equals the whole, without its logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from replays import CPU, FULL, costs_of, record_for
from taking import taking
from torch import Tensor, nn
from torch.nn import functional as F
from training import twin

from monet_like.capture.captured import Captured
from monet_like.capture.lower.step import capture
from monet_like.ir.schedule import Schedule
from monet_like.ir.simulate import simulate
from monet_like.plan.baseline import store_all
from monet_like.profile.measure import allocated_peak
from monet_like.replay.wrapper import ScheduleWrapper
from monet_like.variants import admitted
from monet_like.variants.tiled_logits import PARTS

TOKENS, WIDTH, CLASSES = (3, 21), 24, 600


Loss = Callable[..., Any]


class Policy(nn.Module):
    """A language model without its body, and what is computed from its logits and, by some, from a reference's."""

    def __init__(self, loss: Loss, *, bias: bool = False, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(CLASSES, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        self.reference = nn.Linear(WIDTH, CLASSES, bias=False).requires_grad_(False)
        if tied:
            self.head.weight = self.embed.weight
        self.head.requires_grad_(not frozen)
        self.loss = loss

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        x = self.norm(self.embed(tokens))
        return self.loss(self, x, targets)


def chosen(log_probs: Tensor, targets: Tensor) -> Tensor:
    return log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def log_softmax(model: Policy, x: Tensor, targets: Tensor) -> Tensor:
    return chosen(model.head(x).log_softmax(-1), targets)


def shifted_by_temperature(model: Policy, x: Tensor, targets: Tensor) -> Tensor:
    logits = model.head(x)[:, :-1] / 0.7
    return chosen(F.log_softmax(logits.float(), -1), targets[:, 1:])


def less_logsumexp(model: Policy, x: Tensor, targets: Tensor) -> Tensor:
    logits = model.head(x)[:, :-1]
    return chosen(logits, targets[:, 1:]) - logits.logsumexp(-1)


def sequence_by_sequence(model: Policy, x: Tensor, targets: Tensor) -> Tensor:
    """As TRL's selective_log_softmax."""
    logits, targets = model.head(x)[:, :-1], targets[:, 1:]
    if logits.dtype in (torch.float32, torch.float64):
        sums = torch.stack([logits_of_one.logsumexp(-1) for logits_of_one in logits])
        return chosen(logits, targets) - sums
    return torch.stack([chosen(one.log_softmax(-1), its) for one, its in zip(logits, targets, strict=True)])


def with_entropy_in_chunks(model: Policy, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """As TRL's entropy_from_logits."""
    logits = model.head(x)[:, :-1]
    entropies = []
    for chunk in logits.reshape(-1, CLASSES).split(16):
        log_probs = chunk.log_softmax(-1)
        entropies.append(-(log_probs.exp() * log_probs).sum(-1))
    return chosen(logits.log_softmax(-1), targets[:, 1:]), torch.cat(entropies).view(logits.shape[:-1])


def entropy_of_probabilities(model: Policy, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = model.head(x)
    entropy = logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
    return -F.cross_entropy(logits.view(-1, CLASSES), targets.view(-1), reduction="none"), entropy


def divergence(model: Policy, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_probs = model.head(x).log_softmax(-1)
    with torch.no_grad():
        others = model.reference(x).log_softmax(-1)
    return chosen(log_probs, targets), (log_probs.exp() * (log_probs - others)).sum(-1)


def distillation(model: Policy, x: Tensor, targets: Tensor) -> Tensor:
    log_probs, others = (head(x).view(-1, CLASSES).log_softmax(-1) for head in (model.head, model.reference))
    return F.kl_div(log_probs, others, reduction="none", log_target=True).sum(-1).mean() + targets.sum() * 0


def categorical(model: Policy, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    policy = torch.distributions.Categorical(logits=model.head(x), validate_args=False)
    return policy.log_prob(targets), policy.entropy()


def capped_and_masked(model: Policy, x: Tensor, targets: Tensor) -> Tensor:
    logits = 30 * torch.tanh(model.head(x)[:, :-1] / 30)
    labels = targets[:, 1:].clone()
    wanted = labels % 3 != 0
    labels[~wanted] = 0
    return (chosen(logits.log_softmax(-1), labels) * wanted).sum(-1)


def clipped_policy_loss(model: Policy, x: Tensor, targets: Tensor) -> Tensor:
    log_probs = model.head(x)[:, :-1].log_softmax(-1)
    one = chosen(log_probs, targets[:, 1:])
    ratio = torch.exp(one - one.detach())
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return -torch.min(ratio * 0.5, ratio.clamp(0.8, 1.2) * 0.5).mean() - 0.01 * entropy.mean()


def smoothed_targets(model: Policy, x: Tensor, targets: Tensor) -> Tensor:
    soft = F.one_hot(targets, CLASSES).to(x.dtype) * 0.9 + 0.1 / CLASSES
    return -(soft * model.head(x).log_softmax(-1)).sum(-1).mean()


LOSSES = (
    log_softmax, shifted_by_temperature, less_logsumexp, sequence_by_sequence, with_entropy_in_chunks,
    entropy_of_probabilities, divergence, distillation, categorical, capped_and_masked, clipped_policy_loss,
    smoothed_targets,
)  # fmt: skip


def example(batch: int = TOKENS[0], length: int = TOKENS[1]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(0, CLASSES, (batch, length), generator=generator) for _ in range(2))
    return tokens, targets


def variants(captured: Captured) -> set[str]:
    every = (*captured.program.tasks, *(way for ways in captured.program.slots for way in ways))
    return {task.variant for task in every if task.variant.startswith("tiled_logits")}


def in_parts(captured: Captured, parts: int) -> Schedule:
    """Store-all, with the region in parts."""
    schedule = taking(captured, f"tiled_logits.{parts}")
    assert any(schedule.ways)
    return schedule


def step(model: nn.Module, args: tuple[Tensor, Tensor]) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    made = model(*args)
    several = made if isinstance(made, tuple) else (made,)
    weights = (1.0, 0.3)
    sum(w * (one * (torch.arange(one.numel(), dtype=one.dtype).view(one.shape) % 5 - 1)).sum() if one.ndim else w * one
        for w, one in zip(weights, several, strict=False)).backward()  # fmt: skip
    gradients = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    return [one.detach() for one in several], gradients


def check(model: Policy, parts: int, tolerance: float, args: tuple[Tensor, Tensor]) -> None:
    captured = admitted(capture(model, args), FULL)
    record = record_for(captured, in_parts(captured, parts), FULL, (model, args, {}))
    wrapped = ScheduleWrapper(twin(model), record, example=(args, {}), captured=captured)
    (results, plain), (others, gradients) = step(twin(model), args), step(wrapped, args)
    assert plain.keys() == gradients.keys()
    for one, other in [*zip(results, others, strict=True), *((plain[k], gradients[k]) for k in plain)]:
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.shape == other.shape and one.dtype == other.dtype
            assert (one.double() - other.double()).norm() <= tolerance * one.double().norm()


@pytest.mark.slow(every=3)
@pytest.mark.parametrize(
    ("dtype", "tolerance", "parts"), [(torch.float64, 1e-12, min(PARTS)), (torch.bfloat16, 1e-2, max(PARTS))]
)
@pytest.mark.parametrize("loss", LOSSES)
def test_results_and_gradients_are_those_of_the_whole(
    loss: Loss, dtype: torch.dtype, tolerance: float, parts: int
) -> None:
    torch.manual_seed(0)
    check(Policy(loss).to(dtype), parts, tolerance, example())


@pytest.mark.slow(but=["frozen"])
@pytest.mark.parametrize("kind", ["bias", "tied", "frozen"])
def test_heads_with_a_bias_tied_and_frozen(kind: str) -> None:
    torch.manual_seed(0)
    check(Policy(with_entropy_in_chunks, **{kind: True}), PARTS[0], 1e-5, example())


class Adapted(nn.Linear):
    """LoRA on a head."""

    def __init__(self) -> None:
        super().__init__(WIDTH, CLASSES, bias=False)
        self.weight.requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.b(self.a(x))


def test_an_adapter_on_the_head_belongs_to_it() -> None:
    torch.manual_seed(0)
    model = Policy(less_logsumexp)
    model.head = Adapted()
    check(model, PARTS[0], 1e-5, example())


def test_fewer_rows_than_parts_have_the_same_program_and_the_same_gradients() -> None:
    """Such as a last batch: some parts are empty."""
    model, small = Policy(shifted_by_temperature), example(2, 4)
    large, less = (admitted(capture(model, args), FULL) for args in (example(), small))
    assert less.program.fingerprint == large.program.fingerprint
    check(model, max(PARTS), 1e-5, small)


@pytest.mark.parametrize("loss", [shifted_by_temperature, divergence])
def test_logits_never_exist_at_once(loss: Loss) -> None:
    model, args = Policy(loss), example()
    captured = admitted(capture(model, args), FULL)
    costs, program = costs_of(captured, (model, args, {}), FULL, timed=False), captured.program
    logits = 4 * args[0].numel() * CLASSES
    assert simulate(program, store_all(program), costs).peak_bytes - program.resident_bytes > 2.5 * logits
    for parts in PARTS:
        schedule = in_parts(captured, parts)
        predicted = simulate(program, schedule, costs).peak_bytes - program.resident_bytes
        record = record_for(captured, schedule, FULL, (model, args, {}))
        wrapped = ScheduleWrapper(twin(model), record, example=(args, {}), captured=captured)
        results = sum(4 * value.numel() for value in step(twin(model), args)[0])
        rise = allocated_peak(lambda w=wrapped: step(w, args), CPU)  # type: ignore[misc]
        assert abs(rise - predicted) <= 8 * results + 128  # what the loss of the results holds
        assert predicted < 8 * logits / parts + 2 * 4 * CLASSES * WIDTH + 4 * args[0].numel() * 10 * WIDTH


def returned(model: Policy, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = model.head(x)
    return chosen(logits.log_softmax(-1), targets), logits


def mixed(model: Policy, x: Tensor, targets: Tensor) -> Tensor:
    """A sum over rows in the middle."""
    logits = model.head(x)
    return chosen((logits - logits.mean((0, 1))).log_softmax(-1), targets)


def shuffled(model: Policy, x: Tensor, targets: Tensor) -> Tensor:
    logits = model.head(x)
    return (logits.log_softmax(-1) * logits.flip(0).softmax(-1)).sum(-1)


def next_row(model: Policy, x: Tensor, targets: Tensor) -> Tensor:
    """Two rows meet that are not the same."""
    logits = model.head(x)
    return (logits[:, 1:].log_softmax(-1) * logits[:, :-1].softmax(-1)).sum(-1)


def greatest(model: Policy, x: Tensor, targets: Tensor) -> Tensor:
    """The gradient of the greatest asks which logits equal it."""
    logits = model.head(x)
    return chosen((logits - logits.amax(-1, keepdim=True)).log_softmax(-1), targets)


def noisy(model: Policy, x: Tensor, targets: Tensor) -> Tensor:
    return chosen(F.dropout(model.head(x), 0.1).log_softmax(-1), targets)


def layer_behind(model: Policy, x: Tensor, targets: Tensor) -> Tensor:
    return F.linear(F.gelu(model.head(x)), model.reference.weight.t()).mean(-1)


@pytest.mark.parametrize("loss", [returned, mixed, shuffled, next_row, greatest, noisy, layer_behind])
def test_others_stay_whole(loss: Loss) -> None:
    assert not variants(admitted(capture(Policy(loss), example()), FULL))


def test_stays_apart_without_the_word() -> None:
    captured = admitted(capture(Policy(log_softmax), example()), "inplace_multiway_newnode")
    assert not variants(captured)


def test_chosen_numbers_that_are_compared_are_made_once() -> None:
    """Clipping asks which of two ratios is less."""
    captured = admitted(capture(Policy(clipped_policy_loss), example()), FULL)
    (task, *_) = (task for task in captured.program.tasks if task.variant.startswith("tiled_logits"))
    writers = [t for t in captured.program.tasks if not set(task.writes).isdisjoint(t.writes)]
    assert len(writers) > 1
    assert {t.runs for t in writers} == {"first"}
