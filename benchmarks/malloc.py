"""What glibc's malloc does with what is freed, while memory is measured and while time is."""

from __future__ import annotations

import ctypes

#: Environment under which malloc gives back at once what is freed.
EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
#: Environment under which malloc keeps for the next what is freed, as CUDA's caching allocator does, and jemalloc and
#: tcmalloc, which PyTorch's tuning guide advises on CPUs. glibc's own ways give the activations of every step back to
#: the system and have it make new pages in the next: 59,000 of them, and 0.1 s of the kernel's time, in a step of
#: ResNet-50 at batch 12. The clocks of single operators do not see that.
KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1", "MALLOC_TOP_PAD_": str(64 * 2**20)}


def keep_freed() -> None:
    """`KEEPING`, from now on."""
    libc = ctypes.CDLL(None)
    for parameter, count in zip((-4, -1, -2), KEEPING.values(), strict=True):  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
        libc.mallopt(parameter, int(count))
