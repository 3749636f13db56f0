"""How the kernels are built: what is compiled against what, and what is said where that cannot be done."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from monet_like import build, toolchain


def hide_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a CUDA toolkit."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(toolchain, "_USUAL", "/nonexistent")
    monkeypatch.setattr(toolchain, "_cuda_from_pip", lambda: iter(()))


def fake_nvcc(root: Path, release: str | None) -> str:
    """A compiler that says that it is of this CUDA."""
    nvcc = root / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True, exist_ok=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V0'\n")
    nvcc.chmod(0o755)
    return str(nvcc)


def test_only_the_cudnn_that_torch_runs_is_compiled_against(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDNN_HOME", str(tmp_path))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92600)
    root = Path(torch.__file__).parent
    assert toolchain.find_cudnn(root) is None
    for folder in ("include", "lib64"):
        (tmp_path / folder).mkdir()
    (tmp_path / "include" / "cudnn_cnn.h").write_text("cudnnConvolutionBackwardFilter(cudnnHandle_t handle")
    (tmp_path / "include" / "cudnn_version.h").write_text("#define CUDNN_MAJOR 8\n")
    library = tmp_path / "lib64" / "libcudnn.so.9"
    library.touch()
    assert toolchain.find_cudnn(root) is None
    (tmp_path / "include" / "cudnn_version.h").write_text("#define CUDNN_MAJOR 9\n")
    assert toolchain.find_cudnn(root) == toolchain.Cudnn(tmp_path / "include", library)
    (tmp_path / "include" / "cudnn_cnn.h").write_text("nothing but graphs")
    assert toolchain.find_cudnn(root) is None


def test_missing_compiler_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(build.KernelBuildError, match=r"looked for g\+\+, c\+\+ on the PATH.*apt-get install g\+\+"):
        build.build()


def test_cuda_asked_for_without_nvcc_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_nvcc(monkeypatch)
    monkeypatch.setenv("MONET_LIKE_CUDA", "1")
    with pytest.raises(
        build.KernelBuildError, match=r"cannot be compiled.*pip install 'monet_like\[kernels\]'.*CUDA 12 install"
    ):
        build.build()


def test_failing_compiler_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "cxx"
    compiler.write_text("#!/bin/sh\necho 'internal error: out of tea' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("MONET_LIKE_CUDA", "0")
    monkeypatch.setattr(build, "library_path", lambda part="kernels": tmp_path / "lib" / f"{part}.so")
    with pytest.raises(build.KernelBuildError, match=r"(?s)compiling failed.*out of tea"):
        build.build()


@pytest.mark.skipif(torch.version.cuda is None, reason="a torch without CUDA compiles none")
@pytest.mark.parametrize(("gpu", "asked", "compiled"), [(True, "", 1), (False, "", 0), (False, "1", 1), (True, "0", 0)])
def test_cuda_is_compiled_for_a_gpu_or_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpu: bool, asked: str, compiled: int
) -> None:
    """Without a GPU nobody waits for kernels that cannot run."""
    nvcc = fake_nvcc(tmp_path, torch.version.cuda)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("MONET_LIKE_CUDA", asked)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert toolchain.cuda_compiler(None) == (nvcc if compiled else None)


MAJOR = int((torch.version.cuda or "0").partition(".")[0])


@pytest.mark.skipif(torch.version.cuda is None, reason="a torch without CUDA compiles none")
def test_the_nvcc_of_torchs_cuda_is_taken_from_wherever_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Such as pip's, beside an older one on the PATH."""
    hide_nvcc(monkeypatch)
    assert toolchain.find_nvcc() is None
    folders = [tmp_path / name for name in ("home", "path", "usual", "pip")]
    monkeypatch.setattr(toolchain, "_cuda_from_pip", lambda: iter([folders[3]]))
    for number, setting in (
        (3, None),
        (2, None),
        (1, "PATH"),
        (0, "CUDA_HOME"),
    ):  # the earlier ones are looked at first
        if number == 2:
            monkeypatch.setattr(toolchain, "_USUAL", str(folders[2] / "bin"))
        if setting:
            monkeypatch.setenv(setting, str(folders[number] if number == 0 else folders[number] / "bin"))
        older = fake_nvcc(folders[number], f"{MAJOR - 1}.8")
        assert toolchain.find_nvcc() == (older if number == 3 else str(folders[number + 1] / "bin" / "nvcc"))
        assert (
            toolchain.find_nvcc() is not None
            and fake_nvcc(folders[number], torch.version.cuda) == toolchain.find_nvcc()
        )


@pytest.mark.skipif(MAJOR < 13, reason="before CUDA 13 pip has no nvcc")
def test_pips_nvcc_is_wanted_where_kernels_are_and_no_compiler_fits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hide_nvcc(monkeypatch)

    def wanted(gpu: bool, asked: str = "") -> bool:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setenv("MONET_LIKE_CUDA", asked)
        return toolchain.nvcc_is_wanted()

    assert [wanted(True), wanted(False), wanted(False, "1"), wanted(True, "0")] == [True, False, True, False]
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    fake_nvcc(tmp_path, "12.8")
    assert wanted(True)
    fake_nvcc(tmp_path, "13.1")
    assert not wanted(True)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert not wanted(True)  # pip has none


@pytest.mark.skipif(MAJOR < 13, reason="the folder of CUDA 13")
def test_pips_cuda_is_found_and_its_runtime_is_linked_by_its_full_name(tmp_path: Path) -> None:
    folders = list(toolchain._cuda_from_pip())
    if not folders:
        pytest.skip("torch's CUDA is not from pip")
    assert folders[-1].name == f"cu{MAJOR}"
    linker, runtime = toolchain._cuda_runtime(str(tmp_path / "bin" / "nvcc"))
    assert linker == "-Xlinker" and Path(runtime) == folders[-1] / "lib" / f"libcudart.so.{MAJOR}"
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / Path(runtime).name).touch()
    assert toolchain._cuda_runtime(str(tmp_path / "bin" / "nvcc"))[1] == str(tmp_path / "lib64" / Path(runtime).name)


def test_progress_is_shown_while_files_are_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "csrc"
    for name in ("cpu/masks.cpp", "cpu/loops/masks.cpp", "plan/local_search.cpp", "arena/cpu.cpp"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("namespace {}\n")
    monkeypatch.setenv("MONET_LIKE_CUDA", "0")
    monkeypatch.setattr(build, "source_directory", lambda: source)
    monkeypatch.setattr(build, "library_path", lambda part="kernels": tmp_path / "lib" / f"{part}.so")
    build.build()
    assert "masks" not in capfd.readouterr().out
    build.build(force=True, progress=True)
    lines = capfd.readouterr().out.splitlines()
    assert sum(line.startswith("[") and " of 7, " in line for line in lines) == 7, lines
    assert any(line.endswith("kernels-masks.o") for line in lines)
    # What calls ATen is compiled in one file: again if one of its files is new or changed, and not otherwise.
    build.build(progress=True)
    assert ".o" not in capfd.readouterr().out
    (source / "cpu" / "swiglu.cpp").write_text("#error a file of operators\n")
    with pytest.raises(build.KernelBuildError, match="a file of operators"):
        build.build()
    (source / "cpu" / "swiglu.cpp").write_text("namespace {}\n")
    capfd.readouterr()
    build.build(progress=True)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.endswith(".o")]
    assert [line.split()[-1] for line in lines] == ["kernels-operators.o"]


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm lists what a library needs")
@pytest.mark.parametrize("part", ["kernels", "kernels_cuda", "search"])
def test_what_runs_in_every_torch_needs_no_cpp_function_of_it(part: str) -> None:
    """But those of its stable ABI, which are C functions."""
    library = build.library_path(part)
    if not library.exists():
        pytest.skip("not compiled")
    listed = subprocess.run(["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True)
    needed = [line.split()[-1] for line in listed.stdout.splitlines()]
    assert any(name.startswith("torch_") for name in needed) == (part != "search")
    assert not [name for name in needed if re.match(r"_ZN?K?(2at|3c10|5torch|5caffe)", name)]
