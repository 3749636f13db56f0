"""What share of a GPU's datasheet rates PyTorch's operators reach: measured on one card, taken for all.

An operator on a GPU is taken to last ``launch + arithmetic * F / R + traffic * B / W``: F floating-point operations at
the datasheet's rate R, and B bytes that it reads and writes once at the datasheet's bandwidth W. ``paces.csv`` has the
factors of each kind of operator. They were fitted to 2,113 operators that were timed alone on an H200 (PyTorch 2.11,
float32 in PyTorch's default layout and precisions, two decoders in bfloat16): ``python -m benchmarks.operator_paces
table`` prints factors and errors, `benchmarks/results/cuda-nvidia-h200/operator_paces.md` has them. No other card was
measured, nor convolutions with the channels last or in 16 bits.

What the larger factors are:

* **Convolutions** in the default layout run near the tensor cores' rate, but inputs, filters and results are transposed
  before and after ("NVIDIA Deep Learning Performance: Convolutional Layers User's Guide", section Tensor Layout). With
  one point and no stride they are products without transposing, and slower ones.
* **Depthwise convolutions** run without tensor cores at 1/27 of FP32's rate and less.
* **Batch norm** of cuDNN and of PyTorch reads its input twice, and has a block of threads for every channel: with fewer
  channels than the card has room for, a part of it is idle.
* **Products of 16-bit floats** whose rows are no multiple of 16 bytes (a vocabulary of 50,257 words) take slow kernels.
* **Floats of two widths** in one operator: PyTorch converts element by element, without vectors.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..ops.max_pool import pair


@dataclass(frozen=True, slots=True)
class Pace:
    """How an operator's time follows from a card's datasheet.

    Attributes:
        traffic: times as long as reading and writing all once at the datasheet's bandwidth.
        arithmetic: times as long as its products at the datasheet's rate.
        launch_seconds: what is added.
        blocks: of threads that a multiprocessor needs before all of the bandwidth is used, if there is one for every
            channel; 0: there are as many as the card needs.
    """

    traffic: float
    arithmetic: float
    launch_seconds: float
    blocks: float = 0.0


def _rows() -> Iterator[tuple[str, Pace, list[str]]]:
    """Of every kind of operator its name, its pace, and the operators that are of this kind by their name alone."""
    with Path(__file__).with_name("paces.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            numbers = (float(row[name]) for name in ("traffic", "arithmetic", "launch_seconds", "blocks"))
            yield row["kind"], Pace(*numbers), [op for op in row["operators"].split("|") if op]


#: Of every kind of operator; see `kind_of`.
PACES: Mapping[str, Pace] = {kind: pace for kind, pace, _ in _rows()}
_NAMED = {op: kind for kind, _, operators in _rows() for op in operators}
#: Names of poolings whose window and stride decide, and where these stand among the arguments.
_POOLINGS = {
    "aten.max_pool2d_with_indices.default": ("max pooling", 1),
    "monet_like.max_pool2d_with_offsets.default": ("our max pooling", 1),
    "monet_like.max_pool2d_offsets_backward.default": ("our max pooling's backward", 3),
}
_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "_grouped_mm"))
_CONVERSION, _MEAN = "aten._to_copy.default", "aten.mean.dim"
#: Elements of a row of which the mean is taken as fast as memory allows; measured were 49 and 2,048.
_LONG_ROW = 256


def kind_of(op: str, args: Sequence[Any], result: Any) -> str:
    """The kind of an operator, a key of `PACES`, by its name, all its arguments (shapes and dtypes alone) and its
    result.
    """
    if op in _NAMED:
        return _NAMED[op]
    if op in _POOLINGS:
        return _pooling(op, args)
    if op == _MEAN:
        return "mean of planes" if args[0].numel() < _LONG_ROW * result.numel() else "reduction"
    if "attention" in op:
        return "attention"
    if op == "aten.convolution.default":
        return _convolution(args[0], args[1], args[3], "input" if args[6] else "", args[8])
    if op == "aten.convolution_backward.default":
        of_input = args[10][0]
        of_transposed = "" if args[7] else "input"  # its gradient of the input is a convolution forward
        return _convolution(args[0], args[2], args[4], of_transposed if of_input else "weight", args[9])
    tensors = [leaf for leaf in tree_leaves((list(args), result)) if isinstance(leaf, torch.Tensor)]
    if op.split(".")[1] in _PRODUCTS:
        return _product([tensor for tensor in tensors if tensor.dim() > 1])
    widths = {tensor.element_size() for tensor in tensors if tensor.is_floating_point() and tensor.dim() > 0}
    narrowed = op == _CONVERSION and isinstance(result, torch.Tensor) and result.element_size() == 2
    if op.startswith("aten.") and len(widths) > 1 and not narrowed:
        return "elementwise, two widths"
    return "elementwise"


def is_known(op: str) -> bool:
    """Whether the kind of an operator is another than "elementwise" whatever its arguments are."""
    heavy = op.split(".")[1] in _PRODUCTS or "convolution" in op or "attention" in op
    return heavy or op in _NAMED or op in _POOLINGS or op == _MEAN


def _pooling(op: str, args: Sequence[Any]) -> str:
    name, first = _POOLINGS[op]
    window, stride = args[first], args[first + 1] or args[first]
    known = {((2, 2), (2, 2)): "2x2/2", ((3, 3), (2, 2)): "3x3/2"}.get((pair(window), pair(stride)))
    found = f"{name}, {known or 'other'}"
    return found if found in PACES else name if name in PACES else "elementwise"


def _convolution(data: torch.Tensor, filters: torch.Tensor, stride: Sequence[int], wanted: str, groups: int) -> str:
    """The kind of a convolution.

    Args:
        data: one of the tensors that have its layout.
        wanted: the gradient that is computed: ``input``, ``weight`` or, in the forward, "". A transposed forward is a
            gradient of the input.
    """
    purpose = f" for the {wanted}" if wanted else ""
    strided = any(step != 1 for step in stride)
    if groups > 1 and filters.shape[1] == 1:
        found = f"depthwise convolution{purpose}{', strided' if strided else ''}"
        return found if found in PACES else f"depthwise convolution{purpose}"
    if is_channels_last(data):
        return "convolution, channels last"
    of_volumes = " of volumes" if filters.dim() == 5 else ""
    if set(filters.shape[2:]) == {1} and not strided:
        return f"convolution{of_volumes} 1x1{purpose if wanted == 'weight' else ''}"
    return f"convolution{of_volumes}{purpose}"


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether channels are the innermost dimension; not, where any layout is that one and the default, too."""
    if tensor.is_contiguous() or tensor.dim() not in (4, 5):
        return False
    layout = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return tensor.is_contiguous(memory_format=layout)


def _product(factors: Sequence[torch.Tensor]) -> str:
    """``factors``: the matrices, result included."""
    if any(matrix.element_size() != 2 for matrix in factors):
        return "product"
    rows = [step for matrix in factors for step in matrix.stride()[-2:] if step > 1]
    return "product, 16 bits, odd rows" if any(2 * row % 16 for row in rows) else "product, 16 bits"


def channels_of(kind: str, args: Sequence[Any]) -> int:
    """The channels that have a block of threads each; 0: this kind has no such blocks, or its input's layout is
    another.
    """
    if not PACES[kind].blocks or args[0].dim() < 2 or is_channels_last(args[0]):
        return 0
    return int(args[0].shape[1])
