"""How the kernels are built: what is compiled against what, and what is said where that cannot be done."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from monet_like import build


def test_only_the_cudnn_that_torch_runs_is_compiled_against(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDNN_HOME", str(tmp_path))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92600)
    root = Path(torch.__file__).parent
    assert build._find_cudnn(root) is None
    for folder in ("include", "lib64"):
        (tmp_path / folder).mkdir()
    (tmp_path / "include" / "cudnn_cnn.h").write_text("cudnnConvolutionBackwardFilter(cudnnHandle_t handle")
    (tmp_path / "include" / "cudnn_version.h").write_text("#define CUDNN_MAJOR 8\n")
    library = tmp_path / "lib64" / "libcudnn.so.9"
    library.touch()
    assert build._find_cudnn(root) is None
    (tmp_path / "include" / "cudnn_version.h").write_text("#define CUDNN_MAJOR 9\n")
    assert build._find_cudnn(root) == build._Cudnn(tmp_path / "include", library)
    (tmp_path / "include" / "cudnn_cnn.h").write_text("nothing but graphs")
    assert build._find_cudnn(root) is None


def test_missing_compiler_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(build.KernelBuildError, match=r"looked for g\+\+, c\+\+ on the PATH.*apt-get install g\+\+"):
        build.build()


def test_cuda_asked_for_without_nvcc_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    monkeypatch.setenv("MONET_LIKE_CUDA", "1")
    monkeypatch.setattr(build, "find_cxx", lambda: "g++")
    with pytest.raises(build.KernelBuildError, match="CUDA kernels cannot be compiled"):
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
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {torch.version.cuda}, V0'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("MONET_LIKE_CUDA", asked)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert build._cuda_compiler(None) == (str(nvcc) if compiled else None)


def test_progress_is_shown_while_files_are_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "csrc"
    for name in ("ops.cpp", "cpu/masks.cpp", "cpu/loops/masks.cpp", "plan/local_search.cpp", "arena/cpu.cpp"):
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
