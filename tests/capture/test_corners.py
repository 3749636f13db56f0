"""What models do that is easily lost in a trace: lazily conjugated tensors, results that share memory, recurrent nets'
own dropout, statistics that are no buffers, numbers that change between steps, and whatever a forward does beside
computing."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from any_schedule import AnySchedule, assert_as_plain, step
from nets import Net, linear, rows
from replays import LOSS_BYTES, assert_exact, costs_of, record_for, replayed, worst
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from training import run, twin

from monet_like import ScheduleWrapper, auto_schedule
from monet_like.capture.captured import fake_mode
from monet_like.capture.example_inputs import device_of
from monet_like.capture.lower.step import capture
from monet_like.compiler.costs import measured_costs
from monet_like.compiler.request import Request
from monet_like.errors import CaptureError, UsageError
from monet_like.files import cache_folder
from monet_like.ir.simulate import simulate
from monet_like.plan import store_all
from monet_like.plan.random_schedules import random_schedule
from monet_like.replay.verify.steps import step_peak
from monet_like.variants import admitted

FULL = "inplace_conv_multiway_newnode"


def rotary(_: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    turns = torch.polar(torch.ones(4), torch.arange(4.0))
    return torch.view_as_real(torch.view_as_complex(layer(x).view(6, 4, 2)) * turns).flatten(1)


def power(_: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    spectrum = torch.fft.fft(layer(x))
    return (spectrum * spectrum.conj()).real


def spectrum(_: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A filter of a spectrogram; the inverse looks whether windows overlap, which the trace answers as eager mode."""
    window = torch.hann_window(8)
    found = torch.stft(x.flatten().expand(2, -1), 8, 2, window=window, return_complex=True)
    gain = torch.view_as_real(found).permute(0, 3, 1, 2).tanh()
    return layer(torch.istft(found * gain[:, 0], 8, 2, window=window, length=48).view(-1, 8))


def imaginary(_: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.fft.fft(layer(x)).conj().imag


def chunks(_: Net, layer: nn.Module, x: torch.Tensor) -> Any:
    y = layer(x)
    return {"halves": y.chunk(2, 1), "whole": y, "again": y, "weight": layer.weight}


def written_constant(_: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    flags, counts = torch.zeros(4, dtype=torch.bool), torch.zeros(4, dtype=torch.int64)
    flags[1] = True
    part = counts[:2]
    part += 3
    return layer(x) * (2 if flags.any() else 1) * (int(counts.sum()) + 1)


def unread_noise(_: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = layer(x)
    _unread = nn.functional.dropout(y, 0.5), torch.rand(3), nn.functional.rrelu(y, training=True)
    with torch.no_grad():
        _logged = nn.functional.dropout(y, 0.5) * torch.randn_like(y)
    return nn.functional.dropout(y, 0.5)


def noise_of_another_layout(_: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = nn.functional.alpha_dropout(layer(x).t(), 0.5, training=True)
    y = nn.functional.feature_alpha_dropout(y.view(2, 4, 6).permute(2, 0, 1), 0.5, training=True).flatten(1)
    written, drawn = y.t().detach().clone().bernoulli_(0.5), torch.bernoulli(y.t().detach(), 0.5)
    return written * y.t() + drawn


def reshaped_dropout(_: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    turned = layer(x).view(6, 2, 4).transpose(0, 1)
    return nn.functional.dropout(turned, 0.5).reshape(12, 4)


CASES: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "rotary": lambda: (Net(rotary, linear()), rows()),
    "power": lambda: (Net(power, linear()), rows()),
    "imaginary": lambda: (Net(imaginary, linear()), rows()),
    "spectrum": lambda: (Net(spectrum, linear()), rows()),
    "chunks": lambda: (Net(chunks, linear()), rows()),
    "instance_norm": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.ReLU()),
        rows(4, 3, 8, 8),
    ),
    "rnn": lambda: (nn.RNN(8, 8, 3, dropout=0.3, bidirectional=True, nonlinearity="relu"), rows(2, 3, 8)),
    "unread_noise": lambda: (Net(unread_noise, linear()), rows()),
    "noise_of_another_layout": lambda: (Net(noise_of_another_layout, linear()), rows()),
    "reshaped_dropout": lambda: (Net(reshaped_dropout, linear()), rows()),
    "written_constant": lambda: (Net(written_constant, linear()), rows()),
    "all_dropped": lambda: (nn.Sequential(linear(), nn.Dropout(1.0), linear(), nn.Dropout(0.5)), rows()),
}


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_plain_pytorchs_to_the_bit(name: str) -> None:
    model, x = CASES[name]()
    assert_exact((model, (x.requires_grad_(),), {}), "normal", "inplace_multiway_newnode")


def test_running_statistics_may_move_before_the_backward() -> None:
    """As by a second forward; the gradient does not read them."""
    model, inputs = nn.Sequential(linear(), nn.BatchNorm1d(8), linear()), (rows(), 2 * rows())
    captured, plain = admitted(capture(model, inputs[:1]), FULL), twin(model)
    sum(plain(x).square().sum() for x in inputs).backward()
    variants = set()
    for seed in range(8):
        schedule = random_schedule(captured.program, seed, drop=0.0, others=1.0)
        ways = [slot[way] for slot, way in zip(captured.program.slots, schedule.ways, strict=True)]
        ours = [captured.program.tasks[i].calls[-1].op for i in schedule.forward]
        variants.add(
            any("monet_like" in op for op in ours) and any("native_batch_norm_b" in str(w.calls) for w in ways)
        )
        record = record_for(captured, schedule, FULL, (model, inputs[:1], {}))
        wrapped = ScheduleWrapper(twin(model), record, example=(inputs[:1], {}), captured=captured)
        sum(wrapped(x).square().sum() for x in inputs).backward()
        for one, other in zip(plain.parameters(), wrapped.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
    assert True in variants


def test_bilinear_under_autocast_is_refused() -> None:
    model = Net(lambda _, layer, x: layer(x, x), nn.Bilinear(8, 8, 4))
    capture(model, (rows(),))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(CaptureError, match="calls bilinear under autocast"):
        capture(model, (rows(),))


def test_a_result_that_has_no_gradient_in_plain_pytorch_either_is_named() -> None:
    def forward(_: Net, layer: nn.Module, x: torch.Tensor) -> Any:
        y = layer(x)
        logged = y.sigmoid()
        return y + 1, logged.relu_()

    run(Net(lambda *a: forward(*a)[0], linear()), (rows(),), {})
    with pytest.raises(CaptureError, match=r"overwrites in place what the gradient of one .* results reads.*detach"):
        capture(Net(forward, linear()), (rows(),))


LOSSES: list[Callable[..., torch.Tensor]] = [
    nn.functional.mse_loss,
    nn.functional.smooth_l1_loss,
    nn.functional.soft_margin_loss,
    lambda x, y: nn.functional.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
]


def test_a_loss_that_the_model_computes_takes_a_numbers_memory() -> None:
    """PyTorch's kernels leave one number in memory that is as large as their input."""

    def forward(_: Net, layer: nn.Module, x: torch.Tensor) -> Any:
        parts = [loss(layer(x + number), x) for number, loss in enumerate(4 * LOSSES)]
        return torch.stack(parts).sum()

    model, example = Net(forward, linear()), ((rows(64, 8),), {})
    captured = admitted(capture(model, *example), "normal")
    request = Request(model, example, "normal", profile_batch=64)
    costs, _ = measured_costs(request, captured, torch.device("cpu"), timed=False)
    report = simulate(captured.program, store_all(captured.program), costs)
    record = replace(
        record_for(captured, store_all(captured.program), "normal", (model, *example)), peak_bytes=report.peak_bytes
    )
    wrapped = ScheduleWrapper(twin(model), record, example=example, captured=captured)
    assert max(run(twin(model), *example).differences(run(wrapped, *example)).values()) == 0.0
    assert step_peak(wrapped, example, torch.device("cpu")) <= report.peak_bytes


def test_what_is_compared_is_made_anew_as_it_was() -> None:
    """By another algorithm no element might equal the maximum that was kept, and the gradient be lost."""

    def forward(_: Net, first: nn.Module, second: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = second(first(x).relu())
        return y.amax((2, 3)) + y.max()

    model, x = Net(forward, nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3)), rows(2, 3, 8, 8)
    free = admitted(capture(Net(lambda net, a, b, x: b(a(x).relu()), *model.layers), (x,)), FULL)
    assert any(task.word == "conv" for task in free.program.tasks)
    captured, plain = admitted(capture(model, (x,)), FULL), run(twin(model), (x,), {})
    for seed in range(6):
        schedule = random_schedule(captured.program, seed, drop=0.7, others=0.7)
        assert worst(plain, replayed((model, (x,), {}), captured, schedule, FULL, measured=False)) < 1e-5, seed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "onednn"),
    [
        (lambda: nn.LSTM(8, 8, 2, dropout=0.5), True),
        (lambda: nn.LSTM(8, 8, 2, dropout=0.5), False),
        (lambda: nn.LSTM(8, 8, bidirectional=True, batch_first=True, bias=False), True),
        (lambda: nn.LSTM(8, 4, proj_size=2), True),
    ],
)
def test_lstms_are_plain_pytorchs(model: Callable[[], nn.Module], onednn: bool) -> None:
    """By oneDNN the operator is kept whole, with a workspace of the size that the library gives it."""
    torch.manual_seed(0)
    net, x = model(), rows(2, 3, 8).requires_grad_()
    with torch.backends.mkldnn.flags(enabled=onednn):
        plain, raw = run(twin(net), (x,), {}), capture(net, (x,))
        whole = any(c.op == "aten.mkldnn_rnn_layer.default" for t in raw.program.tasks for c in t.calls)
        assert whole == (onednn and not net.proj_size)
        for seed, drop in enumerate((0.0, 0.9)):
            captured = admitted(raw, "multiway_newnode")
            costs = costs_of(captured, (net, (x,), {}), "multiway_newnode", timed=False)
            schedule = random_schedule(captured.program, seed, drop=drop, others=0.5)
            outcome = replayed((net, (x,), {}), captured, schedule, "multiway_newnode")
            assert worst(plain, outcome) == 0.0
            peak = simulate(captured.program, schedule, costs).peak_bytes
            assert captured.program.resident_bytes + outcome.rise_bytes - LOSS_BYTES <= peak


# What changes between steps -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "change"),
    [
        (lambda: nn.Sequential(linear(), nn.Dropout(0.1), linear()), lambda m: setattr(m[1], "p", 0.9)),
        (lambda: nn.Sequential(linear(), nn.BatchNorm1d(8), linear()), lambda m: setattr(m[1], "momentum", 0.9)),
    ],
)
def test_numbers_that_a_forward_reads_are_followed(build: Any, change: Callable[[nn.Module], None]) -> None:
    model, x = build(), rows()
    plain = copy.deepcopy(model)
    # more than plain PyTorch: a schedule keeps the state of the random generator
    wrapped = auto_schedule(model, x, memory_budget="16 KB", time_limit_seconds=2, mode="inplace_multiway_newnode")
    steps = []
    for round_ in range(4):
        if round_ == 2:
            change(plain), change(model)
        found = []
        for module in (plain, wrapped):
            torch.manual_seed(round_)
            module.zero_grad()
            module(x).square().sum().backward()
            found.append([p.grad for p in module.parameters()] + [b.clone() for b in module.buffers()])
        assert all(map(torch.equal, *found)), round_
        steps.append(len(wrapped._kept))
    assert steps == [1, 1, 2, 2]


# What a forward does beside computing ---------------------------------------------------------------------------


def seeds(net: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return layer(x) * torch.rand(8)


def forks(net: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        noise = torch.rand(8)
    return layer(x) * noise


def assigns(net: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = layer(x)
    net.ema = 0.9 * net.ema + 0.1 * y.detach().mean(0)
    return y - net.ema


def removes(net: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = layer(x) + net.ema
    del net.ema
    return y


def assigns_data(net: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    net.ema.data = net.ema + 1
    return layer(x)


def keeps_gradient(net: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    net.kept = layer(x).tanh()
    net.kept.retain_grad()
    return net.kept * 2


def rounds_saved(net: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
        return layer(x).tanh()


def changes_late(net: Net, layer: Any, x: torch.Tensor) -> torch.Tensor:
    h = layer(x)
    h.register_hook(lambda gradient: setattr(net, "late", net.ema.add_(gradient.detach().sum(0))))
    return h.tanh()


def hooks_weight(net: Net, layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.weight.register_hook(lambda gradient: gradient * 2)
    return layer(x)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (seeds, "seeds PyTorch's random generator"),
        (forks, "sets the state of PyTorch's random generator"),
        (lambda net, layer, x: layer(x) * random.random(), "draws Python's random numbers"),
        (
            lambda net, layer, x: layer(x) * float(np.random.rand()),
            r"draws NumPy's random numbers, .*auto_schedule\(model, blocks",
        ),
        (assigns, r"assigns ema, .*self.ema.copy_\(...\)"),
        (removes, "assigns ema, and a schedule cannot"),
        (assigns_data, r"assigns a tensor's .data, .*copy_"),
        (keeps_gradient, r"calls retain_grad\(\)"),
        (rounds_saved, "hooks of its own on saved tensors"),
        (hooks_weight, "registers a hook on a parameter or an input"),
        (changes_late, "changes a parameter or a buffer in the backward"),
    ],
)
def test_what_a_schedule_would_not_do_is_refused(function: Any, said: str) -> None:
    model = Net(function, linear())
    ema, states = model.ema, (torch.get_rng_state(), random.getstate())
    with pytest.raises(CaptureError, match=said):
        capture(model, (rows(),))
    assert model.ema is ema
    assert torch.random.set_rng_state is torch.set_rng_state
    assert not model.layers[0].weight._backward_hooks  # type: ignore[union-attr]
    torch.set_rng_state(states[0])
    random.setstate(states[1])


@pytest.mark.parametrize("training", [True, False])
def test_buffers_that_checkpointing_would_change_again_are_refused(training: bool) -> None:
    def forward(_: Net, layer: nn.Module, norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: norm(layer(x)).tanh(), x, use_reentrant=False)  # type: ignore[no-any-return]

    model, x = Net(forward, linear(), nn.BatchNorm1d(8).train(training)), rows()
    run(plain := twin(model), (x,), {})
    assert plain.layers[1].num_batches_tracked == 2 * training  # type: ignore[operator, union-attr]
    if not training:
        capture(model, (x,))
        return
    with pytest.raises(CaptureError, match=r"checkpoint changes layers\.1\.\w+; plain PyTorch changes it once more"):
        capture(model, (x,))
    assert model.layers[1].num_batches_tracked == 0  # type: ignore[union-attr]


def test_checks_of_values_are_left_out() -> None:
    """As Transformers makes them of images' places: they change nothing but raise, and a trace has no values."""

    def checked(net: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch._check_tensor_all(x.abs() < 9, lambda: "too large")
        torch._check_tensor_all_with(TypeError, x.abs() < 9)
        return layer(x)

    model = Net(checked, linear())
    model(rows())
    capture(model, (rows(),))
    with pytest.raises(RuntimeError, match="too large"):  # as before
        model(10 * rows())


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_what_pytorchs_own_hooks_set_is_no_news(norm: Callable[[nn.Module], nn.Module]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = norm(linear())
        warnings.simplefilter("error", UserWarning)
        capture(model, (rows(),))
    assert "__getattribute__" not in vars(nn.Module)


# What is refused ------------------------------------------------------------------------------------------------


def test_second_derivatives_are_plain_pytorchs() -> None:
    model = nn.Sequential(linear(), nn.Tanh())
    wrapped = auto_schedule(model, rows(), memory_budget="130%", time_limit_seconds=2)
    found = []
    for called in (model, wrapped):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sequential runs as plain PyTorch.*create_graph=True")
            first = torch.autograd.grad(called(rows()).sum(), list(model.parameters()), create_graph=True)
        found.append(torch.autograd.grad(first[0].square().sum(), list(model.parameters())))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_conjugated_gradient_is_taken() -> None:
    def forward(_: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(layer(x).view(6, 4, 2))

    model, x = Net(forward, linear()), rows()
    plain = copy.deepcopy(model)
    for module in (plain, auto_schedule(model, x, memory_budget="130%", time_limit_seconds=2)):
        (module(x).conj() * (1 + 2j)).imag.sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("model", "inputs", "error", "said"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(8)), rows, UsageError, "0 is a lazy module"),
        (
            lambda: nn.Sequential(torch.jit.script(linear()), nn.ReLU()),
            rows,
            UsageError,
            "0 is in TorchScript .*blocks=",
        ),
        (lambda: torch.jit.script(nn.Sequential(linear())), rows, UsageError, "the model is in TorchScript"),
        (lambda: nn.Sequential(torch.jit.trace(linear(), rows())), rows, UsageError, "0 is in TorchScript"),
        (lambda: nn.Embedding(8, 4, sparse=True), lambda: torch.arange(6), CaptureError, "use sparse=False"),
        (lambda: nn.Embedding(8, 4, max_norm=1.0), lambda: torch.arange(6), CaptureError, "changes .*in place"),
    ],
)
def test_what_cannot_be_captured_is_said(model: Any, inputs: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        capture(model(), (inputs(),))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_what_is_scripted_later_or_a_block_is_said() -> None:
    model, x = nn.Sequential(linear(), nn.ReLU(), linear()), rows()
    wrapped = AnySchedule(model)
    step(wrapped, x)
    model[0] = torch.jit.script(model[0])
    with pytest.raises(UsageError, match="0 is in TorchScript"):
        wrapped(x)
    for block in ("0", "1.0"):
        with pytest.raises(UsageError, match=f"{block} is in TorchScript"):
            auto_schedule(
                nn.Sequential(model[0], nn.Sequential(copy.copy(model[0]))), memory_budget="200%", blocks=block
            )


def test_a_schedule_serves_other_numbers() -> None:
    """Which dropout or momentum it is decides nothing about memory: the same file, another step."""
    model, x = nn.Sequential(linear(), nn.Dropout(0.1), linear()), rows()
    record = auto_schedule(twin(model), x, memory_budget="16 KB", time_limit_seconds=2).record
    assert record is not None
    model[1].p = 0.5
    wrapped = ScheduleWrapper(twin(model), record)
    assert max(run(twin(model), (x,), {}).differences(run(wrapped, (x,), {})).values()) == 0.0


def test_a_cached_plan_is_of_its_solver_and_time_and_whole() -> None:
    x = rows()

    def plans(**options: Any) -> int:
        auto_schedule(linear(), x, memory_budget="200%", **options)
        return len(list(cache_folder().glob("plan_*.json")))

    assert [plans(time_limit_seconds=2), plans(time_limit_seconds=2), plans(time_limit_seconds=3)] == [1, 1, 2]
    with pytest.raises(UsageError, match="NOPE"):
        plans(time_limit_seconds=2, solver="NOPE")
    for path in cache_folder().glob("plan_*.json"):
        path.write_bytes(path.read_bytes()[:20])
    assert plans(time_limit_seconds=2) == 2


def quantised() -> nn.Module:
    quantisation = torch.ao.quantization
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
    net = nn.Sequential(quantisation.QuantStub(), *layers, quantisation.DeQuantStub()).train()
    net.qconfig = quantisation.get_default_qat_qconfig("fbgemm")  # weights by channel, activations as a whole
    return quantisation.prepare_qat(net)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*deprecated", "ignore:Please use quant_min", "ignore:_aminmax")
def test_quantisation_aware_training_is_plain_pytorchs() -> None:
    """Observers update, and first resize, buffers in the forward; each sees every tensor once."""
    torch.manual_seed(0)
    net, x = quantised(), rows(2, 3, 8, 8)
    plain = twin(net)
    wrapped = auto_schedule(net, x, memory_budget="1 MB", mode="inplace_multiway_newnode", time_limit_seconds=5)
    for scale in (1.0, 3.0, 0.5):
        for model in (plain, net):
            model.zero_grad()
        assert worst(run(plain, (x * scale,), {}), run(wrapped, (x * scale,), {})) == 0.0
    captured = admitted(capture(net, (x,)), "inplace_multiway_newnode")
    schedule = random_schedule(captured.program, 1, drop=0.9)
    other = replayed((net, (x,), {}), captured, schedule, "inplace_multiway_newnode", measured=False)
    plain.zero_grad()
    assert worst(run(plain, (x,), {}), other) == 0.0
    for model in (plain, net):
        model.apply(torch.ao.quantization.disable_observer)
        model.zero_grad()
    plain = twin(net)
    assert worst(run(plain, (x * 9,), {}), run(wrapped, (x * 9,), {})) == 0.0


def normalised(net: Any, layer: nn.Module, norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = layer(x.view(6, 8, 4).transpose(1, 2))
    return norm(y) if isinstance(norm, nn.LayerNorm) else norm(y.transpose(1, 2))


def _without_running_statistics() -> nn.Module:
    return nn.BatchNorm1d(8, track_running_stats=False)


@pytest.mark.slow
@pytest.mark.parametrize("norm", [lambda: nn.LayerNorm(8), lambda: nn.GroupNorm(2, 8), _without_running_statistics])
def test_norms_under_autocast_are_measured_and_plain_pytorchs(norm: Callable[[], nn.Module]) -> None:
    """Inputs in 16 bits and parameters in 32: on a CPU the statistics have 32, of which a trace knows nothing."""
    torch.manual_seed(0)
    net, x = Net(normalised, linear(), norm()), rows(6, 32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        plain = run(twin(net), (x,), {})
        wrapped = auto_schedule(net, x, memory_budget="1 MB", mode="inplace_multiway_newnode", time_limit_seconds=5)
        assert worst(plain, run(wrapped, (x,), {})) == 0.0


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_dropout_of_gradients_is_drawn_once(share: float) -> None:
    class Dropped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(gradients[0], share)

    def forward(_: Net, first: nn.Module, second: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(Dropped.apply(second(Dropped.apply(first(x))).relu()), 0.5)

    assert_exact((Net(forward, linear(), linear()), (rows().requires_grad_(),), {}), "multiway_newnode")


def gamma(_: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Gamma(layer(x).exp().t(), torch.ones(6)).rsample().flatten()


def dirichlet(_: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Dirichlet(layer(x).exp()).rsample() * layer(x)


@pytest.mark.slow
@pytest.mark.parametrize("function", [gamma, dirichlet])
def test_distributions_are_sampled_as_in_plain_pytorch(function: Callable[..., Any]) -> None:
    example = Net(function, linear()), (rows().requires_grad_(),), {}
    assert_exact(example, "multiway_newnode")
    wrapped = auto_schedule(twin(example[0]), example[1], memory_budget="1 MB", time_limit_seconds=5)
    assert worst(run(twin(example[0]), *example[1:]), run(wrapped, *example[1:])) < 1e-5


@pytest.mark.parametrize(("kind", "reduction"), [(list, "mean"), (tuple, "none")])
def test_ctc_loss_with_lengths_as_numbers(kind: type, reduction: str) -> None:
    def forward(_: Net, layer: nn.Module, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scores = layer(x).log_softmax(-1)
        lengths, wanted = kind([6, 5, 6]), kind([2, 3, 1])
        return nn.functional.ctc_loss(scores, targets, lengths, wanted, reduction=reduction, zero_infinity=True)

    example = Net(forward, linear()), (rows(6, 3, 8).requires_grad_(), torch.randint(1, 8, (3, 3))), {}
    assert_exact(example, "multiway_newnode")
    costs_of(admitted(capture(*example), "multiway_newnode"), example, "multiway_newnode", timed=False)


def lengths_in_tensors(_: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    lengths, wanted = torch.tensor([6, 5, 6]), torch.tensor([2, 3, 1])
    return nn.functional.ctc_loss(layer(x).log_softmax(-1), torch.ones(3, 3, dtype=torch.long), lengths, wanted)


def packed(_: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.utils.rnn.pack_padded_sequence(layer(x), [6, 4, 2]).data


def branches(_: Net, layer: nn.Module, x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda y: layer(y).sin(), lambda y: layer(y).cos(), (x,))


def nests(_: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(torch.nested.nested_tensor([x[:4], x], layout=torch.jagged)).to_padded_tensor(0.0)


@pytest.mark.parametrize(
    ("model", "shape", "said"),
    [
        (lambda: Net(packed, linear()), (6, 3, 8), "pack_padded_sequence makes.*give the recurrent layer the padded"),
        (lambda: nn.BatchNorm1d(8, momentum=None), (6, 8), "BatchNorm1d has momentum=None.*momentum=0.1"),
        (
            lambda: Net(lambda _, layer, x: layer(x).to_sparse(), linear()),
            (6, 8),
            "to_sparse makes.*compute with dense ones",
        ),
        (lambda: Net(branches, linear()), (6, 8), "given functions, such as torch.cond.*torch.where"),
        (lambda: Net(nests, linear()), (6, 8), "nested tensors.*pad them"),
    ],
)
def test_what_depends_on_values_is_said_in_the_models_words(model: Any, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        capture(model(), (rows(*shape),))


def test_ctc_loss_with_lengths_in_tensors_of_a_model_without_values() -> None:
    """With values the plain forward tells how large its memory is."""
    model, x = Net(lengths_in_tensors, linear()), rows(6, 3, 8)
    capture(model, (x,))
    with (
        fake_mode() as mode,
        pytest.raises(CaptureError, match=r"CTC loss with lengths in tensors.*as lists of numbers"),
    ):
        capture(Net(lengths_in_tensors, linear()), (mode.from_tensor(x),))


def test_a_layer_that_launches_a_triton_kernel_is_refused_with_what_to_do() -> None:
    """As Liger's layers do; without a GPU Triton has no driver, with one a fake tensor has no address."""
    triton = pytest.importorskip("triton")
    kernel = triton.jit(_nothing)

    def launched(_: Net, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        kernel[(1,)](x)
        return layer(x)

    said = (
        r"Net cannot be captured: it launches a Triton kernel itself, .* torch\.library\.custom_op .*test_corners\.py"
    )
    with pytest.raises(CaptureError, match=said):
        capture(Net(launched, linear()), (rows(6, 3, 8),))


def _nothing(x: Any) -> None:
    """A Triton kernel that does nothing."""


def test_a_model_without_parameters_is_where_its_inputs_are() -> None:
    """A buffer counts before the inputs; so autocast of the device is seen that the model runs on."""
    with FakeTensorMode():
        x = torch.empty(2, device="cuda")
    assert device_of(nn.ReLU(), ((), {"x": [x]})).type == "cuda"
    assert device_of(nn.ReLU()).type == device_of(nn.Linear(2, 2), ((x,), {})).type == "cpu"
    assert device_of(nn.BatchNorm1d(2, affine=False), ((x,), {})).type == "cpu"


def test_what_a_forward_does_with_gradients_and_saved_tensors_to_no_effect_is_followed() -> None:
    def forward(_: Net, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        layer.weight.retain_grad()  # of leaves
        x.retain_grad()
        with torch.autograd.graph.save_on_cpu():
            return layer(x).tanh()

    script = lambda called, _, note: note(step(called, x := rows().requires_grad_()), x.grad)  # noqa: E731
    assert_as_plain(lambda: Net(forward, linear()), script, captures=1)


@pytest.mark.parametrize("leaf", [True, False])
def test_inputs_and_parameters_say_whether_they_are_leaves(leaf: bool) -> None:
    def forward(_: Net, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        y = layer(x) * (2 if x.is_leaf else 3) * (5 if layer.weight.is_leaf else 7)
        y = y * (11 if x.grad_fn is None else 13) * (17 if layer.weight.grad_fn is None else 19)
        return y * (23 if y.is_leaf else 29)

    model, x = Net(forward, linear()), rows().requires_grad_()
    x = x if leaf else x * 1
    wrapped = auto_schedule(model, x, memory_budget="200%", mode="inplace_multiway_newnode", effort="quick")
    assert torch.equal(wrapped(x), model(x))
