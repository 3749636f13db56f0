"""Programs whose convolutions compute in channels-last layout: the mode word ``nhwc``."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import monet_like
from monet_like.capture.captured import Captured
from monet_like.capture.lower.step import capture
from monet_like.errors import CaptureError

MODE = "inplace_conv_multiway_newnode_nhwc"


class EveryConvolution(nn.Module):
    """Convolutions of all kinds, one called by keyword, one of a single image; two results, one of them images."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up = nn.Conv2d(3, 8, 3, padding=1), nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.norm, self.same = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding="same", padding_mode="circular")
        self.volumes, self.up_volumes = nn.Conv3d(4, 6, 3, padding=1), nn.ConvTranspose3d(6, 2, 2, stride=2)
        self.weight = nn.Parameter(torch.randn(2, 3, 3, 3))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, 3, H, W] to images of twice the size, and to a number for each volume."""
        hidden = functional.silu(self.same(self.norm(self.first(images))))
        found = self.up(hidden.contiguous())
        volumes = self.volumes(found.unflatten(0, (-1, 2)).transpose(1, 2)).relu()
        volumes = self.up_volumes(volumes.contiguous())
        alone = functional.conv2d(input=images[0], weight=self.weight).mean()
        return found, volumes.mean((1, 2, 3, 4)) + alone


def steps(model: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """Results and gradients of two steps, and the buffers after them."""
    taken: list[torch.Tensor] = []
    for _ in range(2):
        model.zero_grad()
        images.grad = None
        results = model(images)
        torch.stack([each.square().mean() for each in results]).sum().backward()
        taken += [*results, images.grad, *(parameter.grad for parameter in model.parameters())]
    return [*taken, *model.buffers()]


def test_results_gradients_and_buffers_agree_and_lie_as_plain_pytorchs() -> None:
    torch.manual_seed(0)
    model, images = EveryConvolution().double(), torch.randn(4, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    plain = steps(model, images)
    model.load_state_dict(state)
    ours = steps(monet_like.auto_schedule(model, images, memory_budget="100%", mode=MODE, effort="quick"), images)
    for mine, its in zip(ours, plain, strict=True):
        assert mine.stride() == its.stride()
        torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-12)


def calls(captured: Captured) -> Counter[str]:
    """How often each operator is called in the forward."""
    return Counter(call.op for task in captured.plain.tasks for call in task.calls)


def layouts(captured: Captured) -> set[bool]:
    """Whether results of convolutions of several images are row-major."""
    made = (call for task in captured.plain.tasks for call in task.calls if call.op == "aten.convolution.default")
    metas = [captured.metas[ref.name] for call in made for ref in call.outs if ref and isinstance(ref.name, int)]
    return {meta.contiguous for meta in metas if meta.shape[0] > 1}


def test_every_convolution_takes_it() -> None:
    images = torch.randn(4, 3, 8, 8)
    assert layouts(capture(EveryConvolution(), (images,))) == {True}
    assert layouts(capture(EveryConvolution(), (images,), channels_last=True)) == {False}


def test_images_are_copied_once_and_the_result_once() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.MaxPool2d(2))
    images = torch.randn(2, 3, 12, 12)
    plain, ours = capture(net, (images,)), capture(net, (images,), channels_last=True)
    assert calls(ours) - calls(plain) == {"aten.clone.default": 2} and not calls(plain) - calls(ours)
    assert layouts(plain) == {True} and layouts(ours) == {False}
    given = capture(net, (images.contiguous(memory_format=torch.channels_last),), channels_last=True)
    assert calls(given) - calls(plain) == {"aten.clone.default": 1}  # the result alone


class WithAfter(nn.Module):
    """A convolution, and ``after`` of its result."""

    def __init__(self, after: Any) -> None:
        super().__init__()
        self.convolution, self.after = nn.Conv2d(3, 4, 3), after

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[N, 3, H, W] to whatever ``after`` makes of [N, 4, H-2, W-2]."""
        result: torch.Tensor = self.after(self.convolution(images))
        return result


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (nn.Dropout(0.5), "native_dropout.*depends on the order of a tensor's elements in memory"),
        (lambda t: t + torch.rand_like(t), "rand_like.*depends on the order"),
        (lambda t: functional.dropout(t.flatten(2).transpose(1, 2), 0.5), "native_dropout.*depends on the order"),
        (lambda t: functional.dropout(t.permute(0, 2, 3, 1), 0.5), "native_dropout.*depends on the order"),
        (lambda t: torch.as_strided(t, (2, 4), (4, 1)), "as_strided.*depends on the order"),
        (lambda t: t.view(2, -1), "view size is not compatible"),
    ],
    ids=["dropout", "rand_like", "tokens", "permuted", "as_strided", "view"],
)
def test_what_depends_on_the_layout_is_refused(after: Any, said: str) -> None:
    net, images = WithAfter(after), torch.randn(2, 3, 6, 6)
    capture(net, (images,))
    with pytest.raises(CaptureError, match=said):
        capture(net, (images,), channels_last=True)


@pytest.mark.parametrize(
    "after", [nn.Dropout2d(0.5), lambda t: functional.dropout(t.flatten(1), 0.5)], ids=["channels", "flat"]
)
def test_random_numbers_that_do_not_depend_on_it_are_drawn(after: Any) -> None:
    net, images = WithAfter(after).double(), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    wrapped = monet_like.auto_schedule(net, images, memory_budget="100%", mode=MODE, effort="quick")
    torch.manual_seed(3)
    ours = wrapped(images)
    torch.manual_seed(3)
    torch.testing.assert_close(ours, net(images))
