"""Where convolutions are planned in channels-last layout without being asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from monet_like.capture.captured import Captured
from monet_like.compiler.layouts import WORTH, in_faster_layout
from monet_like.compiler.pipeline import prepare
from monet_like.compiler.prepared import Prepared
from monet_like.compiler.request import Request
from monet_like.errors import ProfileError
from monet_like.ir.defaults import EXACT_MODE, MODE
from monet_like.profile.devices import DEVICES

CUDA = torch.device("cuda")


def net(*after: nn.Module, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), *after).to(dtype)


def classifier() -> nn.Module:
    return net(nn.Flatten(), nn.Linear(144, 2))


def chosen(model: nn.Module, images: torch.Tensor, *, mode: str = MODE, seconds: float = 0.5 * WORTH) -> str | None:
    """The mode in which a model is planned for a GPU where its plain step takes ``seconds`` times as long as it does as
    it is given; None: as it is.
    """
    request = Request(model, ((images,), {}), mode)
    ready = prepare(request, torch.device("cpu"), profile=DEVICES["a100"])

    def priced(other: Request, captured: Captured) -> Prepared:
        assert captured.program.fingerprint != ready.captured.program.fingerprint
        return replace(ready, captured=captured, plain=replace(ready.plain, seconds=seconds * ready.plain.seconds))

    found = in_faster_layout(request, ready, CUDA, priced)
    return found and found[0].mode


IMAGES = torch.randn(2, 3, 8, 8, dtype=torch.bfloat16)


@pytest.mark.parametrize(("seconds", "mode"), [(WORTH - 0.01, f"{MODE}_nhwc"), (WORTH + 0.01, None)])
def test_the_faster_plain_step_decides(seconds: float, mode: str | None) -> None:
    assert chosen(net(), IMAGES, seconds=seconds) == mode


class Permuted(nn.Module):
    """Images to their channels as the last dimension, as a view."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[N, C, H, W] to [N, H, W, C]."""
        return images.permute(0, 2, 3, 1)


class Noise(nn.Module):
    """Matrices and random numbers beside them."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """[N, C] to the same."""
        return given + torch.rand_like(given)


class Viewed(nn.Module):
    """A view that exists in row-major layout alone."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[N, C, H, W] to [N, C * H * W]."""
        return images.view(images.shape[0], -1)


@pytest.mark.parametrize(
    ("model", "images", "mode"),
    [
        (net, IMAGES, EXACT_MODE),  # which rounds as plain PyTorch
        (lambda: net(dtype=torch.float32), IMAGES.float(), MODE),
        (classifier, IMAGES.contiguous(memory_format=torch.channels_last), MODE),  # as the user wants it
        (lambda: classifier().to(memory_format=torch.channels_last), IMAGES, MODE),
        (lambda: net(Permuted()), IMAGES, MODE),  # a loop may view the result as it lies
        (lambda: net(nn.Dropout(0.5)), IMAGES, MODE),  # that draws other masks
        (lambda: net(nn.Flatten(), Noise()), IMAGES, MODE),  # as it may with other nets
        (lambda: net(Viewed()), IMAGES, MODE),
        (lambda: nn.Sequential(nn.Linear(8, 4)).bfloat16(), IMAGES, MODE),
    ],
    ids=["exact", "float32", "images", "filters", "result", "dropout", "matrix", "view", "none"],
)
def test_it_is_left_as_it_is(model: Callable[[], nn.Module], images: torch.Tensor, mode: str) -> None:
    assert chosen(model(), images, mode=mode, seconds=0.0) is None


def test_what_cannot_be_measured_is_left_as_it_is() -> None:
    request = Request(net(), ((IMAGES,), {}), MODE)
    ready = prepare(request, torch.device("cpu"), profile=DEVICES["a100"])

    def fails(other: Request, captured: Captured) -> Prepared:
        raise ProfileError("no memory")

    assert in_faster_layout(request, ready, CUDA, fails) is None
    assert in_faster_layout(request, ready, torch.device("cpu"), fails) is None
