"""Frozen weights that are quantised: captured as they are, dequantised again in the backward, and equal to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quantised_nets import (
    Adapted,
    Make,
    adapted,
    adapted_llama,
    bitsandbytes,
    by_torchao,
    eight_bit,
    four_bit,
    quantization,
)
from replays import LOSS_BYTES, costs_of, record_for, worst
from torch import nn
from training import Outcome, run, twin

from monet_like import ScheduleWrapper, auto_schedule
from monet_like.capture.lower.step import capture
from monet_like.capture.quantised import is_quantised
from monet_like.errors import CaptureError
from monet_like.ir.simulate import simulate
from monet_like.plan import store_all
from monet_like.plan.baseline import plain_report
from monet_like.plan.random_schedules import random_schedule
from monet_like.profile.devices import DEVICES
from monet_like.profile.roofline import roofline
from monet_like.profile.work import flops
from monet_like.variants import admitted

BFLOAT = torch.bfloat16
LAYERS: dict[str, tuple[Make, torch.dtype]] = {
    "nf4": (four_bit(compress_statistics=False), torch.float32),
    "nf4 twice": (four_bit(), torch.float32),
    "nf4 in bfloat16": (four_bit(dtype=BFLOAT), torch.float32),
    "no bias": (four_bit(bias=False), torch.float32),
    "stored as bfloat16": (four_bit(dtype=BFLOAT, quant_storage=BFLOAT), BFLOAT),
    "int8": (eight_bit(), torch.float32),
    "int8 in bfloat16": (eight_bit(), BFLOAT),
    "int8 with threshold": (eight_bit(threshold=6.0), torch.float32),
    "torchao int8": (by_torchao("Int8WeightOnlyConfig"), torch.float32),
    "torchao intx": (by_torchao("IntxWeightOnlyConfig", torch.int4, dtype=BFLOAT), BFLOAT),
}


def example(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    make, dtype = LAYERS[name]
    return adapted(make, dtype), (torch.randn(4, 16, 64, dtype=dtype),), {}


@pytest.mark.slow(but=["nf4 twice", "stored as bfloat16", "int8", "torchao int8"])
@pytest.mark.parametrize("name", list(LAYERS))
def test_steps_are_bit_equal_at_the_predicted_peak(name: str) -> None:
    """Plain PyTorch's peak is predicted as well: bitsandbytes dequantises again, torchao keeps the dequantised weight.

    torchao is a package of Python functions, whose variables keep small tensors a little longer.
    """
    net, args, kwargs = built = example(name)
    if "twice" not in name:
        net[0].requires_grad_(False)  # so the input of a quantised layer has no gradient
    raw = capture(net, args)
    captured = admitted(raw, "normal")
    costs = costs_of(captured, built, "normal", timed=False)
    plain = run(twin(net), args, kwargs, measured=True)
    resident = captured.program.resident_bytes - LOSS_BYTES
    predicted = plain_report(captured.plain, costs, 0, autograd_nodes=captured.autograd_nodes).peak_bytes
    assert abs(resident + plain.rise_bytes - predicted) <= (0.005 * predicted if "torchao" in name else 0)
    for seed, drop in enumerate((0.0, 0.5, 0.9)):
        schedule = random_schedule(captured.program, seed, drop=drop, others=0.0)
        net.zero_grad()
        record = record_for(captured, schedule, "normal", built)
        # On the net itself, since a copy's constants would be captured anew; copies are a test of their own.
        wrapper = ScheduleWrapper(net, record, example=(args, kwargs), captured=captured)
        outcome = run(wrapper, args, kwargs, measured=True)
        assert worst(plain, outcome) == 0.0
        predicted = simulate(captured.program, schedule, costs).peak_bytes
        assert abs(resident + outcome.rise_bytes - predicted) <= 0.002 * predicted
    assert {n for n, gradient in plain.gradients.items() if gradient is not None} == {
        n for n, parameter in net.named_parameters() if parameter.requires_grad
    }


def memory(net: nn.Module) -> int:
    """Bytes of all parameters, and of tensors that 4-bit weights' states hold, each storage once."""
    found: list[torch.Tensor] = []
    for parameter in net.parameters():
        parts = parameter.__tensor_flatten__()[0] if hasattr(parameter, "__tensor_flatten__") else ()
        found += [getattr(parameter, part) for part in parts] or [parameter]
        state = getattr(parameter, "quant_state", None)
        for holder in filter(None, (state, getattr(state, "state2", None))):
            found += [member for member in vars(holder).values() if isinstance(member, torch.Tensor)]
    for module in net.modules():
        if isinstance(module, bitsandbytes.nn.Linear8bitLt):
            found.append(module.state.SCB)
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}.values())


@pytest.mark.parametrize("name", ["nf4 twice", "int8", "torchao int8"])
def test_resident_bytes_are_those_of_the_quantised_weights(name: str) -> None:
    net, args, _ = example(name)
    captured = capture(net, args)
    assert captured.program.resident_bytes == memory(net) + args[0].untyped_storage().nbytes()
    assert captured.program.resident_bytes < 4 * (64 * 256 + 256 * 128)


@pytest.mark.parametrize("name", ["nf4 twice", "int8"])
def test_dequantised_weights_are_made_again_as_plain_pytorch_does(name: str) -> None:
    """Of the backward's own dequantisation no forward makes anything, and the forward's is not kept."""
    net, args, _ = example(name)
    captured = capture(net, args)
    program = captured.plain
    weights = {v for n, v in captured.parameters if n.endswith("base.weight")}
    dequantised = {v for task in program.tasks if task.runs == "again" and weights & {*task.reads} for v in task.writes}
    assert len(dequantised) == 2
    assert {program.values[v].bytes for v in dequantised} == {4 * 64 * 256, 4 * 256 * 128}
    plan = store_all(captured.program)
    assert not {v for i in plan.forward for v in captured.program.tasks[i].writes} & dequantised
    assert sum(bool(dequantised & {*slot[0].reads}) for slot in program.slots) == 2


def step(model: nn.Module, *args: Any, **kwargs: Any) -> Outcome:
    model.zero_grad()
    return run(model, args, kwargs)


def planned(net: nn.Module, x: torch.Tensor, captured: Any = None) -> ScheduleWrapper:
    captured = admitted(captured or capture(net, (x,)), "normal")
    schedule = random_schedule(captured.program, 0, drop=0.5, others=0.0)
    return ScheduleWrapper(net, record_for(captured, schedule, "normal", (net, (x,), {})), example=((x,), {}))


def requantised(net: Any) -> None:
    weight = torch.randn(256, 64)
    if isinstance(net[1].base, bitsandbytes.nn.Linear4bit):
        net[1].base.weight = bitsandbytes.nn.Params4bit(weight, compress_statistics=False, quant_type="nf4").to("cpu")
    elif isinstance(net[1].base, bitsandbytes.nn.Linear8bitLt):
        other = eight_bit()(64, 256)
        other.weight.data = weight
        net[1].base.weight = other.requires_grad_(False).to("cpu").weight
        net[1].base.state = bitsandbytes.MatmulLtState()
        net[1].base.state.has_fp16_weights = False
    else:
        layer = nn.Linear(64, 256)
        quantization.quantize_(layer.requires_grad_(False), quantization.Int8WeightOnlyConfig())
        net[1].base.weight = layer.weight


def scales(net: Any) -> torch.Tensor:
    base = net[1].base
    if isinstance(base, bitsandbytes.nn.Linear4bit):
        return base.weight.quant_state.absmax  # type: ignore[no-any-return]
    return base.state.SCB if isinstance(base, bitsandbytes.nn.Linear8bitLt) else base.weight.scale


@pytest.mark.slow(but=["nf4"])
@pytest.mark.parametrize("name", ["nf4", "int8", "torchao int8"])
def test_weights_that_are_quantised_anew_are_followed(name: str) -> None:
    """New contents are read where they are written; another weight is captured."""
    net, (x,), _ = example(name)
    wrapper = planned(net, x)
    before = step(wrapper, x)
    assert worst(step(net, x), before) == 0.0
    scales(net).mul_(2)
    doubled = step(wrapper, x)
    assert worst(step(net, x), doubled) == 0.0
    assert worst(before, doubled) > 0.1
    assert len(wrapper._kept) == 1
    requantised(net)
    other = step(wrapper, x)
    assert worst(step(net, x), other) == 0.0
    assert worst(doubled, other) > 0.1
    assert len(wrapper._kept) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nf4 twice", "int8", "torchao int8"])
def test_copies_and_state_dicts(name: str) -> None:
    net, (x,), _ = example(name)
    wrapper = planned(net, x)
    step(wrapper, x)
    mine, theirs = wrapper.state_dict(), net.state_dict()
    assert list(mine) == list(theirs)
    other = copy.deepcopy(wrapper)
    scales(other._model).mul_(2)
    assert worst(step(twin(net), x), step(wrapper, x)) == 0.0
    assert worst(step(other._model, x), step(other, x)) == 0.0


def test_datasheet_costs_of_four_bit_products() -> None:
    """The arithmetic of the product with the dequantised weight, and its memory."""
    captured = capture(*example("nf4")[:2])
    costs = roofline(captured, DEVICES["a100"])
    tasks = [task for task in captured.program.tasks if "gemm_4bit" in task.cost]
    assert [flops(captured, task) for task in tasks] == [2 * 64 * 64 * 256, 2 * 64 * 256 * 128]
    assert [costs[task.cost].workspace_bytes for task in tasks] == [4 * 64 * 256, 4 * 256 * 128]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["4bit", "8bit", "torchao"])
def test_low_rank_adapters_on_a_quantised_llama(kind: str) -> None:
    """PEFT's layers and their dropout, planned within 80 % of plain PyTorch's peak."""
    net = adapted_llama(kind)
    assert {"4bit": "Linear4bit", "8bit": "Linear8bitLt", "torchao": "TorchaoLoraLinear"}[kind] in repr(net)
    tokens = torch.arange(64).view(4, 16) * 7 % 61
    words = {"input_ids": tokens, "labels": tokens}
    plain = step(twin(net), **words)
    wrapper = auto_schedule(net, memory_budget="80%", mode="inplace_multiway_newnode", time_limit_seconds=2)
    assert worst(plain, step(wrapper, **words)) == 0.0
    assert wrapper.record is not None and wrapper.record.peak_bytes <= 0.8 * wrapper.record.plain_peak_bytes


@pytest.mark.slow
def test_int8_products_as_on_a_gpu() -> None:
    """In evaluation mode a CPU, too, quantises the input and multiplies integers; the backward is the GPU's."""
    net, (x,), _ = example("int8")
    for layer in (net[1].base, net[3].base):
        layer.eval()
    wrapper = planned(net, x)
    assert any("int8_scaled_mm" in task.cost for task in capture(net, (x,)).program.tasks)
    assert worst(step(net, x), step(wrapper, x)) == 0.0


# Refusals -------------------------------------------------------------------------------------------------------------


def outliers(net: Any) -> None:
    net[1].base.eval()
    net[1].base.state.threshold = 6.0


def trainable(net: Any) -> None:
    net[1].base.weight.requires_grad_()


def unquantised(net: Any) -> None:
    net[1] = Adapted(four_bit()(64, 256), 64, 256)


def anew(net: Any) -> None:
    net[1].base.state.has_fp16_weights = True


def embedded(net: Any) -> None:
    net[0] = bitsandbytes.nn.EmbeddingNF4(32, 64).to("cpu")


def without_dtype(net: Any) -> None:
    net[1].base.compute_dtype, net[1].base.compute_type_is_set = None, False
    net[1].base.bias.data = net[1].base.bias.data.bfloat16()


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("int8", outliers, r"1.base is a Linear8bitLt with threshold=6.0, .* set threshold=0.0"),
        ("int8", anew, r"1.base is a Linear8bitLt with has_fp16_weights=True, .* has_fp16_weights=False"),
        ("nf4", unquantised, r"1.base is a Linear4bit whose weight is not quantised yet; .*model.to\(device\)"),
        ("nf4", embedded, r"0 is a EmbeddingNF4, .* keep embeddings in 16 bits"),
        ("nf4", without_dtype, r"forward of 1.base assigns a tensor's .data, .* call the model once before"),
        ("torchao int8", trainable, r"1.base.weight is a Int8Tensor that requires a gradient, .* freeze it"),
    ],
)
def test_what_cannot_be_captured_is_named(name: str, change: Callable[[Any], None], said: str) -> None:
    net, (x,), _ = example(name)
    change(net)
    with pytest.raises(CaptureError, match=said):
        capture(net, (x,))


def test_int8_layers_are_planned_where_they_train() -> None:
    net, (x,), _ = example("int8")
    with pytest.raises(CaptureError, match=r"1.base is a Linear8bitLt, .* on a cuda device in another .* Linear4bit"):
        capture(net, (x,), target=torch.device("cuda", 0))


def test_a_call_that_settles_layers_is_enough() -> None:
    net, (x,), _ = example("nf4")
    without_dtype(net)
    net(x)
    wrapper = planned(net, x)
    assert worst(step(net, x), step(wrapper, x)) == 0.0


@pytest.mark.slow(but=["int8"])
@pytest.mark.parametrize("name", ["nf4 in bfloat16", "int8"])
def test_layers_settle_before_the_first_capture(name: str) -> None:
    """So a model that has never been called is captured once, as it is for all later steps."""
    net, (x,), _ = example(name)
    wrapper = planned(net, x, capture(twin(net), (x,)))
    assert worst(step(net, x), step(wrapper, x)) == 0.0
    assert len(wrapper._kept) == 1


# Custom functions and the objects that they are given -----------------------------------------------------------------


class Scales:
    """Holds tensors, as the state of a quantised weight does."""

    def __init__(self) -> None:
        self.tensors = [torch.linspace(0.5, 2.0, 8)]
        self.seen: Any = None


class Scaled(torch.autograd.Function):
    """Multiplies by what an object holds, and reads it again in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, state: Scales, sets: str) -> torch.Tensor:
        ctx.state, ctx.sets = state, sets
        if sets == "forward":
            state.seen = x.detach()
        return x * state.tensors[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        scale = ctx.state.tensors[0] * 3
        scale += 1
        if ctx.sets == "backward":
            ctx.state.seen = scale
        return gradients[0] * scale, None, None


class Scaling(nn.Module):
    def __init__(self, sets: str = "") -> None:
        super().__init__()
        self.layer, self.state, self.sets = nn.Linear(8, 8), Scales(), sets

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(Scaled.apply(self.layer(x), self.state, self.sets)).relu()


def test_objects_given_to_custom_functions_hold_constants() -> None:
    net, x = Scaling(), torch.randn(4, 8)
    wrapper = planned(net, x)
    for change in (lambda: None, lambda: net.state.tensors[0].mul_(2), lambda: setattr(net, "state", Scales())):
        change()
        assert worst(step(net, x), step(wrapper, x)) == 0.0


def test_what_custom_functions_set_in_their_objects_is_set_again() -> None:
    net, x = Scaling("forward"), torch.randn(4, 8)
    plain = twin(net)
    wrapper = planned(net, x)
    assert net.state.seen is None
    for number in range(2):
        assert worst(step(plain, x + number), step(wrapper, x + number)) == 0.0
        assert torch.equal(net.state.seen, plain.state.seen)
    with pytest.raises(CaptureError, match=r"function of Scaling sets Scales.seen in the backward, and a schedule"):
        capture(Scaling("backward"), (torch.randn(4, 8),))


@pytest.mark.parametrize(("kind", "options"), [("Linear4bit", {}), ("Linear8bitLt", {"has_fp16_weights": False})])
def test_a_weight_is_known_to_be_quantised_when_it_has_been_moved(kind: str, options: dict[str, Any]) -> None:
    net = nn.Sequential(nn.Linear(64, 64), getattr(pytest.importorskip("bitsandbytes").nn, kind)(64, 64, **options))
    assert not is_quantised(net)
    assert is_quantised(net.to("cpu"))
    assert is_quantised(net[:1])
