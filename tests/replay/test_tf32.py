"""Steps that compute in TF32: their differences are tolerated where TF32 can be in play, and planted faults still
found.

There is no TF32 on a CPU: convolutions and products here round their float32 inputs to its 11 significant bits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchvision
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from monet_like.replay.verify import steps as verify
from monet_like.replay.verify import tf32
from monet_like.replay.verify.comparison import TF32_TOLERANCE, TOLERANCE, compare
from monet_like.replay.verify.steps import everything_after_a_step, judged
from monet_like.replay.verify.tf32 import admitted_kinds, float32_kinds, runs_in_tf32

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class InTF32(TorchDispatchMode):
    """Rounds what convolutions read; with ``shift``, after a change as another order of sums makes it."""

    def __init__(self, shift: int = 0) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(shift) if shift else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution" in str(func):
            args = tree_map_only(torch.Tensor, self._rounded, args)
        return func(*args, **(kwargs or {}))

    def _rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.generator is not None:
            noise = torch.randn(tensor.shape, generator=self.generator)
            tensor = tensor * (1 + 2 * torch.finfo(torch.float32).eps * noise)
        bits = tensor.contiguous().view(torch.int32)
        return ((bits + (1 << 12)) & -(1 << 13)).view(torch.float32)  # 10 of the 23 explicit bits remain


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, bias=False),
        nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


def steps(model: nn.Module, example: Any) -> tuple[Any, Any]:
    """What plain PyTorch's step leaves in TF32, and one that adds in another order."""
    with InTF32():
        mine = everything_after_a_step(copy.deepcopy(model), example)
    with InTF32(shift=1):
        return mine, everything_after_a_step(copy.deepcopy(model), example)


@pytest.fixture(name="example")
def _example() -> Any:
    return (torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(1)),), {}


@pytest.fixture(name="on_a_gpu")
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "runs_in_tf32", lambda *_: True)


def no_measurement(*_: Any) -> Any:
    raise AssertionError("rounding was measured: a copy of the model in float64")


def test_differences_of_tf32_are_tolerated_without_measuring_rounding(
    example: Any, on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = steps(small(), example)
    errors = {v.name: v.error for v in compare(mine, theirs)}
    assert max(errors.values()) > TOLERANCE[4]  # far beyond float32's: what the tolerance is for
    assert max(errors.values()) < TF32_TOLERANCE / 2
    monkeypatch.setattr(verify, "shaken", no_measurement)
    assert all(v.right for v in judged(small(), example, mine, theirs))
    monkeypatch.setattr(verify, "runs_in_tf32", lambda *_: False)
    with pytest.raises(AssertionError, match="rounding was measured"):
        judged(small(), example, mine, theirs)


@pytest.mark.slow
def test_a_fault_of_a_hundredth_is_found_in_every_tensor(example: Any, on_a_gpu: None) -> None:
    mine, theirs = steps(small(), example)
    names = [name for name, tensor in mine.items() if tensor is not None and tensor.is_floating_point()]
    assert len(names) >= 12
    for name in names:
        for planted in (theirs[name] * 1.01, theirs[name] + 0.01 * theirs[name].abs().max()):
            verdicts = compare(mine, {**theirs, name: planted}, eps=tf32.EPS, tf32=True)
            assert [v.name for v in verdicts if not v.right] == [name]
    for name in (names[0], "gradient of 0.weight", "gradient of 8.bias", "buffer 1.running_var"):
        with InTF32():  # as the measuring steps would run on such a GPU
            found = judged(small(), example, mine, {**theirs, name: theirs[name] * 1.01})
        assert [v.name for v in found if not v.right] == [name]


def test_one_wrong_row_is_found(example: Any, on_a_gpu: None) -> None:
    mine, theirs = steps(small(), example)
    planted = theirs["gradient of 8.weight"].clone()
    planted[3] += 0.02 * planted.abs().max()
    with InTF32():
        found = judged(small(), example, mine, {**theirs, "gradient of 8.weight": planted})
    assert [v.name for v in found if not v.right] == ["gradient of 8.weight"]


def test_a_bias_before_batch_norm_is_zero_but_for_tf32s_rounding(example: Any, on_a_gpu: None) -> None:
    model = small()
    model[0] = nn.Conv2d(3, 16, 3)
    mine, theirs = steps(model, example)
    with InTF32():
        assert all(v.right for v in judged(model, example, mine, theirs))
        largest = max(float(mine[n].abs().max()) for n in mine if n.startswith("gradient"))
        planted = {**theirs, "gradient of 0.bias": theirs["gradient of 0.bias"] + 0.2 * largest}
        found = judged(model, example, mine, planted)
    assert [v.name for v in found if not v.right] == ["gradient of 0.bias"]


def test_only_float32_is_tolerated_more() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        one = {"output 0": torch.ones(4, dtype=dtype)}
        other = {"output 0": one["output 0"] * (1 + 16 * TOLERANCE[dtype.itemsize])}
        assert not compare(one, other, tf32=True)[0].right
    one, other = {"output 0": torch.ones(4)}, {"output 0": torch.full((4,), 1 + 0.9 * TF32_TOLERANCE)}
    assert compare(one, other, tf32=True)[0].right and not compare(one, other)[0].right


# Where TF32 can be in play ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    parts = (torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul)
    before = [part.fp32_precision for part in parts]
    by_old_name = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    yield
    # PyTorch keeps these beside the precisions.
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = by_old_name
    for part, precision in zip(parts, before, strict=True):
        part.fp32_precision = precision


IMAGE, ROW = ((torch.randn(2, 3, 8, 8),), {}), ((torch.randn(2, 3, 8),), {})
CONV, LINEAR, LSTM = nn.Conv2d(3, 4, 3), nn.Linear(8, 4), nn.LSTM(8, 4, batch_first=True)


@pytest.mark.parametrize(
    ("model", "example", "convolutions", "products", "expected"),
    [
        (CONV, IMAGE, True, False, True),  # PyTorch's defaults
        (CONV, IMAGE, False, False, False),
        (CONV, IMAGE, False, True, False),
        (LINEAR, ROW, True, False, False),
        (LINEAR, ROW, True, True, True),
        (nn.Sequential(CONV, nn.Flatten(), nn.Linear(144, 2)), IMAGE, True, False, True),
        (copy.deepcopy(CONV).bfloat16(), ((IMAGE[0][0].bfloat16(),), {}), True, True, False),
        (copy.deepcopy(CONV).double(), ((IMAGE[0][0].double(),), {}), True, True, False),
        (nn.ReLU(), IMAGE, True, True, False),
        (LSTM, ROW, True, False, True),
    ],
)
def test_settings_and_operators(
    model: nn.Module, example: Any, convolutions: bool, products: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = convolutions, products
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert runs_in_tf32(model, example, CUDA) == expected
    assert not runs_in_tf32(model, example, CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert not runs_in_tf32(model, example, CUDA)


def test_pytorchs_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    assert admitted_kinds() == {"convolution", "recurrent"}
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # NVIDIA's switch for all its libraries
    assert admitted_kinds() == set()
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    model = torchvision.models.vit_b_16(num_classes=2)
    assert float32_kinds(model, ((torch.randn(1, 3, 224, 224),), {})) >= {"convolution", "product"}
