"""What cuBLAS keeps counts where a program multiplies on a GPU; tests/without_gpu/test_fake_gpu.py compares it with the
allocator.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from monet_like.capture.captured import fake_mode
from monet_like.capture.lower.step import capture
from monet_like.cli.group import main
from monet_like.cli.zoo import build as building
from monet_like.compiler.pipeline import make_record, plan_for, prepare
from monet_like.compiler.prepared import with_workspaces_of
from monet_like.compiler.request import Request
from monet_like.compiler.sources import Given
from monet_like.errors import ScheduleFileError
from monet_like.ir.profile_file import Profile
from monet_like.ir.program import Cost
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.ir.simulate import simulate
from monet_like.job.job import Job
from monet_like.job.solved import SolvedPlan
from monet_like.profile import cublas
from monet_like.profile.cublas import LARGE_BYTES, SMALL_BYTES, default_bytes, multiplies, schedule_multiplies
from monet_like.profile.devices import DEVICES, DeviceLimits
from monet_like.torch_versions import release

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ON_HOPPER = 2 * 2**25


#: Workspaces that are kept all through a step, as up to PyTorch 2.14; or one of each product.
KEPT = {"h100": ON_HOPPER, "a100": 2 * 8519680, "cpu": 0}


def card(name: str, *, keeps: bool = True) -> DeviceLimits:
    kept, own = (KEPT[name], 0) if keeps else (0, KEPT[name] // 2)
    return dataclasses.replace(DEVICES[name], cublas_bytes=kept, product_bytes=own)


class Squared(nn.Module):
    """A product without a layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x


def net(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), *more)


def linear_net() -> nn.Module:
    return net(nn.Flatten(), nn.Linear(512, 4))


def request(model: nn.Module, target: torch.device | None = CUDA, optimizer: str = "none") -> Request:
    with fake_mode():
        example = ((torch.empty(4, 3, 8, 8),), {})
    return Request(model, example, "normal", "a net", target=target, optimizer=optimizer, strategy="store_all")


def compiled(model: nn.Module, device: str = "h100", optimizer: str = "none", *, keeps: bool = True) -> SolvedPlan:
    target = None if device == "cpu" else CUDA
    return Job(request(model, target, optimizer), CPU, Given(card(device, keeps=keeps))).plan(2**40)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (net(), False),
        (linear_net(), True),
        (net(Squared()), True),
        (net(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Softmax(-1)), False),
        (nn.ConvTranspose2d(3, 4, 2), False),  # cuDNN's
    ],
)
def test_which_programs_multiply(model: nn.Module, expected: bool) -> None:
    with fake_mode():
        x = torch.empty(4, 3, 8, 8)
    assert multiplies(capture(model, (x,), target=CUDA).program.every_task()) is expected


def test_without_cudnn_convolutions_are_products(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_mode():
        captured = capture(net(), (torch.empty(4, 3, 8, 8),), target=CUDA)
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    assert multiplies(captured.program.every_task())


def test_a_variant_may_multiply() -> None:
    """Convolutions by columns are offered: cuBLAS's workspaces count for a schedule that takes them, and
    for no other.
    """
    asked = dataclasses.replace(request(net()), mode="conv", strategy="heuristic")
    ready = prepare(asked, CPU, profile=card("h100"))
    assert (ready.extra_bytes, ready.cublas_bytes, ready.variants_cublas_bytes) == (0, 0, ON_HOPPER)
    columns = [task for task in ready.captured.program.tasks if multiplies([task])]
    assert columns
    for factor, expected in ((1e6, 0), (1e-6, ON_HOPPER)):
        costs = dict(ready.costs)
        for task in columns:
            costs[task.cost] = Cost(costs[task.cost].seconds * factor, 0)
        with_them = dataclasses.replace(ready, costs=costs)
        found = plan_for(with_them, asked, 2**40)
        record = make_record(asked, with_them, found, 2**40)
        assert record.cublas_bytes == expected
        assert record.peak_bytes == simulate(ready.captured.program, found.schedule, costs).peak_bytes + expected
        assert record.plain_peak_bytes == ready.plain.peak_bytes < 2**20
        narrow = plan_for(with_them, asked, ready.plain.peak_bytes)  # no room for workspaces, but for the schedule
        assert make_record(asked, with_them, narrow, ready.plain.peak_bytes).cublas_bytes == 0
        assert not schedule_multiplies(ready.captured.program, narrow.schedule)


def test_sizes_by_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (LARGE_BYTES, SMALL_BYTES) == (32 * 2**20, 8519680)
    large = {9, 10, 11, 12} if release() > (2, 11) else {9}
    monkeypatch.setattr(cublas, "are_kept", lambda: True)
    sizes = {major: 2 * (LARGE_BYTES if major in large else SMALL_BYTES) for major in range(6, 13)}
    assert {major: default_bytes(major) for major in sizes} == sizes
    monkeypatch.undo()
    for limits in DEVICES.values():
        size = sizes[limits.capability[0]] if limits.capability else 0
        assert (limits.cublas_bytes, limits.product_bytes) == ((size, 0) if cublas.are_kept() else (0, size // 2))
    assert DEVICES["h100"].capability == (9, 0)


def test_which_versions_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUBLAS_WORKSPACE_CACHE", raising=False)
    for version, kept in (((2, 11), True), ((2, 14), True), ((2, 15), False), ((3, 0), False)):
        monkeypatch.setattr(cublas, "release", lambda version=version: version)
        assert cublas.are_kept() is kept and (default_bytes(9) == ON_HOPPER) is kept
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    assert cublas.are_kept()


def test_where_none_are_kept_each_product_counts_its_own() -> None:
    """Its step is the peak, by a workspace above what it is without one; what does not multiply has none."""
    found, without = compiled(linear_net(), keeps=False), compiled(net(), keeps=False)
    assert found.record.cublas_bytes == 0
    products = {task.cost for task in found.ready.captured.program.every_task() if multiplies([task])}
    own = {key: cost.workspace_bytes for key, cost in found.ready.costs.items() if key in products}
    assert len(own) == 3 and set(own.values()) == {LARGE_BYTES}
    assert LARGE_BYTES < found.record.peak_bytes < found.record.plain_peak_bytes + 1 < LARGE_BYTES + 2**20
    assert without.record.peak_bytes < 2**20


@pytest.mark.parametrize(
    ("model", "device", "expected"),
    [
        (linear_net(), "h100", ON_HOPPER),
        (linear_net(), "a100", 2 * 8519680),
        (net(), "h100", 0),
        (linear_net(), "cpu", 0),
    ],
)
def test_a_schedule_counts_them_with_the_optimizer_s_state(model: nn.Module, device: str, expected: int) -> None:
    found = compiled(model, device, "adam")
    record, state = found.record, 2 * sum(4 * p.numel() for p in model.parameters())
    assert (record.cublas_bytes, record.optimizer_bytes, record.extra_bytes) == (expected, state, state + expected)
    report = simulate(found.ready.captured.program, record.schedule, found.ready.costs)
    assert record.peak_bytes == report.peak_bytes + state + expected
    without = Job(
        request(model, None if device == "cpu" else CUDA), CPU, Given(dataclasses.replace(card(device), cublas_bytes=0))
    ).plan(2**40)
    assert record.plain_peak_bytes == without.record.plain_peak_bytes + state + expected


def test_what_is_shown(tmp_path: Path) -> None:
    compiled(linear_net()).record.save(tmp_path / "net.json")
    shown = CliRunner().invoke(main, ["inspect", str(tmp_path / "net.json")]).output
    assert "64.0 MB for its workspaces, in all peaks" in " ".join(shown.split())
    compiled(net()).record.save(tmp_path / "net.json")
    assert "cuBLAS" not in CliRunner().invoke(main, ["inspect", str(tmp_path / "net.json")]).output


def test_files_of_before_count_none(tmp_path: Path) -> None:
    record = compiled(linear_net()).record
    content = json.loads(json.dumps(record.content()))
    assert ScheduleRecord.of_content(content, "x") == record
    del content["cublas_bytes"]
    assert ScheduleRecord.of_content(content, "x") == dataclasses.replace(record, cublas_bytes=0)
    Profile("roofline:h100", {"a": Cost(1.0, 2)}, cublas_bytes=7).save(tmp_path / "new.json")
    assert Profile.load(tmp_path / "new.json").cublas_bytes == 7
    written = json.loads((tmp_path / "new.json").read_text())
    for wrong in (-1, True, 1.5, "7", 2**63):
        (tmp_path / "wrong.json").write_text(json.dumps({**written, "cublas_bytes": wrong}))
        with pytest.raises(ScheduleFileError, match="is damaged"):
            Profile.load(tmp_path / "wrong.json")
    del written["cublas_bytes"]
    (tmp_path / "old.json").write_text(json.dumps(written))
    assert Profile.load(tmp_path / "old.json").cublas_bytes == 0


def test_a_report_counts_what_its_schedule_does() -> None:
    model = linear_net()
    record = compiled(model).record
    ready = prepare(request(model), CPU, profile=card("h100"))
    assert ready.cublas_bytes == ready.extra_bytes == ON_HOPPER
    assert with_workspaces_of(record, ready) == ready
    before = with_workspaces_of(dataclasses.replace(record, cublas_bytes=0), ready)
    assert before.cublas_bytes == before.extra_bytes == 0
    assert before.plain.peak_bytes == ready.plain.peak_bytes - ON_HOPPER


@pytest.mark.slow
def test_the_zoo_is_planned_without_them() -> None:
    _, ready = building.prepared_model("torchvision.models.resnet18()", 2, "h100")
    assert multiplies(ready.captured.plain.every_task())
    assert ready.extra_bytes == ready.cublas_bytes == 0
