"""Planning for a device that is not here, and a schedule on another device than it was planned for."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from commands import run_command
from dispatched import Dispatched
from torch import nn

from monet_like.capture.captured import Captured, fake_mode
from monet_like.capture.lower.step import capture
from monet_like.compiler.pipeline import prepare
from monet_like.compiler.request import Request
from monet_like.errors import CaptureError
from monet_like.ir.profile_file import Profile
from monet_like.ir.program import Cost, Task
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.ir.units import GIB
from monet_like.models import build_model
from monet_like.profile.devices import DEVICES, Machine, known_limits, machine_at, planned_for
from monet_like.profile.roofline import roofline
from monet_like.replay.checks import compatibility
from monet_like.replay.checks.compatibility import difference, warn_elsewhere
from monet_like.variants import admitted

CUDA = torch.device("cuda", 0)
MODE = "inplace_conv_multiway_newnode"


# Differences --------------------------------------------------------------------------------------------------

A100 = planned_for("roofline:a100")
H100 = Machine("cuda", "NVIDIA H100 80GB HBM3", int(79.1 * GIB), 67e12, 3350e9, 494.5e12)
STRANGE = Machine("cuda", "NVIDIA Z1", 40 * GIB)
CPU = Machine("cpu", "a processor, 2 threads")


@pytest.mark.parametrize(
    ("planned", "here", "expected"),
    [
        (planned_for("roofline:h100"), H100, ""),  # what a card reports of its 80 GB
        (planned_for("cuda: NVIDIA H100 80GB HBM3"), H100, ""),
        (
            A100,
            H100,
            "memory is 79.10 GB instead of 40.00 GB; arithmetic is 67 TFLOP/s instead of 19.5; "
            "float32 convolution is 494 TFLOP/s instead of 156; memory traffic is 3.35 TB/s instead of 1.55",
        ),
        (
            planned_for("roofline:h200"),
            H100,
            "memory is 79.10 GB instead of 141.00 GB; memory traffic is 3.35 TB/s instead of 4.8",
        ),
        (A100, dataclasses.replace(A100, memory_bytes=int(39.4 * GIB)), ""),
        (A100, dataclasses.replace(A100, memory_bytes=80 * GIB), "memory is 80.00 GB instead of 40.00 GB"),
        (A100, STRANGE, "rates of NVIDIA Z1 are not known, so that how far times differ is not, either"),
        (A100, CPU, "a GPU and a CPU differ in which operators are slow"),
        (planned_for("cpu: one, 2 threads"), CPU, ""),
        (planned_for("roofline:cpu"), CPU, ""),
    ],
)
def test_what_differs(planned: Machine, here: Machine, expected: str) -> None:
    assert difference(planned, here, 10 * GIB) == expected


def test_a_peak_that_does_not_fit() -> None:
    small = dataclasses.replace(A100, memory_bytes=24 * GIB)
    told = "its peak of 30.00 GB does not fit into 24.00 GB; plan for a smaller budget"
    assert difference(A100, small, 30 * GIB) == told


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("A100-SXM4-40GB", "a100"),  # by older drivers
        ("NVIDIA A100-PCIE-40GB", "a100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb-sxm"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GH200 144G HBM3e", None),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4080", "rtx4080"),
        ("NVIDIA GeForce RTX 4080 SUPER", None),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx2080ti"),
        ("Tesla P100-PCIE-16GB", "p100"),
        ("Tesla P100-SXM2-16GB", None),
        ("NVIDIA GeForce RTX 3060", None),
    ],
)
def test_devices_by_pytorchs_names(name: str, expected: str | None) -> None:
    limits = known_limits(name)
    assert (limits.name if limits else None) == expected


def test_gpus_have_a_memory_and_a_source() -> None:
    gigabytes = {name: limits.memory_bytes // GIB for name, limits in DEVICES.items() if limits.device == "cuda"}
    assert gigabytes == {
        **{"p100": 16, "a100": 40, "a100-80gb-pcie": 80, "a100-80gb-sxm": 80, "h100": 80, "h100-pcie": 80},
        **{"h100-nvl": 94, "h200": 141, "h200-nvl": 141, "gh200": 96, "rtx2080ti": 11, "rtx4090": 24},
        **{"rtx4080": 16, "l40s": 48, "t4": 16, "v100-16gb": 16, "v100-32gb": 32, "rtx3070": 8, "rtx3080": 10},
        **{"rtx3090": 24, "a10": 24, "rtxa6000": 48, "rtx4070": 12, "l4": 24, "rtx6000ada": 48, "rtx5070ti": 16},
        **{"rtx5080": 16, "rtx5090": 32},
    }
    cards = [limits for limits in DEVICES.values() if limits.device == "cuda"]
    assert all("datasheet" in limits.source or "whitepaper" in limits.source for limits in cards)
    names = [name for limits in cards for name in limits.products]
    assert len(set(names)) == len(names) >= len(cards)


def test_one_warning_for_each_pair_of_devices(record: ScheduleRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "_told", set())
    foreign = dataclasses.replace(record, device="cuda: NVIDIA H100 80GB HBM3")
    cpu = torch.device("cpu")
    name = machine_at(cpu).name
    with pytest.warns(UserWarning, match="planned for NVIDIA H100") as caught:
        warn_elsewhere(foreign, cpu, stacklevel=1)
    (message,) = (str(warning.message) for warning in caught)
    assert message == (
        f"the schedule was planned for NVIDIA H100 80GB HBM3 and runs on {name}: a GPU and a CPU differ in which "
        "operators are slow. Gradients are the same, but times and workspaces are not those predicted; to plan for "
        "this device, solve on it"
    )
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_elsewhere(foreign, cpu, stacklevel=1)
        warn_elsewhere(dataclasses.replace(record, device="cpu: else, 8 threads"), cpu, stacklevel=1)
    with pytest.warns(UserWarning, match="planned for rtx4090"):
        warn_elsewhere(dataclasses.replace(record, device="roofline:rtx4090"), cpu, stacklevel=1)


@pytest.fixture(name="record")
def _record() -> ScheduleRecord:
    from records import RECORD

    return RECORD


# Capture as on a GPU ------------------------------------------------------------------------------------------


class Attends(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.first, self.norm, self.options = nn.Linear(16, 32), nn.LayerNorm(32), options
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.drop(self.first(x))).unflatten(-1, (4, 8)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(x, x, x, **self.options)


def captured(model: nn.Module, *shape: int, target: torch.device | None = CUDA) -> Captured:
    with fake_mode():
        x = torch.empty(*shape)
    return admitted(capture(model, (x,), target=target), MODE)


def operators(program: Captured) -> Counter[str]:
    return Counter(call.op for task in program.every_task() for call in task.calls)


def convolutional() -> nn.Module:
    layers = (
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 15 * 15, 9),
    )
    return nn.Sequential(*layers)


def test_attention_dropout_and_layers_are_those_of_cuda() -> None:
    here, there = operators(captured(Attends(), 2, 6, 16, target=None)), captured(Attends(), 2, 6, 16)
    found = operators(there)
    assert found["aten._scaled_dot_product_efficient_attention.default"] >= 1
    assert found["aten._scaled_dot_product_efficient_attention_backward.default"] >= 1
    assert here["aten._scaled_dot_product_flash_attention_for_cpu.default"] >= 1
    assert not [op for op in found if "for_cpu" in op or "mkldnn" in op]
    assert there.device == CUDA
    assert {meta.device for meta in there.metas if meta.dtype.is_floating_point} == {CUDA}
    assert nn.functional.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention  # as before
    if not torch.cuda.is_available():
        return
    real = admitted(capture(Attends().to(CUDA), (torch.randn(2, 6, 16, device=CUDA),)), MODE)
    assert real.program.fingerprint == there.program.fingerprint


def test_the_forward_is_what_pytorch_dispatches_on_cuda() -> None:
    """Fake tensors on CUDA run a forward without a GPU (only autograd's engine needs one): its operators are ours."""
    tail = (nn.Dropout(0.3), nn.Linear(9, 9), nn.GELU(), nn.LayerNorm(9), nn.Softmax(-1))
    model = nn.Sequential(*convolutional(), *tail)
    there = captured(model, 4, 3, 32, 32)
    found = operators_of(there.plain.tasks)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    dispatched = Dispatched()
    with fake_mode() as mode:
        moved = {name: mode.from_tensor(tensor.detach()).to(CUDA) for name, tensor in state.items()}
        x = torch.empty(4, 3, 32, 32, device=CUDA)
        with dispatched:
            torch.func.functional_call(model, moved, (x,))
    expected = Counter(dispatched.names)
    assert expected["aten.cudnn_batch_norm.default"]
    views = ("aten.view", "aten.t.", "aten.detach", "aten._unsafe_view", "prim.device", "monet_like.")
    for counted in (found, expected):
        for name in [name for name in counted if name.startswith(views)]:
            del counted[name]
    assert found == expected and sum(found.values()) >= 9


def operators_of(tasks: Sequence[Task]) -> Counter[str]:
    return Counter(call.op for task in tasks if task.runs != "again" for call in task.calls)


def test_values_are_counted_as_cudas_allocator_counts_them() -> None:
    there = captured(convolutional(), 4, 3, 32, 32)
    assert all(value.bytes % 512 == 0 for value in there.program.values)
    words = {task.variant for task in there.every_task()}
    # cuDNN has other bits.
    assert "batch_norm_clamp.train_in_vectors" in words and "batch_norm_clamp.train" not in words
    if torch.cuda.is_available():
        real = admitted(capture(convolutional().to(CUDA), (torch.randn(4, 3, 32, 32, device=CUDA),)), MODE)
        assert real.program.fingerprint == there.program.fingerprint


def test_what_a_gpu_would_take_is_not_guessed() -> None:
    with pytest.raises(
        CaptureError, match="how PyTorch prepares a mask for efficient attention is known only on the GPU"
    ):
        captured(Attends(attn_mask=torch.ones(6, 6)), 2, 6, 16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU is here")
def test_a_plan_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\ndef net():\n"
        "    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())\n"
    )
    model, out = f"{tmp_path / 'net.py'}:net", tmp_path / "plan.json"
    arguments = ["solve", model, "8", "0.05", MODE, "heuristic", "--input-shape", "3,64,64", "--out", str(out)]
    run_command(*arguments, "--device", "cuda", "--profile", "roofline:h100")
    record = ScheduleRecord.load(out)
    assert record.device == "roofline:h100"
    assert record.note.startswith("estimated from datasheet rates (NVIDIA H100 SXM datasheet")
    assert record.note.endswith("; captured as on cuda, without one")
    store = tmp_path / "recorded.json"
    model_there = captured(build_model(model).module, 8, 3, 64, 64)
    costs = roofline(model_there, DEVICES["h200"])
    Profile("cuda: NVIDIA H200", costs, "measured at batch 8", {}).save(store)
    run_command(*arguments, "--profile", str(store))  # measured on a GPU: for one
    record = ScheduleRecord.load(out)
    assert (record.device, record.note) == (
        "cuda: NVIDIA H200",
        "measured at batch 8; captured as on cuda, without one",
    )
    assert record.fingerprint == model_there.program.fingerprint
    Profile("cuda: NVIDIA H200", dict([*costs.items()][1:]), "", {}).save(store)
    refused = run_command(*arguments, "--device", "cuda", "--profile", str(store), exit_code=2)
    assert "measured on cuda: NVIDIA H200, lacks 2 operators of this model" in refused.output
    refused = run_command(*arguments, "--device", "cuda", exit_code=2)
    assert "device 'cuda' is not there" in refused.output


def test_rates_complete_a_profile_that_was_made_of_them() -> None:
    """Nothing of it is measured here, and what is known stays as it is."""
    request = Request(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).train(), ((torch.randn(2, 3, 8, 8),), {}), MODE)
    here = torch.device("cpu")
    whole = prepare(request, here, profile=DEVICES["h100"]).profile
    known = {key: Cost(1.0) for key in [*whole.costs][::2]}
    saved: list[Profile] = []
    part = dataclasses.replace(whole, costs=known)
    completed = prepare(request, here, profile=part, save_profile=saved.append).profile
    assert completed.costs == {**whole.costs, **known}
    assert saved == [completed]
    assert prepare(request, here, profile=completed, save_profile=saved.append).profile is completed
    assert len(saved) == 1
