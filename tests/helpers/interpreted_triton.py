"""Makes Triton's interpreter run Liger's kernels on CPU tensors, in a process that was started with
``TRITON_INTERPRET=1``.

The interpreter of Triton 3.8 differs from its compiler in four things that matter here:

* Numbers reach a kernel as Python's floats; from the compiler as float32.
* It multiplies the bits of bfloat16 as integers, and rounds to bfloat16 towards zero; GPUs round to the nearest.
* It has none of CUDA's libdevice functions, of which there is one here, rsqrt. Triton has a function of its own by that
  name, which Liger takes on other devices, too.
* It copies operands to the host and keeps them in reference cycles, which would be measured as memory of the step;
  operands are on the host already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def prepare() -> None:
    """Change the interpreter, and import Liger; once in a process."""
    import numpy as np
    from triton import language
    from triton.runtime import interpreter

    converted, convert_bits = interpreter._implicit_cvt, interpreter._convert_float
    operate = interpreter.InterpreterBuilder.binary_op

    def as_compiled(argument: Any) -> Any:
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), language.float32)
            return language.tensor(handle, language.float32)
        return converted(argument)

    def widened(bits: Any) -> Any:
        return torch.from_numpy(np.ascontiguousarray(bits).view(np.int16)).view(torch.bfloat16).float().numpy()

    def rounded(values: Any) -> Any:
        given = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
        return given.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)

    def convert(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) == (language.float32, language.bfloat16):
            return rounded(values)
        return convert_bits(values, source, target, mode)

    def binary(self: Any, left: Any, right: Any, function: Callable[..., Any]) -> Any:
        if left.dtype.scalar != language.bfloat16:
            return operate(self, left, right, function)
        return interpreter.TensorHandle(rounded(function(widened(left.data), widened(right.data))), language.bfloat16)

    interpreter._implicit_cvt = as_compiled
    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.binary_op = binary
    interpreter.GridExecutor._init_args_hst = lambda self, args, kwargs: (args, kwargs)
    interpreter.GridExecutor._restore_args_dev = lambda self, *_: None
    from liger_kernel.ops import fused_add_rms_norm, rms_norm

    for module in (rms_norm, fused_add_rms_norm):
        module.rsqrt = lambda x: language.math.rsqrt(x)  # which the interpreter replaces while a kernel runs
