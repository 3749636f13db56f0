"""The only module that calls TorchInductor, whose interface below ``torch.compile`` is private.

A function over tensors of fixed shapes becomes one compiled graph. Nothing is traced by Dynamo and no guard is checked
when it runs: who calls it answers for shapes, strides and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..capture.captured import fake_mode
from ..errors import UsageError

#: Takes a list of tensors, which it empties, and returns fresh tensors.
Compiled = Callable[[list[Any]], Sequence[torch.Tensor]]


def check_inductor(device: torch.device) -> None:
    """Whether Inductor can compile for ``device``.

    Raises:
        UsageError: a tool is missing: a C++ compiler for the CPU, Triton for a GPU.
    """
    if device.type != "cpu":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise UsageError(
                f"backend 'inductor' needs Triton for {device.type}, which PyTorch does not find; "
                "install triton, or use backend='eager'"
            )
        return
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        tried = ", ".join(filter(None, config.cpp.cxx)) or "none"
        raise UsageError(
            f"backend 'inductor' needs a C++ compiler, and none runs here (tried: {tried}); "
            "install g++, name another in the environment variable CXX, or use backend='eager'"
        ) from None


def compile_function(function: Callable[..., list[torch.Tensor]], like: Sequence[torch.Tensor]) -> Compiled:
    """Compile ``function`` into generated kernels. Call the result without gradients and without autocast.

    Args:
        function: of as many tensors as ``like``; may call any ATen operator, and ``copy_`` into its arguments last.
        like: tensors of the shapes, strides, dtypes and device that it will be called with.

    Returns:
        The compiled function. Its results have the strides that ``function`` gives them.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = fake_mode()
    fakes = [mode.from_tensor(tensor, static_shapes=True) for tensor in like]
    with mode:
        graph = make_fx(function, decomposition_table=select_decomp_table())(*fakes)
    end: Any = graph.graph.output_node()
    # Results for the caller keep their strides; Inductor chooses the strides of all other tensors.
    end.meta["user_visible_output_idxs"] = list(range(len(end.args[0])))
    with config.patch({"triton.cudagraphs": False}):  # a CUDA graph would keep memory of its own
        compiled: Any = compile_fx_inner(graph, fakes, is_inference=True)
    return compiled
