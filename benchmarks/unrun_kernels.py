"""Inductor's code for the CPU without its kernels: the same buffers, allocated and freed at the same places.

What a step of compiled code allocates is decided by the Python wrapper that Inductor writes. Compiling its C++ kernels
takes minutes and changes none of it: a kernel writes into buffers that the wrapper gives it, and its own scratch memory
does not come from PyTorch's allocator. So for a peak the kernels are left out: each of them fills what it should write
with zeros. Products, convolutions and attention are PyTorch's operators and run as always. Values are wrong, which no
peak depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch


@dataclass
class Calls:
    """Calls of kernels.

    Attributes:
        count: how many there were.
        bytes: of the buffers that they were given.
    """

    count: int = 0
    bytes: int = 0


def _fills(argument_types: Sequence[str], calls: Calls) -> Callable[..., None]:
    """A kernel with arguments of these C++ types that writes zeros to what they do not declare constant."""
    written = [k for k, kind in enumerate(argument_types) if "*" in kind and not kind.startswith("const ")]

    def kernel(*arguments: Any) -> None:
        calls.count += 1
        calls.bytes += sum(argument.nbytes for argument in arguments if isinstance(argument, torch.Tensor))
        for place in written:
            arguments[place].zero_()

    return kernel


@contextmanager
def unrun_kernels() -> Iterator[Calls]:
    """What Inductor compiles for the CPU within has no kernels; code that was compiled before is not changed.

    Yields:
        The calls of these kernels from now on.
    """
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache

    calls = Calls()

    def made(_: AsyncCompile, argument_types: list[str], source: str) -> Callable[..., None]:
        return _fills(argument_types, calls)

    PyCodeCache.cache_clear()
    caches = torch._functorch.config.patch(enable_autograd_cache=False)
    scalar = config.patch({"fx_graph_cache": False, "cpp.simdlen": 1})  # vector code would be written for nobody
    with caches, scalar, patch.object(AsyncCompile, "cpp_pybinding", made):
        yield calls
    PyCodeCache.cache_clear()
