"""The emulated kernels in a process of their own: loads them in place of the compiled CPU kernels, and steers the
emulator.

A pytest plugin. The operators of `torch.ops.monet_like` run the CUDA sources on CPU tensors from then on; all tensors
of the process lie between guard zones.
"""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path
from typing import Any

import torch

#: The folder of the library to load; `python -m tests.cuda_emulator` sets it.
FOLDER = Path(os.environ["MONET_LIKE_EMULATED"])

import monet_like.build as kernels_build  # noqa: E402

_NAME = kernels_build.library_path().name


def _library_path(part: str = "kernels") -> Path:
    return FOLDER / f"monet_like_{part}.so"


kernels_build.library_path = _library_path
torch.set_num_threads(1)  # blocks and threads of the emulated GPU share one
torch.ops.load_library(str(FOLDER / _NAME))
_emulator = ctypes.CDLL(str(FOLDER / _NAME))
_emulator.emu_launches.restype = ctypes.c_char_p

#: Byte that fills new tensors: from it the emulator knows that nothing was written.
UNWRITTEN = 0xA5
#: Bytes of a tensor up to which races are looked for.
RACES = 1 << 20


def configure(order: str = "forward", fill: int = UNWRITTEN, blocks: int = 0, races: int = RACES) -> None:
    """Sets how kernels run from now on.

    Args:
        order: in which order threads and blocks run: ``forward``, ``reverse``, ``random:SEED``.
        fill: byte that fills new tensors; only `UNWRITTEN` finds reads of what was never written.
        blocks: most blocks of a grid whose threads stride; 0: as many as the kernel wants.
        races: bytes of a tensor up to which races are looked for.
    """
    _emulator.emu_configure(order.encode(), fill, ctypes.c_int64(blocks), ctypes.c_int64(races))


def make_mistake(*, barrier: str = "", mutant: int = 0) -> None:
    """Leaves out a barrier, given as ``FILE:LINE``, or turns the comparison of this number into a wrong one; none:
    neither.
    """
    _emulator.emu_break(barrier.encode(), mutant)


def launches() -> dict[str, int]:
    """How often each `__global__` function has been launched in this process."""
    return {
        name: int(count) for name, count in (line.split() for line in _emulator.emu_launches().decode().splitlines())
    }


def sources() -> dict[str, Any]:
    """Kernels, barriers and mutants of the library, as `transform.Sources` has them."""
    found: dict[str, Any] = json.loads((FOLDER / "sources.json").read_text())
    return found
