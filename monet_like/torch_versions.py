"""The releases of PyTorch that the tests run with, and a warning where a newer one is installed."""

from __future__ import annotations

import functools

from .errors import warn_caller

#: All tests pass with these. CI runs the essential ones with the oldest, and with the newest that the package index
#: has.
TESTED = ((2, 11), (2, 14), (2, 15))


def release() -> tuple[int, int]:
    """Major and minor version of the installed PyTorch."""
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def untested() -> str:
    """Says that the installed PyTorch is newer than all tested ones, and what to do; "" if it is not."""
    if release() <= max(TESTED):
        return ""
    newest, tested = _named(release()), ", ".join(map(_named, TESTED))
    return (
        f"PyTorch {newest} is newer than those that monet_like is tested with ({tested}): memory may differ from its "
        f'prediction, and steps may be refused; install "torch<{_named((max(TESTED)[0], max(TESTED)[1] + 1))}", or a '
        "newer monet_like"
    )


@functools.cache  # once in a process
def warn_if_untested() -> None:
    """Warn where the installed PyTorch is newer than all tested ones."""
    if said := untested():
        warn_caller(said)


def _named(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
