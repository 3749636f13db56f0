"""Training by schedules of blocks goes on whatever changes between calls, with plain PyTorch's losses and parameters
bit by bit.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from block_models import EXACT, Decoder, Short, assert_same_step, loss_of, measured_peak, plan_of, tokens
from quantised_nets import adapted, by_torchao, four_bit
from torch import nn
from torch.utils.checkpoint import checkpoint

import monet_like
from monet_like.auto import block_menus, block_plan
from monet_like.auto.block import blocks_of
from monet_like.auto.block_calls import plans_of
from monet_like.auto.earlier_menus import EarlierMenus
from monet_like.errors import UsageError
from monet_like.ir.program import Program
from monet_like.plan import store_all

QUICK: dict[str, Any] = {"mode": EXACT, "loss": loss_of, "effort": "quick", "blocks": "layers.*"}
#: What is done before a step, and the batch.
Change = tuple[Callable[[Any], object], torch.Tensor]


@pytest.fixture(autouse=True)
def _warnings_heard() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        yield


def nothing(model: Any) -> None:
    pass


def trained(model: nn.Module, changes: list[Change]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and parameters of a loop with an optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    torch.manual_seed(0)
    for change, x in changes:
        change(model)
        loss = loss_of(model(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {
        name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def scheduled(plain: nn.Module, changes: list[Change], budget: str = "80%", **options: Any) -> Any:
    """A copy with schedules after a loop that has been compared with plain PyTorch's."""
    mine: Any = monet_like.auto_schedule(copy.deepcopy(plain), memory_budget=budget, **{**QUICK, **options})
    found, expected = trained(mine, changes), trained(plain, changes)
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][name], tensor) for name, tensor in expected[1].items())
    return mine


def planned_calls(model: nn.Module) -> list[Any]:
    """The plans of a model's blocks by its calls."""
    plans: Any = plans_of(model)
    return plans.plans


def _searched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the bytes of each program whose menu is searched from here on."""
    found: list[int] = []
    own = block_menus.menu

    def searching(program: Program, *args: Any, **kwargs: Any) -> Any:
        found.append(sum(value.bytes for value in program.values))
        return own(program, *args, **kwargs)

    monkeypatch.setattr(block_menus, "menu", searching)
    return found


def test_batches_that_grow_are_planned_within_the_first_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the menus of the first."""
    searched = _searched(monkeypatch)
    plain = Decoder(blocks=3)
    batches: list[Change] = [(nothing, tokens(8, length)) for length in (16, 20, 12, 18)]
    mine = scheduled(plain, batches, "90%")  # 10 % more than the larger batch needs at least
    small, large = planned_calls(mine)  # those of 12 and of 18 follow the plans for 16 and for 20
    assert len(searched) == small.plan.kinds
    assert large.plan.budget_bytes == small.plan.budget_bytes
    assert plan_of(mine) is large.plan
    assert measured_peak(mine, tokens(8, 20)) == large.plan.peak_bytes <= large.plan.budget_bytes
    assert measured_peak(mine, tokens(8, 16)) == small.plan.peak_bytes
    assert plan_of(mine) is small.plan
    assert_same_step(plain, mine, tokens(8, 20))
    block = blocks_of(mine)[0]
    captured, settings = block._block_call.captured, block._block_settings
    assert settings.earlier.alike(captured) is not None
    assert copy.deepcopy(settings).earlier.alike(captured) is None  # copies have no menus


def test_menus_are_searched_anew_where_those_of_other_sizes_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = _searched(monkeypatch)
    monkeypatch.setattr(block_plan, "QUICK_BOUND_SECONDS", 0.0)  # for the bound finds schedules, too
    own = EarlierMenus.add

    def add(menus: EarlierMenus, ready: Any, found: Any) -> None:
        own(menus, ready, (store_all(ready.captured.program),) if found else ())

    monkeypatch.setattr(EarlierMenus, "add", add)
    mine = scheduled(Decoder(blocks=3), [(nothing, tokens(8, length)) for length in (16, 20)], "90%")
    small, large = planned_calls(mine)
    assert len(searched) == 2 * small.plan.kinds
    assert measured_peak(mine, tokens(8, 20)) == large.plan.peak_bytes <= large.plan.budget_bytes


def test_a_batch_that_fits_no_plan_runs_plainly_with_one_warning() -> None:
    changes = [(nothing, tokens(8, 16))] + 2 * [(nothing, tokens(64, 64))]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        mine = scheduled(Decoder(blocks=2), changes)
    for text in (
        "no plan of the blocks of Decoder for int64[64, 64] within",
        "Short runs as plain PyTorch when it is called with float32[64, 64, 32]",
    ):
        assert sum(text in str(warning.message) for warning in told) == 1
    assert "larger memory_budget" in next(iter(blocks_of(mine)[0]._kept.plain.values()))


@pytest.mark.slow
def test_lengths_are_planned_ahead() -> None:
    batches = [(nothing, tokens(8, length)) for length in (16, 32, 24, 8)]
    mine = scheduled(Decoder(blocks=2), batches, lengths=[16, 32])
    plans = planned_calls(mine)
    assert [planned.form.tensors[0][1] for planned in plans] == [(8, 32), (8, 16)]
    assert all(planned.plan.budget_bytes == int(0.8 * plans[0].plan.plain_peak_bytes) for planned in plans)


def test_new_inputs_by_the_rule_plain() -> None:
    mine: Any = monet_like.auto_schedule(
        Decoder(blocks=2), tokens(8, 16), memory_budget="1 MB", on_new_input="plain", **QUICK
    )
    loss_of(mine(tokens(8, 17))).backward()
    assert len(planned_calls(mine)) == 1 and blocks_of(mine)[0]._kept.plain


def test_new_inputs_and_changes_of_the_blocks_by_the_rule_error() -> None:
    """What differs from the plan is said, and nothing of schedule files."""
    model = Decoder(blocks=2)
    mine: Any = monet_like.auto_schedule(model, tokens(8, 16), memory_budget="1 MB", on_new_input="error", **QUICK)
    said = r"block layers.0 serves this call: it was planned for float32\[8, 16, 32\].*called with float32\[8, 17, 32\]"
    with pytest.raises(UsageError, match=said):
        mine(tokens(8, 17))
    assert len(planned_calls(mine)) == 1 and not blocks_of(mine)[0]._kept.plain
    loss_of(mine(tokens(8, 16))).backward()
    model.layers[0].up.requires_grad_(False)  # type: ignore[union-attr]
    with pytest.raises(UsageError, match=r"block layers.0 serves this call: other parameters are frozen, .* larger$"):
        mine(tokens(8, 16))
    model.layers[0].up.requires_grad_()  # type: ignore[union-attr]
    model.layers[0].dropout.p = 0.0  # type: ignore[union-attr]
    with pytest.raises(UsageError, match=r"block layers.0 serves this call: self.dropout.p was 0\.\d+, is 0\.0$"):
        mine(tokens(8, 16))


class Masked(Short):
    """A block with a mask that is given for padded batches alone, as Transformers' layers are called."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        mixed = torch.tanh(self.up(x))
        if mask is not None:
            mixed = mixed * mask.unsqueeze(-1)
        return x + self.dropout(self.down(mixed))


class Padded(Decoder):
    """Word 0 is padding."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, mask = self.embedding(tokens), (tokens != 0).float()
        for layer in self.layers:
            x = layer(x, None if (tokens != 0).all() else mask)
        return self.head(self.norm(x))


@pytest.mark.parametrize("first", [pytest.param("padded", marks=pytest.mark.slow), "full"])
def test_padding_that_appears_or_vanishes(first: str) -> None:
    batches = {"full": tokens().clamp(min=1), "padded": tokens().clamp(min=1)}
    batches["padded"][0, 20:] = 0
    other = {"full": "padded", "padded": "full"}[first]
    mine = scheduled(Padded(Masked, 2), [(nothing, batches[name]) for name in (first, other, first, other)])
    (planned,) = planned_calls(mine)
    runs_plainly = any(block._kept.plain for block in blocks_of(mine))
    assert measured_peak(mine, batches[other]) <= planned.plan.budget_bytes or runs_plainly


def freeze(model: Any) -> None:
    model.layers[0].requires_grad_(False)
    model.embedding.requires_grad_(False)


def thaw(model: Any) -> None:
    model.requires_grad_(True)


def without_dropout(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def to_float64(model: Any) -> None:
    model.double()


def one_in_eval(model: Any) -> None:
    model.layers[1].eval()


def without_grad_before(model: Any) -> None:
    with torch.no_grad():
        model(tokens())
    model.eval()
    loss_of(model(tokens(2, 5)))
    model.train()


def called_directly(model: Any) -> None:
    model.layers[0](torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(1))).sum().backward()


def merged(model: Any) -> None:
    """A part is replaced, as `merge_and_unload` does."""
    old = model.layers[0].up
    model.layers[0].up = nn.Linear(32, 64)
    model.layers[0].up.load_state_dict(old.state_dict())


CHANGES = [freeze, thaw, without_dropout, to_float64, one_in_eval, without_grad_before, called_directly, merged]


@pytest.mark.slow(rare=2)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_between_calls(change: Callable[[Any], object]) -> None:
    first = freeze if change is thaw else nothing
    scheduled(
        Decoder(blocks=2),
        [(first, tokens()), (change, tokens()), (nothing, tokens()), (nothing, tokens(1, 32)), (nothing, tokens(4, 1))],
    )


def swapped_to_float64(model: Any) -> None:
    """As ``.to()`` does with tensors that consist of others, which sharded and some quantised parameters are."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("blocks", ["layers.*", None], ids=["blocks", "whole"])
def test_parameters_can_be_swapped_after_a_step(blocks: str | None) -> None:
    """PyTorch refuses to swap a tensor that something refers to, be it weakly, and be it garbage."""
    gc.collect()
    gc.disable()
    try:
        changes = [(nothing, tokens()), (swapped_to_float64, tokens()), (nothing, tokens())]
        scheduled(Decoder(blocks=2), changes, "100%", blocks=blocks, loss=loss_of if blocks else None)
    finally:
        gc.enable()


class Dropped(Decoder):
    """Layers may be left out; the features in front of them have no gradient."""

    kept = (True, True, True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens).detach()
        for layer in (layer for layer, kept in zip(self.layers, self.kept, strict=True) if kept):
            x = layer(x)
        return self.head(self.norm(x))


def keep(*kept: bool) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.kept = kept

    return change


def test_the_first_layers_may_be_dropped() -> None:
    x = tokens()
    scheduled(
        Dropped(),
        [(keep(True, True, True), x), (keep(False, True, True), x), (keep(False, False, True), x), (nothing, x)],
    )


def test_the_first_call_may_drop_all_layers() -> None:
    x, none = tokens(), keep(False, False, False)
    with pytest.warns(
        UserWarning, match="nothing is planned for this call, but for the next one: .* none of its blocks"
    ):
        mine = scheduled(Dropped(), [(none, x), (none, x), (keep(True, True, True), x), (none, x), (nothing, x)])
    assert len(planned_calls(mine)) == 1
    model = Dropped()
    none(model)
    with pytest.raises(UsageError, match="step of Dropped calls none of its blocks; give blocks that it calls"):
        monet_like.auto_schedule(model, x, memory_budget="80%", **QUICK)
    assert not blocks_of(model)
    for change in ("frozen", "in eval mode"):  # it is called, but has no gradient to plan for
        wrong = Decoder(blocks=1)
        wrong.embedding.requires_grad_(change != "frozen")
        wrong.layers.requires_grad_(change != "frozen").train(change == "frozen")
        with pytest.raises(
            UsageError, match=r"no block of Decoder has a gradient .*, in training mode \(model.train\(\)"
        ):
            monet_like.auto_schedule(wrong, memory_budget="80%", **QUICK)(x)


class Upper(Decoder):
    """A decoder whose input another model has made; it writes into it."""

    def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        x.mul_(0.5)
        for layer in self.layers:
            x = layer(x if more is None else x + more["state"])
        return self.head(self.norm(x))


def test_what_has_made_the_inputs_keeps_its_graph() -> None:
    """Planning runs backwards of its own, at the first call and at those of another form, and none of them leaves the
    model.
    """
    grads = []
    for scheduled in (False, True):
        torch.manual_seed(0)
        lower, upper = nn.Sequential(nn.Linear(32, 32), nn.Tanh()), Upper(blocks=2)
        called: Any = monet_like.auto_schedule(upper, memory_budget="4 MB", **QUICK) if scheduled else upper
        for batch in (4, 5):
            x = lower(torch.randn(batch, 16, 32)) + 1
            torch.manual_seed(1)
            first = called(x)
            loss_of(called(first @ torch.ones(50, 32), {"state": lower(torch.ones(batch, 16, 32))})).backward()
        grads.append([p.grad for p in (*lower.parameters(), *upper.parameters()) if p.grad is not None])
    assert len(planned_calls(upper)) == 4
    assert all(torch.equal(mine, plain) for mine, plain in zip(grads[1], grads[0], strict=True))


class Halves(Decoder):
    """A block is called twice in different ways, with and without a gradient of its input."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        with torch.no_grad():
            seen = self.layers[0](x).mean()
        return self.head(self.layers[0](x)[:, ::2] + self.layers[0](x[:, ::2])) * seen


def test_a_block_may_be_called_in_two_ways() -> None:
    x = tokens()
    mine = scheduled(Halves(blocks=1), [(nothing, x), (nothing, x)], "2 MB")
    assert measured_peak(mine, x) <= plan_of(mine).peak_bytes  # the second way is counted


def test_blocks_run_plainly_until_the_model_is_called() -> None:
    plain = Decoder(blocks=1)
    mine: Any = monet_like.auto_schedule(copy.deepcopy(plain), memory_budget="80%", **QUICK)
    x = torch.randn(2, 3, 32)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="Short has no schedule yet and runs as plain PyTorch: the first call"):
        found = mine.layers[0](x)
    torch.manual_seed(0)
    assert torch.equal(found, plain.layers[0](x))


@pytest.mark.parametrize("width", [8, 24])
def test_all_of_plain_memory_always_has_a_plan(width: int) -> None:
    """A convolution and a ReLU, whose schedules need a little more than plain PyTorch."""
    plain = nn.Sequential(
        nn.Conv1d(4, width, 3), nn.Sequential(nn.Conv1d(width, width, 3), nn.ReLU()), nn.Conv1d(width, 2, 3)
    )
    x = torch.randn(4, 4, 64, generator=torch.Generator().manual_seed(0))
    mine = monet_like.auto_schedule(copy.deepcopy(plain), x, memory_budget="100%", **{**QUICK, "blocks": "1"})
    plan = plan_of(mine)
    assert plan.peak_bytes <= plan.plain_peak_bytes
    assert_same_step(plain, mine, x)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torchao", "4bit"])
def test_blocks_with_quantised_weights(kind: str) -> None:
    make = by_torchao("Int8WeightOnlyConfig") if kind == "torchao" else four_bit()
    plain = nn.Sequential(nn.Linear(64, 64), nn.Sequential(adapted(make), nn.Linear(8, 64)), nn.Linear(64, 8))
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    mine = scheduled(plain, [(nothing, x), (nothing, x[:5])], blocks="1", budget="1 GB")
    assert not blocks_of(mine)[0]._kept.plain


class Checkpointed(Short):
    """A block that checkpoints itself, as layers of Transformers do after PEFT's `prepare_model_for_kbit_training`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(super().forward, x, use_reentrant=True)
        return result


def test_blocks_that_checkpoint_themselves_by_reentrance() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
        mine = scheduled(Decoder(Checkpointed, 2), [(nothing, tokens())] * 2, "10 MB")
    assert not any(block._kept.plain for block in blocks_of(mine))


def test_a_block_whose_result_has_no_gradient_runs_plainly() -> None:
    class Last(Decoder):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](self.embedding(tokens))
            return self.head(self.norm(x + self.layers[1](x)))

    class Detached(Short):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).detach()

    plain = Last(blocks=2)
    plain.layers[1] = Detached(32)
    mine = scheduled(plain, [(nothing, tokens())] * 2, "10 MB")
    assert [block.record is None for block in blocks_of(mine)] == [False, True]


def test_an_optimizer_may_step_in_the_backward() -> None:
    def in_backward(model: Any) -> None:
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.5)

            def step(parameter: torch.Tensor, optimizer: Any = optimizer) -> None:
                steps.append(1)
                optimizer.step()
                parameter.grad = None

            parameter.register_post_accumulate_grad_hook(step)

    steps: list[int] = []
    plain = Decoder(blocks=2)
    mine = scheduled(plain, [(in_backward, tokens())] + [(nothing, tokens())] * 2, "90%")
    assert len(steps) == 2 * 3 * len([*plain.parameters()])
    assert any(block.record is not None for block in blocks_of(mine))
