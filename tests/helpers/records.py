"""A schedule record to write, damage and read."""

from __future__ import annotations

from monet_like.ir.schedule import Schedule
from monet_like.ir.schedule_file import InputSpec, ScheduleRecord

RECORD = ScheduleRecord(
    schedule=Schedule((0, 1, 2, 4), ((), (1, 2), (), (0,)), (0, 2, 0, 1)),
    model="torchvision.models.resnet18(num_classes=10)",
    inputs=(
        InputSpec((4, 3, 64, 64), "float32", True),
        InputSpec((4,), "int64"),
        InputSpec((), "float64", layout="channels_last"),
    ),
    mode="inplace_conv_multiway_newnode",
    budget_bytes=10 * 2**30,
    fingerprint="0123456789abcdef" * 4,
    device="cpu: a processor, 2 threads",
    versions={"torch": "2.15.0", "python": "3.11"},
    peak_bytes=2**33 + 1,
    seconds=1.25,
    plain_peak_bytes=2**34,
    plain_seconds=1.0,
    solver="CBC",
    status="optimal",
    bound_seconds=1.24,
    gap=0.008,
    solve_seconds=3.5,
    ablation=True,
    optimizer="adam",
    optimizer_bytes=2**28,
    cublas_bytes=2**26,
    autocast="bfloat16",
    attention="flash",
    layout="channels_last",
    made_last=("classifier.0.weight", "classifier.3.weight"),
    note="measured at batch 2, scaled to 4",
    counts={"kept": 12, "variant conv.im2col": 3},
    run_bytes=(2**32, 2**33 + 1, 2**31, 5, 6, 7, 8, 9, 10, 11, 12),
    offloaded=(3, 7),
    device_seconds=1.125,
)
