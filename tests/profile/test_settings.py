"""Costs are valid for the settings that they were measured with: all that changes one is in the cache's keys."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monet_like
from monet_like import ops
from monet_like.compiler.pipeline import prepare
from monet_like.compiler.request import Request
from monet_like.files import cache_folder
from monet_like.ir.profile_file import Profile
from monet_like.profile import settings
from monet_like.profile.settings import VARIABLES, changed_settings, settings_digest, settings_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    """PyTorch's own settings as they were."""
    cudnn, matmul, mkldnn = torch.backends.cudnn, torch.backends.cuda.matmul, torch.backends.mkldnn
    precisions = [(part, part.fp32_precision) for part in (cudnn.conv, cudnn.rnn, matmul, mkldnn.conv, mkldnn.matmul)]
    others = [
        (cudnn, name, getattr(cudnn, name)) for name in ("enabled", "benchmark", "benchmark_limit", "deterministic")
    ]
    reduced = (
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    )
    others += [(matmul, name, getattr(matmul, name)) for name in reduced]
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    by_old_name = cudnn.allow_tf32, matmul.allow_tf32
    yield
    cudnn.allow_tf32, matmul.allow_tf32 = by_old_name  # which PyTorch keeps beside the precisions
    for part, precision in precisions:
        part.fp32_precision = precision
    for part, name, value in others:
        setattr(part, name, value)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.mkldnn.deterministic = False


def set_to(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


CUDNN, MATMUL = torch.backends.cudnn, torch.backends.cuda.matmul
CHANGES: dict[str, tuple[torch.device, Callable[[], Any], str]] = {
    "TF32 of convolutions": (
        CUDA,
        set_to(CUDNN, "allow_tf32", False),
        "float32 convolutions, float32 recurrent layers",
    ),
    "TF32 of matrix products": (CUDA, set_to(MATMUL, "allow_tf32", True), "float32 matrix products"),
    "TF32 of convolutions by the new name": (CUDA, set_to(CUDNN.conv, "fp32_precision", "ieee"),
    "float32 convolutions"),
    "TF32 of recurrent layers": (CUDA, set_to(CUDNN.rnn, "fp32_precision", "ieee"), "float32 recurrent layers"),
    "cuDNN off": (CUDA, set_to(CUDNN, "enabled", False), "cudnn.enabled"),
    "benchmark": (CUDA, set_to(CUDNN, "benchmark", True), "cudnn.benchmark"),
    "benchmark_limit": (CUDA, set_to(CUDNN, "benchmark_limit", 3), "cudnn.benchmark_limit"),
    "deterministic": (CUDA, set_to(CUDNN, "deterministic", True), "cudnn.deterministic"),
    "deterministic algorithms": (CUDA, lambda: torch.use_deterministic_algorithms(True), "deterministic algorithms"),
    "deterministic algorithms on a CPU": (
        CPU,
        lambda: torch.use_deterministic_algorithms(True),
        "deterministic algorithms",
    ),
    "filled memory": (
        CPU,
        set_to(torch.utils.deterministic, "fill_uninitialized_memory", False),
        "filled uninitialized memory",
    ),
    "float16 reductions": (CUDA, set_to(MATMUL, "allow_fp16_reduced_precision_reduction", False), "float16 reductions"),
    "bfloat16 reductions": (CUDA, set_to(MATMUL, "allow_bf16_reduced_precision_reduction", False),
    "bfloat16 reductions"),
    "float16 accumulation": (CUDA, set_to(MATMUL, "allow_fp16_accumulation", True), "float16 accumulation"),
    "flash attention": (CUDA, lambda: torch.backends.cuda.enable_flash_sdp(False), "attention"),
    "threads": (CPU, lambda: torch.set_num_threads(torch.get_num_threads() + 1), "threads"),
    "oneDNN's convolutions": (CPU, set_to(torch.backends.mkldnn.conv, "fp32_precision", "bf16"),
    "float32 convolutions"),
    "oneDNN deterministic": (CPU, set_to(torch.backends.mkldnn, "deterministic", True), "oneDNN deterministic"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_of_pytorchs(name: str) -> None:
    device, change, told = CHANGES[name]
    before, digest = settings_of(device), settings_digest(device)
    assert settings_of(device) == before and settings_digest(device) == digest
    change()
    after = settings_of(device)
    names = told.split(", ")
    assert {key for key in before if before[key] != after[key]} == set(names)
    assert settings_digest(device) != digest
    assert changed_settings(before, after) == ", ".join(f"{n} {before[n]} instead of {after[n]}" for n in names)


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings_of(CUDA)
    monkeypatch.setenv(name, "1")
    assert settings_of(CUDA) == {**before, name: "1"}
    assert changed_settings(before, settings_of(CUDA)) == f"{name} unset instead of 1"


@pytest.mark.parametrize("name", ["monet_like", "torch", "python", "cudnn"])
def test_a_version(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings_digest(CUDA)
    if name == "cudnn":
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 1)
    else:
        versions = settings.versions()
        monkeypatch.setattr(settings, "versions", lambda: {**versions, name: "1"})
    assert settings_digest(CUDA) != before


def test_compiled_kernels_twins_and_other_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(b"one")
    monkeypatch.setattr(settings, "library_path", lambda _: library)
    monkeypatch.setattr(ops, "available", lambda _: True)
    found = {settings_of(device)["kernels"] for device in (CPU, CUDA)}
    library.write_bytes(b"another")
    found.add(settings_of(CPU)["kernels"])
    monkeypatch.setattr(ops, "has", lambda name, _: name == "cudnn_convolution")
    found.add(settings_of(CUDA)["kernels"])
    monkeypatch.setattr(ops, "available", lambda _: False)
    found.add(settings_of(CPU)["kernels"])
    assert "twins" in found and len(found) == 4, found


def test_variables_of_gpus_say_nothing_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings_of(CPU)
    monkeypatch.setenv("CUDNN_CONV_WSCAP_DBG", "512")
    assert settings_of(CPU) == before


@pytest.mark.slow
def test_the_cache_keeps_profiles_and_plans_of_other_settings_apart() -> None:
    def plan() -> tuple[int, int]:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            monet_like.auto_schedule(model, torch.randn(8, 64), memory_budget="120%", mode="normal", effort="full")
        return len(list(cache_folder().glob("profile_*.json"))), len(list(cache_folder().glob("plan_*.json")))

    assert plan() == (1, 1)
    assert plan() == (1, 1)
    torch.backends.mkldnn.deterministic = True
    assert plan() == (2, 2)
    torch.backends.mkldnn.deterministic = False
    assert plan() == (2, 2)


def test_a_profile_of_other_settings_is_measured_anew_and_said() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    request = Request(model, ((torch.randn(8, 64),), {}), "normal")
    saved: list[Profile] = []
    profile = prepare(request, CPU, save_profile=saved.append).profile
    assert profile.settings == settings_of(CPU)
    assert prepare(request, CPU, profile=profile, save_profile=saved.append).profile.costs == profile.costs
    unknown = replace(profile, settings={})  # by an earlier version
    assert prepare(request, CPU, profile=unknown, save_profile=saved.append).profile.costs == profile.costs
    assert len(saved) == 1
    other = replace(profile, settings={**profile.settings, "oneDNN deterministic": "True"})
    with pytest.warns(
        UserWarning, match="settings, .*: oneDNN deterministic True instead of False. All is measured anew"
    ):
        anew = prepare(request, CPU, profile=other, save_profile=saved.append).profile
    assert anew.settings == profile.settings and saved[1:] == [anew]


def test_settings_come_back_from_a_file(tmp_path: Path) -> None:
    profile = Profile("cpu: x", {}, "", {}, {"threads": "2"})
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile
