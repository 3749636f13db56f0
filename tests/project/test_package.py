"""What is built for others to install: a source distribution that is whole, and a wheel made from it that works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from monet_like import build
from monet_like._version import __version__

ROOT = Path(__file__).parents[2]
SOLUTION = "solutions/solution_resnet50_184_inplace_conv_multiway_newnode_10.00.json"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel built from it; without a compiler, which must not stop the build."""
    folder = tmp_path_factory.mktemp("package")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout: what belongs to the source is not known")
    for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.splitlines()):
        target = folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"CXX": "no-such-compiler"}
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(folder / "dist"),
        str(folder / "source"),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (source,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return source, wheel


def test_the_citation_is_of_this_version() -> None:
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {__version__}" in lines and "license: BSD-3-Clause" in lines


@pytest.mark.slow
def test_the_source_distribution_has_all_that_a_checkout_has(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    left_out = {name for name in tracked if name and (ROOT / name).exists()} - names
    assert left_out <= {".gitignore"}
    assert {"csrc/tensor.h", "tests/replay/test_replay.py", "monet_like/py.typed", SOLUTION} <= names


@pytest.mark.slow
def test_the_wheel_has_what_is_used_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        names = set(archive.namelist())
        (info,) = (name for name in names if name.endswith("METADATA"))
        meta = archive.read(info).decode()
    assert {
        "monet_like/py.typed",
        "monet_like/csrc/tensor.h",
        "monet_like/csrc/cuda/masks.cu",
        f"monet_like/{SOLUTION}",
    } <= names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"monet_like"}
    required = [line for line in meta.splitlines() if line.startswith("Requires-Dist: ") and "extra ==" not in line]
    assert len(required) > 8 and all("<" in line and ">=" in line for line in required)
    assert "License-Expression: BSD-3-Clause" in meta and any(name.endswith("/LICENSE") for name in names)


@pytest.mark.slow
def test_the_wheel_works_where_there_is_no_checkout(built: tuple[Path, Path], tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(built[1])]
    subprocess.run(pip, check=True, capture_output=True)
    environment = os.environ | {"PYTHONPATH": str(target), "PYTHONSAFEPATH": "1"}
    code = (
        "from monet_like.files import shipped_folder as f; import monet_like; print(monet_like.__file__); "
        "print(*sorted(p.name for p in f('solutions').glob('solution_*.json')), f('csrc') / 'tensor.h', f('tests'))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    where, found = done.stdout.splitlines()
    assert where == str(target / "monet_like" / "__init__.py")
    assert found.split()[-2:] == [str(target / "monet_like" / "csrc" / "tensor.h"), "None"]
    script = target / "bin" / "monet-like"
    shown = subprocess.run(
        [str(script), "inspect", str(target / "monet_like" / SOLUTION)], env=environment, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    assert "torchvision.models.resnet50()" in shown.stdout


#: Python interpreters whose PyTorch is another one, separated by ":", for which the kernels' wheel is tested, too.
OTHERS = [Path(path) for path in os.environ.get("MONET_LIKE_PYTHONS", "").split(":") if path]
STEP = """
import copy, torch, monet_like, monet_like.ops
from pathlib import Path
assert Path(monet_like.__file__).is_relative_to(Path.cwd()), "the checkout's package"
assert monet_like.ops.available("cpu"), monet_like.ops.status()
torch.manual_seed(0)
net = torch.nn.Sequential(*(layer for _ in range(6) for layer in (torch.nn.Conv2d(4, 4, 3, padding=1),
                          torch.nn.BatchNorm2d(4), torch.nn.ReLU())))
plain, x = copy.deepcopy(net), torch.randn(16, 4, 32, 32)
model = monet_like.auto_schedule(net, memory_budget="60%", exact=True)
plain(x).square().mean().backward()
model(x).square().mean().backward()  # planned
net.zero_grad()
with torch.profiler.profile() as seen:
    model(x).square().mean().backward()
assert any(event.key.startswith("monet_like::") for event in seen.key_averages())
for expected, found in zip(plain.parameters(), net.parameters(), strict=True):
    assert torch.equal(expected.grad, found.grad)
print("PyTorch", torch.__version__)
"""


@pytest.fixture(scope="module")
def with_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with the kernels that are compiled here."""
    if not build.is_loadable():
        pytest.skip("the kernels are not compiled")
    folder = tmp_path_factory.mktemp("kernels")
    for name in ("monet_like", "csrc", "solutions"):
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("build", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, folder / "source")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", f"--outdir={folder}", str(folder / "source")]
    done = subprocess.run(
        command, env=os.environ | {"MONET_LIKE_KERNELS_LATER": "1"}, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("python", [Path(sys.executable), *OTHERS], ids=str)
def test_a_wheel_trains_by_its_kernels_in_any_torch_and_without_a_compiler(
    with_kernels: Path, python: Path, tmp_path: Path
) -> None:
    """Its operators pass their tests there, in a folder without the checkout's package."""
    assert "-py3-none-" in with_kernels.name
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", f"--target={tmp_path}", str(with_kernels)]
    subprocess.run(pip, check=True, capture_output=True)
    environment = os.environ | {
        "PYTHONPATH": str(tmp_path),
        "PATH": "/nonexistent",
        "MONET_LIKE_CACHE": str(tmp_path / "c"),
    }
    done = subprocess.run([str(python), "-c", STEP], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "PyTorch" in done.stdout
    if python in OTHERS:
        for name in ("tests", "benchmarks", "scripts", "csrc"):
            shutil.copytree(ROOT / name, tmp_path / name)
        shutil.copy2(ROOT / "pyproject.toml", tmp_path)
        tests = [str(python), "-m", "pytest", "-n", "0", "tests/ops"]
        done = subprocess.run(tests, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
