"""Captures for a GPU that is not here are those of the GPU: what autocast casts, layouts, operators, or a refusal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cudnn_setting import cudnn_enabled
from fake_gpu import build, captures
from torch import nn

from monet_like.capture.absent_gpu import autocast as absent_gpu_autocast
from monet_like.capture.absent_gpu import choices as absent_gpu
from monet_like.capture.absent_gpu.attention import Absent
from monet_like.capture.captured import Captured, fake_mode
from monet_like.capture.lower.step import capture
from monet_like.errors import CaptureError

CUDA = torch.device("cuda", 0)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU is here")


def absent(model: nn.Module, *inputs: Any, autocast: torch.dtype | None = None) -> Captured:
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        return capture(model, inputs, target=CUDA)


# Against the real dispatch on a fake GPU ------------------------------------------------------------------------

#: Cases that cannot be captured without the GPU, and those that cannot be at all.
REFUSED = {
    **dict.fromkeys(("decoder of padded heads bfloat16", "masked"), False),
    "binary loss autocast": True,
    "flexible": True,
}


@pytest.fixture(scope="module")
def on_gpu(fake_gpu_library: Path, request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """What `captures` says, on the fake GPU, of the cases that are asked for in this run."""
    asking = (item for item in request.session.items if request.path == item.path and "on_gpu" in item.fixturenames)  # type: ignore[attr-defined]
    cases = [item.callspec.params["name"] for item in asking]
    command = [sys.executable, str(build.HERE / "captures.py"), *cases]
    done: subprocess.CompletedProcess[str] = build.run(fake_gpu_library, command)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(cases, map(json.loads, lines), strict=True))


@pytest.mark.slow(but=["decoder", "shuffled channels_last autocast"])
@pytest.mark.parametrize("name", captures.CASES)
def test_a_capture_without_the_gpu_is_the_one_with_it(on_gpu: dict[str, dict[str, Any]], name: str) -> None:
    there, here = on_gpu[name], captures.told(name)
    assert ("refused" in here) == (name in REFUSED), here
    assert ("refused" in there) == REFUSED.get(name, False), there
    if name == "flexible":
        assert all("blocks=[...]" in told["refused"] for told in (here, there))
    if name in REFUSED:
        return
    differing = [pair for pair in zip(here["values"], there["values"], strict=True) if pair[0] != pair[1]]
    assert differing == []
    assert (here["fingerprint"], here["plain"]) == (there["fingerprint"], there["plain"])


# Autocast -------------------------------------------------------------------------------------------------------


def test_every_operator_of_cudas_autocast_is_known() -> None:
    """But for cuDNN's recurrent layers, which are refused, and for names of dimensions, which no fake tensor has."""
    known = {name for name in absent_gpu_autocast.registered("AutocastCUDA") if not _of_named_dimensions(name)}
    assert known - {"_cudnn_rnn"} <= set(absent_gpu_autocast.POLICIES)


def _of_named_dimensions(name: str) -> bool:
    """Whether it is one of the overloads that PyTorch 2.11 still has for dimensions with names."""
    return "imname" in name or ".names_" in name


def test_policies_are_those_of_pytorchs_header() -> None:
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    lists = re.findall(r"#define AT_FORALL_(\w+)\(_\) +\\\n((?:.*\\\n)*.*)", header.read_text())
    if not lists:
        pytest.skip("this version of PyTorch has its lists elsewhere")
    policies = {
        "LOWER_PRECISION_FP": "lower",
        "FP32": "float32",
        "FP32_SET_OPT_DTYPE": "float32 result",
        "PROMOTE": "widest",
    }
    found = {
        ".".join(re.split(r",\s*", name)): policies[policy]
        for policy, text in lists
        if policy in policies
        for name in re.findall(r"_\(([\w, ]+)\)", text)
    }
    found |= dict.fromkeys(
        re.findall(r'"(norm\.\w+)"', dict(lists)["DIFFERENT_REDISPATCH_SIGNATURE"]), "float32 overload"
    )
    assert len(found) > 100
    missing = {"binary_cross_entropy": "refused", "linalg_matrix_sqrth": "float32"}  # registered apart from the lists
    missing |= dict.fromkeys(("cudnn_convolution", "cudnn_convolution_transpose"), "lower")
    named = {name: policy for name, policy in found.items() if not _of_named_dimensions(name)}
    registered = absent_gpu_autocast.registered("AutocastCUDA")
    assert named.items() <= absent_gpu_autocast.POLICIES.items()
    assert {
        n: p for n, p in absent_gpu_autocast.POLICIES.items() if n not in named and n in registered
    }.items() <= missing.items()


Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_functional = nn.functional
#: Of each way to cast some, and of those that CPUs cast otherwise.
FUNCTIONS: dict[str, Function] = {
    "matmul": lambda a, b: a @ b,
    "softmax": lambda a, b: a.softmax(-1),
    "softmax in float16": lambda a, b: a.softmax(-1, dtype=torch.float16),
    "sum": lambda a, b: a.sum(),
    "sum of whole numbers": lambda a, b: a.long().sum(0),
    "norm": lambda a, b: torch.norm(a),
    "norm of rows": lambda a, b: a.norm(2, -1),
    "layer_norm": lambda a, b: _functional.layer_norm(a, (4,)),
    "pow": lambda a, b: a**2,
    "cross_entropy": lambda a, b: _functional.cross_entropy(a, b),
    "cat": lambda a, b: torch.cat([a, b]),
    "avg_pool3d": lambda a, b: _functional.avg_pool3d(a[None, None], 1),
    "interpolate": lambda a, b: _functional.interpolate(a[None, None], scale_factor=2),
    "atan2": lambda a, b: torch.atan2(a, b),
    "index_put": lambda a, b: a.index_put((torch.zeros(4, dtype=torch.long, device=a.device),), b),
    "add": lambda a, b: a + b,
}
_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.mark.slow(every=3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_autocast_casts_as_on_cuda(name: str) -> None:
    """PyTorch's own kernels for tensors on a GPU, which need no GPU where tensors are fake."""
    function = FUNCTIONS[name]

    def result(device: str, *dtypes: torch.dtype) -> Any:
        with fake_mode(), torch.no_grad():
            try:
                return function(*(torch.empty(4, 4, dtype=dtype, device=device) for dtype in dtypes)).dtype
            except RuntimeError as error:
                return re.sub(r"cuda:0|cpu", "", str(error))

    for one in _DTYPES:
        for other in _DTYPES:
            torch.set_autocast_enabled("cuda", True)
            torch.set_autocast_dtype("cuda", torch.bfloat16)
            try:
                expected = result("cuda", one, other)
            finally:
                torch.set_autocast_enabled("cuda", False)
                torch.set_autocast_dtype("cuda", torch.float16)
            with absent_gpu.as_on(Absent(CUDA)), torch.autocast("cuda", torch.bfloat16):
                assert result("cpu", one, other) == expected, (one, other)


def test_autocast_is_afterwards_what_it_was() -> None:
    def dtypes() -> tuple[Any, ...]:
        a = torch.ones(4, 4)
        with torch.autocast("cpu", torch.bfloat16):
            return (a @ a).dtype, a.softmax(-1).dtype, (a @ a).exp().dtype, torch.is_autocast_enabled("cuda")

    before = dtypes()
    with absent_gpu.as_on(Absent(CUDA)):
        assert dtypes() == (torch.bfloat16, torch.float32, torch.float32, True)
    assert dtypes() == before == (torch.bfloat16, torch.float32, torch.bfloat16, False)
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16


def test_a_region_has_the_default_dtype_of_a_gpu() -> None:
    class Region(nn.Module):
        def __init__(self, device: str) -> None:
            super().__init__()
            self.layer, self.device = nn.Linear(4, 4), device

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast(self.device or x.device.type):
                return self.layer(x)

    for device in ("cuda", ""):
        captured = absent(Region(device), torch.randn(2, 4))
        assert captured.metas[captured.outputs[0].value].dtype == torch.float16


# Operators with kernels on a GPU alone --------------------------------------------------------------------------


def test_rms_norm_is_all_that_pytorch_writes_out_on_a_cpu_alone() -> None:
    """Operators that are written out where a device has no kernel of its own for them."""

    def has(name: str, *keys: str) -> bool:
        return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)

    names = [n for n in torch._C._dispatch_get_all_op_names() if has(n, "CompositeImplicitAutograd")]
    there = {n for n in names if n.startswith("aten::") and has(n, "CUDA", "AutogradCUDA")}
    assert there - {n for n in names if has(n, "CPU", "AutogradCPU")} <= {"aten::_fused_rms_norm"}


def test_rms_norm_is_afterwards_what_it_was() -> None:
    layer, x = nn.RMSNorm(6), torch.randn(3, 6)

    def gradients() -> list[torch.Tensor]:
        return [*torch.autograd.grad(layer(x).exp().sum(), layer.parameters())]

    before = gradients()
    operators = [[call.op for t in absent(layer, x).program.every_task() for call in t.calls] for _ in range(2)]
    assert operators[0] == operators[1] == ["aten._fused_rms_norm.default", "aten._fused_rms_norm_backward.default"]
    assert all(map(torch.equal, gradients(), before))
    assert "aten._fused_rms_norm.default" not in [c.op for t in capture(layer, (x,)).program.tasks for c in t.calls]


# Layouts --------------------------------------------------------------------------------------------------------


def test_a_convolution_in_channels_last_needs_a_pytorch_with_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_has_cudnn", False)
    layer, x = nn.Conv2d(4, 4, 3), torch.randn(2, 4, 6, 6)
    assert absent(layer, x).metas[0].contiguous
    with pytest.raises(CaptureError, match=r"a PyTorch that is built for CUDA; install that one, which needs no GPU"):
        absent(layer, x.to(memory_format=torch.channels_last))


# Refusals -------------------------------------------------------------------------------------------------------


class Called(nn.Module):
    """One function of its input."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x).sigmoid())


@pytest.mark.parametrize(("layer", "name"), [(nn.RNN(8, 8), "rnn_tanh"), (nn.LSTMCell(8, 8), "lstm_cell")])
def test_recurrent_layers_are_refused(layer: nn.Module, name: str) -> None:
    with pytest.raises(CaptureError, match=f"a GPU computes {name} by cuDNN .*; capture this model on the GPU"):
        absent(layer, torch.randn(2, 8) if name.endswith("cell") else torch.randn(3, 2, 8))


def _sampled(x: torch.Tensor, align_corners: bool) -> torch.Tensor:
    return nn.functional.grid_sample(
        x[None, None], x[None, :, :2, None].expand(1, -1, -1, 2), align_corners=align_corners
    )


def test_what_a_gpu_does_by_operators_that_no_trace_knows_is_refused() -> None:
    x = torch.randn(4, 8)
    assert absent(Called(lambda x: _sampled(x, align_corners=False)), x).outputs
    with cudnn_enabled(False):
        assert absent(Called(lambda x: _sampled(x, align_corners=True)), x).outputs
    with pytest.raises(CaptureError, match=r"samples this grid by cuDNN, .* no trace knows; call grid_sample"):
        absent(Called(lambda x: _sampled(x, align_corners=True)), x)
    targets = torch.ones(2, 1, dtype=torch.long)
    loss = Called(lambda x: nn.functional.ctc_loss(x.view(4, 2, 4).log_softmax(-1), targets, [4, 4], [1, 1]))
    with pytest.raises(CaptureError, match=r"asks cuDNN whether it computes a CTC loss, .*; compute the loss"):
        absent(loss, x)


def test_a_loss_that_a_gpus_autocast_refuses() -> None:
    model = Called(lambda x: nn.functional.binary_cross_entropy(x, x.detach()))
    assert absent(model, torch.randn(4, 8)).outputs
    said = r"refuses binary_cross_entropy \(BCELoss\) under autocast on a GPU; use binary_cross_entropy_with_logits"
    with pytest.raises(CaptureError, match=said):
        absent(model, torch.randn(4, 8), autocast=torch.bfloat16)


def test_an_operator_that_only_this_pytorch_casts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        absent_gpu_autocast, "POLICIES", {n: p for n, p in absent_gpu_autocast.POLICIES.items() if n != "acos"}
    )
    model = Called(torch.acos)
    assert absent(model, torch.randn(4, 8)).outputs
    with pytest.raises(CaptureError, match=r"what autocast does with aten\.acos on a GPU is known only to"):
        absent(model, torch.randn(4, 8), autocast=torch.bfloat16)


@pytest.mark.skipif(not torch._C._has_cudnn, reason="channels-last convolutions need a PyTorch that is built for CUDA")
def test_group_norm_is_in_rows_on_a_gpu() -> None:
    """A CPU computes it channels-last, too; on a GPU its input is copied to rows, and so lies its result."""
    layers = nn.Sequential(nn.Conv2d(4, 8, 1), nn.GroupNorm(2, 8)).to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)
    for captured, copies in ((absent(layers, x), 1), (capture(layers, (x,)), 0)):
        calls = [call for task in captured.program.tasks for call in task.calls]
        (norm,) = (call for call in calls if call.op == "aten.native_group_norm.default")
        assert sum(call.op == "aten.clone.default" for call in calls) == copies
        assert norm.outs[0] is not None and captured.metas[norm.outs[0].name].contiguous == bool(copies)
