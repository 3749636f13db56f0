"""Predictions by one clock and by two, and the constants that fit measured steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.two_clocks import Told, Waits, fitted, is_near, left_out, summary
from monet_like.capture.lower.step import capture
from monet_like.profile.launches import HOST_PACES
from scripts.gpu_check import Replay, starts


def made(residents: int, alone: float, start: float = 0.002, resident: float = 1e-5, counted: float = 0.0) -> Told:
    """A step that takes 2 % more than the operators and the wait for the first launch; ``counted``: what its
    predictions have of such waits.
    """
    wait, slower = start + resident * residents, 1.02
    row = Replay(
        f"net_{residents}", "measured", f"net_{residents}", seconds=slower * (alone + wait),
        predicted_seconds=alone + 3 * counted, predicted_plain_seconds=0.1 + counted, plain_start_seconds=counted,
        start_seconds=3 * counted,
    )  # fmt: skip
    return Told(row, slower * (0.1 + 1e-4), Waits(1e-4, wait, residents))


def test_a_wait_for_the_first_launch_is_found() -> None:
    rows = [made(residents, alone) for residents, alone in ((32, 0.1), (320, 0.06), (64, 0.3))]
    rows.append(made(400, 0.08, counted=0.001))
    assert fitted(rows) == pytest.approx((0.002, 1e-5))
    for row in rows:
        assert row.errors[2] == pytest.approx(0, abs=1e-12)
        assert row.errors[0] < row.errors[1] < -0.005


def test_the_gpu_check_writes_what_predictions_have_of_it() -> None:
    captured = capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), (torch.randn(2, 4),))
    assert tuple(starts(captured, "roofline:h200")) == tuple(starts(captured, "cpu: some, 2 threads")) == (0.0, 0.0)
    plain, planned = starts(captured, "cuda: NVIDIA H200")
    assert plain == HOST_PACES["plain"].start_seconds
    assert planned == HOST_PACES["planned"].start_seconds + 4 * HOST_PACES["planned"].resident_seconds


def test_a_net_is_left_out_of_its_own_constants() -> None:
    """The second of three nets waits twice as long as the line through the others says, and moves neither of them."""
    rows = [made(40, 0.1), made(160, 0.1, 0.004, 2e-5), made(320, 0.1), made(480, 0.1)]
    one, odd, *others = left_out(rows)
    assert odd.waits.seconds == pytest.approx(0.002 + 160e-5) and not is_near(odd)
    assert fitted(rows)[0] > 0.0021  # where it is not left out
    assert one.waits.seconds != pytest.approx(0.002 + 40e-5) and all(map(is_near, others))


def test_the_summary_names_what_is_not_near() -> None:
    near, far = made(320, 0.06), made(321, 0.06)
    far = Told(far.row, far.plain_seconds, Waits(1e-4, 0.0, 321))
    assert summary([near, far]) == (
        "Within 2 %: 0 of 2 by the sum, 0 scaled, 1 by two clocks and scaled. Not within by the latter: net_321 "
        "(-8.0 %)."
    )
