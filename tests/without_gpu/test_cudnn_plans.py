"""Convolutions by named algorithms make cuDNN's descriptors once: on the fake GPU, see ``fake_gpu/convolutions.py``.

Counts are those of descriptors that are created, of functions that set them, of sizes of workspaces that are asked
for, of convolutions, and of descriptors that are destroyed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import build
from fake_gpu.server import Ask

from monet_like.build import library_path

if not library_path("kernels_cudnn").exists():
    pytest.skip("cuDNN's convolutions are not compiled: python -m monet_like.build --cuda", allow_module_level=True)

OPERATORS = ("cudnn_convolution", "cudnn_convolution_backward_input", "cudnn_convolution_backward_weight")
FIRST, KNOWN = [4, 6, 1, 1, 0], [0, 0, 0, 1, 0]


@pytest.fixture
def tell(ask: Ask) -> Any:
    """What ``fake_gpu/convolutions.py`` tells of a case."""
    return lambda case: ask(f"cudnn_calls:{case}", FAKE_GPU_DEVICES="2")[0]


def test_a_second_call_creates_no_descriptor_and_asks_for_no_size(tell: Any) -> None:
    """The workspace is allocated in every call, with the size that cuDNN has said in the first."""
    found = tell("again")
    for operator in OPERATORS:
        calls = found[operator]
        assert [call["counts"] for call in calls] == [FIRST, KNOWN, KNOWN]
        for call in calls:
            assert call["beside"] == call["workspace"] > 1000 and not call["left"]


def test_a_problem_that_differs_has_a_plan_of_its_own(tell: Any) -> None:
    """Also if it differs by a setting alone, as TF32 does; and it leaves the plan of the first."""
    found = tell("others")
    assert found["one number for both"] == KNOWN
    others = {name: other for name, other in found.items() if isinstance(other, dict)}
    assert len(others) == 28
    for name, other in others.items():
        assert other["counts"] == [FIRST, KNOWN, KNOWN], name
        assert other["given"] == other["wanted"], name


def test_threads_share_the_plans_of_a_handle(tell: Any) -> None:
    """Two threads at once have a handle each; a thread that starts when they have ended gets one of these."""
    found = tell("threads")
    assert not found["failed"]
    assert found["two"] == [160, 240, 40, 800, 0]
    assert found["later"] == [0, 0, 0, 400, 0]
    assert found["backwards"][1] == KNOWN


def test_refusals_are_not_kept_and_say_what_they_said(tell: Any) -> None:
    found = tell("refused")
    words = "is not to be had for these shapes, dtypes and layouts here: CUDNN_STATUS_NOT_SUPPORTED"
    fft = ["RuntimeError", f"monet_like::cudnn_convolution: cuDNN's algorithm fft {words}", [4, 6, 1, 0, 4]]
    assert found["when asked"] == [fft, fft]
    gemm = ["RuntimeError", f"monet_like::cudnn_convolution: cuDNN's algorithm gemm {words}"]
    assert found["when run"] == [[*gemm, [4, 6, 1, 0, 0]], [*gemm, [0, 0, 0, 0, 0]]]
    sizes = "[2, 8, 9, 9], [8, 4, 3, 3] and [2, 8, 7, 7]"
    for kind, text, counts in found["groups"]:
        assert kind == "ValueError" and text.endswith(f"{sizes} in 1 groups are no convolution of [N, C, H, W]")
        assert counts == [4, 0, 0, 0, 4]
    assert len(found["groups"]) == 2 and len(found["no stride"]) == 3
    for kind, text, counts in (*found["padding"], *found["result"], *found["no stride"]):
        assert kind == "ValueError" and "a stride of [" in text and " do not make [2, 8, " in text
        assert counts == [4, 0, 0, 0, 4]
    (three, *_), (dtype, *_), (algorithm, *_) = found["three strides"], found["dtype"], found["algorithm"]
    assert three[0] == "ValueError" and three[1].endswith("must be one number or two, got [1, 1, 1]")
    assert dtype[0] == "TypeError" and dtype[1].endswith("must be float32, float64, float16 or bfloat16, got Int")
    assert algorithm[0] == "ValueError" and algorithm[1].endswith("there is no algorithm fast")


def test_a_step_creates_nothing_from_the_second_on(tell: Any) -> None:
    first, *later = tell("step")["steps"]
    runs = first[3]
    assert runs > 8 and first == [4 * runs, 6 * runs, runs, runs, 0]
    assert later == [[0, 0, 0, runs, 0]] * 2


@pytest.mark.slow
def test_few_plans_are_kept(tell: Any) -> None:
    """4096 of 4500, of four descriptors each."""
    found = tell("many")
    assert (found["most"], found["again"]) == (4 * 4096, KNOWN)


@pytest.mark.slow
def test_nothing_is_destroyed_when_a_process_ends(fake_gpu_library: Path) -> None:
    command = [sys.executable, str(build.HERE / "convolutions.py")]
    done = build.run(fake_gpu_library, command, FAKE_GPU_TRACE="1")
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout) == FIRST
    assert done.stderr.splitlines()[-1] == "fake_gpu: end created=4 destroyed=0"
