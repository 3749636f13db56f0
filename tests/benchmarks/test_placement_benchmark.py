"""What the table about the allocator is made of: lifetimes as the simulator has them, and a best fit by hand."""

from __future__ import annotations

import pytest
from zoo import MODELS

from benchmarks.placement import MIB, best_fit, lifetimes
from monet_like.capture.lower.step import capture
from monet_like.ir.simulate import simulate
from monet_like.plan.random_schedules import random_schedule
from monet_like.profile.devices import DEVICES
from monet_like.profile.roofline import roofline
from monet_like.replay.memory.placement import Lifetime, most_at_once
from monet_like.variants import admitted


@pytest.mark.slow(but=["unet"])
@pytest.mark.parametrize("name", ["shallow_resnet", "unet"])
def test_lifetimes_add_up_to_the_simulators_peak(name: str) -> None:
    model, args, kwargs = MODELS[name]()
    captured = admitted(capture(model, args, kwargs), "inplace_conv_multiway_newnode")
    costs = roofline(captured, DEVICES["a100"])
    for seed in range(3):
        schedule = random_schedule(captured.program, seed)
        found = lifetimes(captured.program, schedule, costs, 0)
        peak = simulate(captured.program, schedule, costs).peak_bytes
        assert most_at_once(found) + captured.program.resident_bytes == peak


def test_a_tensor_goes_into_the_smallest_block_that_is_large_enough() -> None:
    def of(*tensors: tuple[int, int, int]) -> list[Lifetime]:
        return [Lifetime(size * MIB, begin, end) for size, begin, end in tensors]

    assert best_fit(of((12, 0, 1), (12, 1, 2))) == 12 * MIB
    assert best_fit(of((4, 0, 3), (4, 0, 1), (4, 2, 3))) == 20 * MIB  # three cut from one block
    assert (
        best_fit(of((12, 0, 9), (30, 0, 1), (12, 1, 9), (30, 2, 9))) == (12 + 30 + 30) * MIB
    )  # the large block was cut
    assert best_fit(of((12, 0, 1), (14, 1, 2)), 20 * MIB) == 20 * MIB
    assert best_fit(of((11, 0, 1), (13, 1, 2))) == (12 + 14) * MIB
