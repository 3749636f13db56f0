"""Builds the kernels while the package is installed, if a compiler and torch are there; all else is pyproject.toml.

The build is never required: without it the package runs on plain-torch twins, and
`python -m monet_like.build` makes up for it later. MONET_LIKE_KERNELS_LATER=1 leaves it out, as install.sh does.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildWithKernels(build_py):
    """build_py, then the kernels: into the source tree, and from there into the wheel."""

    def run(self) -> None:
        super().run()
        libraries = [] if os.environ.get("MONET_LIKE_KERNELS_LATER") else _compile_kernels()
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


setup(cmdclass={"build_py": BuildWithKernels}, distclass=PlatformDistribution)
