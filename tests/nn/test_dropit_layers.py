"""The layers of `to_dropit`, which drop without a plan: gradients are what the definitions say, bytes are counted."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dropped_models import MODELS, Attention, assert_only_changed, dropped, expected_weight_gradients, mlp
from torch import nn
from training import run, twin

import monet_like
from monet_like.errors import UsageError
from monet_like.ops.caches import largest_bytes


@pytest.mark.parametrize("name", list(MODELS))
def test_changed_layers(name: str) -> None:
    model, args = made = MODELS[name]()
    plain = run(twin(model), args, {})
    changed = monet_like.to_dropit(twin(model), gamma=0.9)
    outcome = run(changed, args, {})
    wanted = expected_weight_gradients(made, lambda x: dropped(x, 0.9), first=True)
    assert assert_only_changed(plain, outcome, wanted, 0.01 if name == "bfloat16" else 1e-6) == set(wanted)


def test_dropping_draws_no_random_numbers_and_keeps_the_largest() -> None:
    model, args = MODELS["channels_last"]()
    changed = monet_like.to_dropit(twin(model), 0.75)
    torch.manual_seed(5)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    changed(*args)
    assert torch.equal(torch.rand(3), drawn)
    layer = monet_like.to_dropit(nn.Linear(320, 1, bias=False), 0.75)
    x = torch.randn(40, 320)
    for row in range(40):  # the weight's gradient of one output is that row of the input, where it was kept
        layer.weight.grad = None
        layer(x[row : row + 1]).sum().backward()
        kept = layer.weight.grad[0] != 0
        assert torch.equal(layer.weight.grad[0][kept], x[row][kept]) and int(kept.sum()) == 80
        assert x[row][kept].abs().min() > x[row][~kept].abs().max()


def test_saved_bytes_are_the_caches() -> None:
    layer = monet_like.to_dropit(nn.Linear(256, 64), gamma=0.9)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(0 if t is layer.weight else t.untyped_storage().nbytes()) or t, lambda t: t
    ):
        layer(torch.randn(512, 256))
    assert sum(saved) == largest_bytes(512 * 256, 1638, 4)


def test_autocast_of_changed_layers() -> None:
    model, args = MODELS["attention"]()
    with torch.autocast("cpu", torch.bfloat16):
        plain, outcome = run(twin(model), args, {}), run(monet_like.to_dropit(twin(model), gamma=0.5), args, {})
    weights = {f"gradient {name}.weight" for name in ("qkv", "out", "wide", "narrow")}
    assert {key for key, difference in plain.differences(outcome).items() if difference} == weights


def test_a_changed_model_is_still_that_model() -> None:
    model = Attention()
    model.out.no_dropit = True
    names, keys = [n for n, _ in model.named_modules()], list(model.state_dict())
    changed = monet_like.to_dropit(model, gamma=0.9)
    assert changed is model and type(model.out) is nn.Linear
    assert [n for n, _ in changed.named_modules()] == names and list(changed.state_dict()) == keys
    x = torch.randn(2, 6, 32)
    loss = changed(x).sum()
    loss.backward(retain_graph=True)
    once = {n: p.grad.clone() for n, p in changed.named_parameters() if p.grad is not None}
    loss.backward()
    assert all(torch.equal(p.grad, 2 * once[n]) for n, p in changed.named_parameters() if p.grad is not None)
    for other in (copy.deepcopy(changed), pickle.loads(pickle.dumps(changed))):
        assert type(other.qkv) is type(changed.qkv) and torch.equal(other(x), changed(x))
    with torch.no_grad():
        assert changed(x).grad_fn is None
    again = monet_like.to_dropit(changed, 0.5)
    assert again.wide.dropped.share == 0.5 and type(again.wide).__mro__[2] is nn.Module


def test_nothing_dropped_is_bit_equal() -> None:
    for name in ("attention", "convolutions"):
        model, args = MODELS[name]()
        plain = run(twin(model), args, {})
        assert set(plain.differences(run(monet_like.to_dropit(twin(model), gamma=0), args, {})).values()) == {0.0}


@pytest.mark.parametrize(
    ("mode", "padding"), [("zeros", "same"), ("zeros", (2, 1)), ("reflect", "same"), ("circular", (2, 1))]
)
def test_padding_of_every_kind(mode: str, padding: Any) -> None:
    model = nn.Sequential(nn.GELU(), nn.Conv2d(3, 4, (4, 3), padding=padding, padding_mode=mode))
    args = (torch.randn(2, 3, 9, 8, requires_grad=True),)
    plain, outcome = run(twin(model), args, {}), run(monet_like.to_dropit(twin(model)), args, {})
    assert {key for key, difference in plain.differences(outcome).items() if difference} == {"gradient 1.weight"}


def test_what_cannot_be_dropped_is_said() -> None:
    for share in (1.0, -0.1, math.nan):
        with pytest.raises(UsageError) as caught:
            monet_like.to_dropit(mlp(), gamma=share)
        assert str(caught.value) == (
            f"gamma {share!r} is the share of elements to drop; give a number of at least 0 and below 1"
        )
    with pytest.raises(UsageError) as caught:
        monet_like.to_dropit(nn.ReLU())
    assert str(caught.value) == (
        "ReLU has no layer to drop for; these are nn.Linear, nn.Conv2d and Hugging Face's Conv1D without the attribute "
        "no_dropit"
    )


def test_freed_bytes_are_told_by_layer() -> None:
    from monet_like.nn.dropit import freed_bytes, to_dropit

    model = to_dropit(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)), 0.5)
    assert freed_bytes(model) == {"0": 0, "2": 0}
    model(torch.randn(32, 64)).sum().backward()
    elements = 32 * 64
    most = elements * 4 - elements // 2 * 4  # if places took nothing
    assert all(0 < freed < most for freed in freed_bytes(model).values())


@pytest.mark.slow
def test_a_pickled_model_trains_in_a_process_that_has_changed_none(tmp_path: Path) -> None:
    changed = monet_like.to_dropit(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 8)), gamma=0.5)
    (tmp_path / "model").write_bytes(pickle.dumps(changed))
    program = (
        "import pickle, sys, torch\n"
        "model = pickle.load(open(sys.argv[1], 'rb'))\n"
        "model(torch.randn(2, 3, 4, 4)).sum().backward()\n"
        "print([type(layer).__name__ for layer in model], all(p.grad is not None for p in model.parameters()))\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['DroppedConv2d', 'Flatten', 'DroppedLinear'] True"]
