"""MONAI's volume nets train under a schedule as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from replays import replayed
from torch import nn
from training import run, twin

import monet_like
from monet_like.capture.lower.step import capture
from monet_like.plan.random_schedules import random_schedule
from monet_like.variants import admitted


def imported() -> Any:
    """MONAI's nets. To import MONAI sets cuBLAS's workspace for the whole process and those that it starts."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # put back as it was, also if it was not set
        return pytest.importorskip("monai.networks.nets", reason="MONAI is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SegResNet", "UNet"])
def test_a_net_of_monai_is_trained_exactly(kind: str) -> None:
    nets = imported()
    torch.manual_seed(0)
    model: nn.Module = (
        nets.SegResNet(spatial_dims=3, init_filters=8, in_channels=1, out_channels=2, blocks_down=(1, 2, 2),
            blocks_up=(1, 1))
        if kind == "SegResNet"
        else nets.UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16, 32), strides=(2, 2),
            num_res_units=2)
    )  # fmt: skip
    example = (model.train(), (torch.randn(1, 1, 16, 16, 16),), {})
    captured = admitted(capture(*example), "inplace_multiway_newnode")
    plain = run(twin(example[0]), *example[1:])
    schedule = random_schedule(captured.program, seed=1, drop=0.6)
    found = replayed(example, captured, schedule, "inplace_multiway_newnode", measured=False)
    assert {name: d for name, d in plain.differences(found).items() if d} == {}


@pytest.mark.slow
def test_images_of_monai_are_taken_as_tensors() -> None:
    """Its loaders give tensors of a class of its own, which keep what is known of an image."""
    nets = imported()
    meta_tensor = pytest.importorskip("monai.data").MetaTensor
    torch.manual_seed(0)
    model = nets.UNet(spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,), num_res_units=1)
    x = torch.randn(2, 1, 16, 16)
    scheduled: Any = monet_like.auto_schedule(twin(model), x, memory_budget="90%", mode="normal", effort="quick")
    for each in (model, scheduled):
        image = meta_tensor(x.clone(), meta={"spacing": (1.0, 1.0)})
        each(image).as_subclass(torch.Tensor).square().mean().backward()
    for (name, expected), found in zip(model.named_parameters(), scheduled.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad), name
