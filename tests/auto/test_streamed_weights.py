"""Frozen weights on the host, on a CPU, where both memories are the host's and copies are made all the same: against
the same model with resident weights, to the bit.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from block_models import CPU, Decoder, assert_same_step, loss_of, measured_peak, plan_of, tokens, train
from later import Later
from quantised_nets import adapted, by_torchao, eight_bit, four_bit
from streamed_models import Lora, adapted_decoder, adapted_short, stream
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import monet_like
from monet_like.auto import streamed
from monet_like.auto.block import blocks_of
from monet_like.errors import InfeasibleError, MonetError, UsageError
from monet_like.profile.measure import allocated_stretches
from monet_like.runtime import frozen_weights as weights_of
from monet_like.runtime.frozen_weights import check_host, frozen_weights
from monet_like.runtime.streamed_block import Streamed
from monet_like.runtime.streamed_weights import WeightStream

safetensors = Later("safetensors.torch")
QUICK: dict[str, Any] = {"exact": True, "effort": "quick", "loss": loss_of, "blocks": "layers.*"}


def decoder(blocks: int = 4) -> Decoder:
    return adapted_decoder(blocks, adapted_short)


@pytest.fixture(scope="module")
def scheduled() -> nn.Module:
    """A planned model, to be copied."""
    return monet_like.auto_schedule(decoder(), tokens(4, 8), memory_budget="85%", **QUICK)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot holds no weights but while its block runs: what is read later is no number."""
    go = WeightStream._go

    def and_poison(self: WeightStream, block: int, slot: Any) -> None:
        go(self, block, slot)
        slot.bytes.fill_(255)
        slot.versions = ()  # copied again, also where it would still be there

    monkeypatch.setattr(WeightStream, "_go", and_poison)


def pair(scheduled: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module, WeightStream]:
    """Two copies of a planned model, the weights of the second streamed."""
    resident, mine = copy.deepcopy(scheduled), copy.deepcopy(scheduled)
    return resident, mine, stream(mine, **options)


def trained(model: nn.Module, x: torch.Tensor, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    torch.manual_seed(5)
    losses = []
    for _ in range(steps):
        loss = loss_of(model(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_equal_states(one: nn.Module, other: nn.Module) -> None:
    theirs = other.state_dict()
    assert list(one.state_dict()) == list(theirs)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())


def test_fifty_steps_are_equal_to_the_bit(scheduled: nn.Module) -> None:
    x = tokens(4, 8)
    resident, mine, made = pair(scheduled)
    assert trained(mine, x, 50) == trained(resident, x, 50)
    assert_equal_states(mine, resident)
    assert made.ring_bytes == 2 * made.slot_bytes and len(made.weights) == 4


@pytest.mark.slow(but=["3-2-blocks1"])
@pytest.mark.parametrize(("slots", "ahead", "blocks"), [(1, 1, None), (3, 2, (0, 2, 3))])
def test_nothing_reads_a_slot_after_its_block(
    scheduled: nn.Module, poisoned: None, slots: int, ahead: int, blocks: Any
) -> None:
    x = tokens(4, 8)
    resident, mine, _ = pair(scheduled, slots=slots, ahead=ahead, blocks=blocks)
    for seed in range(3):
        assert_same_step(resident, mine, x, seed)
    mine.eval(), resident.eval()
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            assert torch.equal(mine(x), resident(x))
    loss_of(mine(x)).backward()  # of eval mode: plain PyTorch's


def test_copies_are_as_few_as_the_ring_allows(scheduled: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the turn of the step the last blocks are still there."""
    filled: list[int] = []
    fill = WeightStream._fill
    monkeypatch.setattr(WeightStream, "_fill", lambda self, slot, b: filled.append(b) or fill(self, slot, b))
    mine = copy.deepcopy(scheduled)
    stream(mine)
    x = tokens(4, 8)
    train(mine, x)
    filled.clear()
    train(mine, x)
    assert filled == [0, 1, 2, 3, 1, 0]  # whatever was written since the last step
    mine.eval()
    filled.clear()
    with torch.no_grad():
        mine(x)
    assert filled == [0, 1, 2, 3]  # and none for a next forward


def test_a_slot_waits_for_weights_that_leave_it_while_their_block_runs(
    scheduled: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stream(copy.deepcopy(scheduled))
    read: list[Any] = []
    monkeypatch.setattr(made, "_read", read.append)
    with made.there(1, "forward"):
        slot, _ = made.running[1]
        made.release(1)
        assert read == [slot]


def test_writes_through_data_are_followed(scheduled: nn.Module) -> None:
    """As of adapters that are merged into weights, and taken out again before training goes on, or merged for good
    between two steps. Such a write changes no version.
    """
    x = tokens(4, 8)
    models = pair(scheduled)[:2]

    def all_written(factor: float) -> None:
        for model in models:
            for layer in model.layers:
                layer.up.base.weight.data *= factor

    def evaluated(model: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return model.eval()(x)

    for model in models:
        train(model, x)
    for factor in (0.5, 4.0, 0.5):
        all_written(factor)
        assert torch.equal(*map(evaluated, models))
    all_written(2.0)
    resident, mine = (model.train() for model in models)
    for factor in (1.0, 0.5, 3.0):
        all_written(factor)
        assert_same_step(resident, mine, x, 2)


def test_data_of_another_form_is_followed(scheduled: nn.Module) -> None:
    """Of the same size, or smaller, it is streamed in its new form; what is larger stays on the device."""
    x = tokens(4, 8)
    resident, mine, made = pair(scheduled)
    train(mine, x), train(resident, x)
    for model in (resident, mine):
        weight = model.layers[1].up.base.weight
        weight.data = weight.data.t().contiguous().t() * 0.5
    assert_same_step(resident, mine, x)
    assert not mine.layers[1].up.base.weight.is_contiguous() and len(made.weights[1]) == len(made.weights[0])
    for model in (resident, mine):
        weight = model.layers[2].up.base.weight
        weight.data = weight.data.double()
    with torch.no_grad(), pytest.raises(RuntimeError, match="same dtype"):
        resident.eval()(x)
    told = pytest.warns(UserWarning, match="more data than its place")
    with torch.no_grad(), told, pytest.raises(RuntimeError, match="same dtype"):
        mine.eval()(x)
    assert mine.layers[2].up.base.weight.dtype == torch.float64 and len(made.weights[2]) == len(made.weights[0]) - 1
    for model in (resident, mine):
        weight = model.train().layers[2].up.base.weight
        weight.data = weight.data.float()
    assert_same_step(resident, mine, x)


class Repacks(nn.Linear):
    """Lays its weight out otherwise in its first evaluation, as bitsandbytes does on some CPUs."""

    packed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and not self.packed:
            self.weight.data, self.packed = self.weight.data.t().contiguous(), True
        return nn.functional.linear(x, self.weight.t() if self.packed else self.weight)


@pytest.mark.parametrize("gradients", [False, True])
def test_data_that_a_forward_assigns_stays(gradients: bool, poisoned: None) -> None:
    torch.manual_seed(0)
    layers = [Lora(Repacks(64, 32, bias=False)), Lora(Repacks(32, 64, bias=False))]
    plain, x = nn.Sequential(*layers), torch.randn(8, 64)
    mine = monet_like.auto_schedule(copy.deepcopy(plain), x, memory_budget="100%", **{**QUICK, "blocks": "*"})
    made = stream(mine, slots=1)
    assert_same_step(plain, mine, x)
    mine.eval(), plain.eval()
    for _ in range(3):
        with torch.set_grad_enabled(gradients):
            assert torch.equal(mine(x), plain(x))
    assert all(layer.base.packed for layer in mine) and len(made.weights) == 2


@pytest.mark.parametrize("mapped", [False, True], ids=["in memory", "mapped"])
def test_weights_are_never_twice_on_the_host(scheduled: nn.Module, mapped: bool, tmp_path: Path) -> None:
    """Each tensor is copied to memory that can be pinned and freed, one after the other. Those of a file are mapped: no
    memory is taken but the copies.
    """
    plain, x, made = copy.deepcopy(scheduled), tokens(4, 8), WeightStream(CPU)
    file = tmp_path / "weights.safetensors"
    safetensors.save_file(plain.state_dict(), file)

    def loaded(mark: Callable[[], None]) -> list[int]:
        model = copy.deepcopy(scheduled)
        if mapped:
            model.to("meta").load_state_dict(safetensors.load_file(file), assign=True)
        weights = dict(enumerate(frozen_weights(model, [block._model for block in blocks_of(model)])))
        mark()
        made.keep(weights)
        found.append(model)
        return [weight.bytes for own in weights.values() for weight in own]

    found: list[nn.Module] = []
    sizes: list[int] = []
    before, moved = allocated_stretches(lambda mark: sizes.extend(loaded(mark)), CPU)
    (mine,) = found
    more, most = moved.end_bytes - before.end_bytes, moved.peak_bytes - before.end_bytes
    assert max(sizes) < sum(sizes) / 4
    assert (more, most) == ((sum(sizes), sum(sizes)) if mapped else (0, max(sizes)))
    made.arrange([(0, "forward")], 2, 1)
    for number, block in enumerate(blocks_of(mine)):
        block._streamed = Streamed(made, number)
    assert_same_step(plain, mine, x)


def test_the_plan_streams_what_does_not_fit() -> None:
    """The layers are found. The predicted peak is the allocator's: on a CPU it counts the host's copies, too."""
    plain, x = decoder(), tokens(2, 8)
    options = {**QUICK, "blocks": None}
    mine = monet_like.auto_schedule(copy.deepcopy(plain), x, memory_budget="80%", weights="auto", **options)
    assert [block._block_name for block in blocks_of(mine)] == [f"layers.{place}" for place in range(4)]
    plan = plan_of(mine)
    assert any(point.ahead for point in plan.points)
    for seed in range(2):
        assert_same_step(plain, mine, x, seed)
    (made,) = {id(b._streamed.stream): b._streamed.stream for b in blocks_of(mine) if b._streamed}.values()
    assert measured_peak(mine, x) - made.host_bytes + made.ring_bytes == plan.peak_bytes <= plan.budget_bytes
    longer = x.repeat(1, 2)
    assert_same_step(plain, mine, longer[:, :6])
    again = monet_like.unwrap(mine)
    assert all(block.__class__ is not monet_like.ScheduleWrapper for block in again.layers)
    assert_equal_states(again, plain)
    assert_same_step(plain, again, x)
    assert copy.deepcopy(again) is not again


@pytest.mark.slow
def test_nothing_is_streamed_that_fits() -> None:
    mine = monet_like.auto_schedule(decoder(2), tokens(2, 8), memory_budget="100%", weights="auto", **QUICK)
    plan = plan_of(mine)
    assert not any(point.ahead for point in plan.points)
    assert all(block._streamed is None for block in blocks_of(mine))


def test_a_change_is_refused_before_anything_is_changed() -> None:
    plain, x = decoder(), tokens(2, 8)
    options = {**QUICK, "memory_budget": "80%", "weights": "auto"}
    mine = monet_like.auto_schedule(copy.deepcopy(plain), x, **options)
    last = blocks_of(mine)[-1]
    outer = nn.Sequential(mine)  # as DistributedDataParallel around it
    for change in (mine.half, mine.layers.half, outer.double, lambda: mine.to("meta"), last.half):
        with pytest.raises(UsageError, match="cannot become"):
            change()
        assert {(p.dtype, p.device.type) for p in mine.parameters()} == {(torch.float32, "cpu")}
    assert mine.to("cpu").float() is mine
    assert_same_step(plain, mine, x)
    again = monet_like.unwrap(mine).half()
    assert {p.dtype for p in again.parameters()} == {torch.float16}


def test_another_card_is_another_device(scheduled: nn.Module) -> None:
    mine = copy.deepcopy(scheduled)
    made = stream(mine)
    block = blocks_of(mine)[0]
    assert block._streamed is not None
    with FakeTensorMode():
        made.device = torch.device("cuda", 0)
        block._streamed.check_change(lambda tensor: tensor.to("cuda:0"), "layers.0")
        with pytest.raises(UsageError, match="on cuda:1"):
            block._streamed.check_change(lambda tensor: tensor.to("cuda:1"), "layers.0")


@pytest.mark.slow
def test_states_are_those_of_the_model(scheduled: nn.Module) -> None:
    x = tokens(4, 8)
    resident, mine, _ = pair(scheduled)
    train(mine, x)
    assert_equal_states(mine, resident)
    file = io.BytesIO()
    torch.save(mine.state_dict(), file)
    file.seek(0)
    other = {name: tensor + 1 for name, tensor in torch.load(file).items() if "base" in name}
    for model in (mine, resident):
        model.load_state_dict(other, strict=False)
    assert_same_step(resident, mine, x)
    with pytest.raises(UsageError, match="cannot be copied"):
        copy.deepcopy(mine)


@pytest.mark.slow
def test_a_weight_that_is_trained_stays_on_the_device(scheduled: nn.Module) -> None:
    x = tokens(4, 8)
    resident, mine, made = pair(scheduled)
    train(mine, x), train(resident, x)
    for model in (mine, resident):
        model.layers[2].up.base.weight.requires_grad_()
    with pytest.warns(UserWarning, match=r"layers\.2 is trained now") as told:
        train(mine, x)
    assert sum("trained now" in str(one.message) for one in told) == 1
    for seed in range(2):
        assert_same_step(resident, mine, x, seed)
    assert len(made.weights[2]) == len(made.weights[1]) - 1


@pytest.mark.slow
def test_calls_without_a_plan_run_as_plain_pytorch(scheduled: nn.Module, poisoned: None) -> None:
    """What autograd saves of weights then is read again from the host."""
    x = tokens(6, 12)
    resident, mine, _ = pair(scheduled)
    for model in (resident, mine):
        train(model, tokens(4, 8))
        for block in blocks_of(model):
            block._on_new_input = "plain"
        model.zero_grad()
    plain = monet_like.unwrap(copy.deepcopy(resident))
    with pytest.warns(UserWarning, match="runs as plain PyTorch"):
        train(mine, x)
    for seed in range(2):
        assert_same_step(plain, mine, x, seed)


class Views(nn.Module):
    """Returns a view of its weight in eval mode."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(64, width), False), nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.weight.sum(0) if self.training else self.weight[: x.shape[0]]


@pytest.mark.slow
def test_results_that_are_views_of_weights_stay(poisoned: None) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Views(32), Views(32)])

        def forward(self, x: torch.Tensor) -> Any:
            if self.training:
                return self.layers[1](self.layers[0](x))
            return SimpleNamespace(views=[layer(x) for layer in self.layers])

    x, plain = torch.randn(8, 32), Pair()
    mine = monet_like.auto_schedule(copy.deepcopy(plain), x, memory_budget="100%", **QUICK)
    stream(mine, slots=1)
    with torch.no_grad():
        found, expected = mine.eval()(x).views, plain.eval()(x).views
    assert all(map(torch.equal, found, expected))


MAKES = {
    "nf4": four_bit,
    "nf4 twice": lambda: four_bit(compress_statistics=True),
    "int8": eight_bit,
    "torchao int8": lambda: by_torchao("Int8WeightOnlyConfig"),
}


@pytest.mark.slow(but=["nf4"])
@pytest.mark.parametrize("kind", MAKES)
def test_quantised_weights_travel_as_their_bytes(kind: str, poisoned: None) -> None:
    plain = adapted(MAKES[kind]())
    x = torch.randn(16, 64)
    blocks = [plain[1], plain[3]]
    numbers = [sum(weight.bytes for weight in own) for own in frozen_weights(plain, blocks)]
    assert all(size >= module.base.in_features * 64 // 2 for size, module in zip(numbers, blocks, strict=True))
    mine = copy.deepcopy(plain)
    mine = monet_like.auto_schedule(mine, x, memory_budget="100%", **{**QUICK, "blocks": [mine[1], mine[3]]})
    made = stream(mine, slots=1)
    assert len(made.weights) == 2
    for seed in range(2):
        assert_same_step(plain, mine, x, seed)
    mine.eval(), plain.eval()
    with torch.no_grad():
        assert torch.equal(mine(x), plain(x))


def test_layers_are_found_in_every_list_that_has_frozen_weights() -> None:
    def listed(*layers: nn.Module) -> nn.ModuleList:
        return nn.ModuleList(layers)

    def frozen(count: int) -> list[nn.Module]:
        return [nn.Sequential(*(nn.Linear(64, 64) for _ in range(2))).requires_grad_(False) for _ in range(count)]

    double, single, stages = frozen(2), frozen(3), listed(listed(*frozen(2)), nn.Linear(64, 64))
    model = nn.Module()
    model.double, model.single, model.stages = listed(*double), listed(*single), stages
    model.trained = listed(nn.Linear(64, 64), nn.Linear(64, 64))
    model.once = listed(*frozen(1))
    model.several = nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.ReLU())
    assert streamed.frozen_layers(model) == [*double, *single, *stages[0], *model.once[0]]
    shared = nn.Linear(64, 64).requires_grad_(False)
    with pytest.raises(UsageError, match="has no list of equal layers"):  # one layer, called twice
        streamed.frozen_layers(nn.Sequential(shared, shared))


@pytest.mark.slow
def test_what_is_refused_says_why() -> None:
    x, trained_model = tokens(2, 8), Decoder()
    with pytest.raises(
        UsageError, match=r"no list of equal layers with frozen weights; name them \(blocks=\), train an"
    ):
        monet_like.auto_schedule(Decoder(), x, memory_budget="60%", weights="auto")
    with pytest.raises(UsageError, match="choose one of device, auto"):
        monet_like.auto_schedule(decoder(1), x, blocks="layers.*", weights="host")
    with pytest.raises(InfeasibleError, match="a weight that is trained stays on"):
        monet_like.auto_schedule(trained_model, x, memory_budget=50_000, weights="auto", **QUICK)
    with pytest.raises(InfeasibleError, match="or give weights='auto'"):
        monet_like.auto_schedule(decoder(1), x, memory_budget=50_000, **QUICK)


def test_the_host_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_of, "available_bytes", lambda: 8 * 2**30)
    with pytest.raises(MonetError, match=r"weights of 10\.00 GB .* of which 8\.00 GB are available"):
        check_host(10 * 2**30, torch.device("cpu"))
    check_host(7 * 2**30, torch.device("cpu"))
    mine = decoder()
    before = [parameter.data_ptr() for parameter in mine.parameters()]
    monkeypatch.setattr(weights_of, "available_bytes", lambda: 1000)
    with pytest.raises(MonetError, match="memory of the host"):
        monet_like.auto_schedule(mine, tokens(2, 8), memory_budget="80%", weights="auto", **QUICK)
    assert not blocks_of(mine)
    assert [parameter.data_ptr() for parameter in mine.parameters()] == before


def test_weights_of_two_blocks_stay_resident() -> None:
    model = decoder(3)
    model.layers[1].up.base.weight = model.layers[0].up.base.weight
    model.head.weight = nn.Parameter(model.layers[2].up.base.weight.detach()[:50].clone(), False)
    names = [[weight.name for weight in own] for own in frozen_weights(model, list(model.layers))]
    assert [len(own) for own in names] == [1, 1, 2]
    assert all(not w.owner.requires_grad for own in frozen_weights(model, list(model.layers)) for w in own)
    assert replace(frozen_weights(model, list(model.layers))[2][0], name="x").plain


@pytest.mark.slow
def test_later_plans_keep_what_is_streamed() -> None:
    """Of larger inputs, of layers that are trained later, and of a second start, which reads the plan."""
    plain, x = decoder(3), tokens(2, 8)
    options: dict[str, Any] = {**QUICK, "memory_budget": "85%", "weights": "auto"}
    mine = monet_like.auto_schedule(copy.deepcopy(plain), x, **options)
    again = monet_like.auto_schedule(copy.deepcopy(plain), x, **options)
    plans = [monet_like.block_plan(model) for model in (mine, again)]
    assert plans[0] is not None and plans[0] == plans[1]
    streamed_before = [point.ahead for point in plans[0].points]
    assert any(streamed_before)
    for form in (x.repeat(1, 2)[:, :9], x):
        assert_same_step(plain, mine, form)
        plan = plan_of(mine)
        assert [point.ahead for point in plan.points] == streamed_before
    place = next(place for place, ahead in enumerate(streamed_before) if ahead)
    for model in (plain, mine):
        model.layers[place].down.base.weight.requires_grad_()
    with pytest.warns(UserWarning, match="trained now") as told:
        assert_same_step(plain, mine, x)
    assert sum("trained now" in str(one.message) for one in told) == 1
    assert_same_step(plain, mine, x, 2)


@pytest.mark.slow
def test_several_micro_batches() -> None:
    plain, x = decoder(), tokens(4, 8)
    mine = monet_like.auto_schedule(
        copy.deepcopy(plain), memory_budget="80%", weights="auto", **{**QUICK, "loss": None}
    )

    def step(model: nn.Module, parts: torch.Tensor) -> None:
        for part in parts.chunk(2):
            loss_of(model(part)).backward()

    plan = monet_like.plan_step(mine, lambda parts: step(mine, parts), x)
    assert any(point.ahead for point in plan.points)
    for seed in range(2):
        for model in (plain, mine):
            model.zero_grad()
            torch.manual_seed(seed)
            step(model, x)
        for one, other in zip(plain.parameters(), mine.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or other.grad is None or torch.equal(one.grad, other.grad)
