"""Builds the kernels while the package is installed, if a compiler and torch are there; all else is pyproject.toml.

The build is never required: without it the package runs on plain-torch twins, and
`python -m monet_like.build` makes up for it later. MONET_LIKE_KERNELS_LATER=1 leaves it out, as install.sh does: then a
wheel has the kernels that are there. So a wheel for all PyTorch from 2.11 on, all Python and these GPUs is made:

    MONET_LIKE_CUDA=1 TORCH_CUDA_ARCH_LIST="8.0;8.6;8.9;9.0;10.0;12.0" python -m monet_like.build
    MONET_LIKE_KERNELS_LATER=1 python -m build --wheel

It has 10 MB, unpacked 41 MB, of which the CUDA kernels are 35 MB.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
LIBRARIES = ROOT / "monet_like" / "lib"
#: The first glibc of distributions whose libstdc++ has these symbols (PEP 600's policies).
GLIBC_OF_LIBSTDCXX = {24: 28, 28: 31, 29: 34, 30: 35, 31: 38, 32: 38, 33: 39, 34: 41}


class BuildWithKernels(build_py):
    """build_py, then the kernels: into the source tree, and from there into the wheel."""

    def run(self) -> None:
        super().run()
        later = os.environ.get("MONET_LIKE_KERNELS_LATER")
        libraries = sorted(LIBRARIES.glob("monet_like_*.*")) if later else _compile_kernels()
        if self.editable_mode:
            return  # the package is used where it stands
        package = Path(self.build_lib) / "monet_like"
        # The sources travel with the package, so that an installed one can build its kernels later; so do schedules.
        # `files.shipped_folder` finds both.
        for folder in ("csrc", "solutions"):
            if (ROOT / folder).is_dir():
                shutil.copytree(ROOT / folder, package / folder, dirs_exist_ok=True)
        target = package / "lib"
        target.mkdir(parents=True, exist_ok=True)
        for path in libraries:
            shutil.copy2(path, target / path.name)


class PlatformDistribution(Distribution):
    """A wheel of this package holds a shared library: it is for one platform."""

    def has_ext_modules(self) -> bool:
        return True


class Wheel(bdist_wheel):
    """The libraries use PyTorch's stable ABI, or none, and no header of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        *_, platform = super().get_tag()
        needed = _glibc(Path(self.bdist_dir) / "monet_like" / "lib")
        return "py3", "none", platform.replace("linux_", f"manylinux_2_{needed}_", 1) if needed else platform


def _glibc(folder: Path) -> int:
    """The minor version of glibc 2 that libraries in a folder need, at least 17; 0: none, or not for glibc."""
    texts = [path.read_bytes() for path in folder.glob("*.so")]
    found = [int(n) for text in texts for n in re.findall(rb"GLIBC_2\.(\d+)", text)]
    newest = max((int(n) for text in texts for n in re.findall(rb"GLIBCXX_3\.4\.(\d+)", text)), default=0)
    of_cxx = next((glibc for symbols, glibc in GLIBC_OF_LIBSTDCXX.items() if newest <= symbols), 0)
    return max(17, of_cxx, *found) if found else 0


def _compile_kernels() -> list[Path]:
    """The libraries and the note on what they were made from; nothing, and a printed reason, where they cannot be
    compiled.
    """
    sys.path.insert(0, str(ROOT))
    try:
        from monet_like import build
    finally:
        sys.path.remove(str(ROOT))
    try:
        return build.build()
    except (build.KernelBuildError, OSError) as error:  # a missing compiler must not stop the installation
        later = "install with --no-build-isolation or run: python -m monet_like.build"
        print(f"monet_like: kernels not built ({error}); {later}", file=sys.stderr)
        return []


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": Wheel}, distclass=PlatformDistribution)
