"""Convolutions by other algorithms: the input gradient without the input, matrix products, im2col, cuDNN's algorithms.

For the input gradient PyTorch reads only the shape of a convolution's input. On a CPU, with row-major tensors, a number
that is expanded to that shape serves as well: the same operator, the same bits, and a copy of that size while it runs.
The input gradient is also a transposed convolution (for a transposed one, a plain one), in any layout and without the
copy. On CUDA the same kernels compute it. On a CPU oneDNN, or PyTorch in its place, may add in another order, so it
takes the word ``conv``; so does a depthwise convolution on CUDA, whose gradient has a kernel of PyTorch's own
(``use_cudnn`` and ``is_depthwise`` in PyTorch's Convolution.cpp) and whose transposed convolution is cuDNN's.

``conv`` also admits forwards that add in another order and agree only up to rounding: a 1x1 convolution as a matrix
product over the pixels of each image, and im2col.

On CUDA, ``algorithms`` admits forward and both gradients by each of cuDNN's algorithms, which agree up to rounding.
Each has a workspace of its own, from nothing to many times the input, and only measuring tells which is fastest.
PyTorch chooses for speed and knows no budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..ir.mode import ALGORITHMS
from ..ir.program import Call, Ref, Task
from ..ops.convolution import FORWARD_ALGORITHMS, INPUT_ALGORITHMS, WEIGHT_ALGORITHMS
from .calls import Calls
from .editor import Editor

CONVOLUTION = "aten.convolution.default"
BACKWARD = "aten.convolution_backward.default"


def offer(editor: Editor) -> None:
    """Offer ways for input gradients and, for ``conv``, other algorithms for 2-d convolutions in the default layout."""
    for slot, way, call in list(editor.find_slots(BACKWARD)):
        if call.args[-1] == [True, False, False]:
            (out,) = way.writes
            by_shape = _by_shape(editor, way.calls[:-1], call, out)
            if by_shape is not None:
                editor.add_way(slot, by_shape, "conv.shape_only")
            if (turned := input_gradient(editor, way.calls[:-1], call, out)) is not None:
                same = editor.device.type == "cuda" and not is_depthwise(editor, way)
                word = "" if same else "conv"
                editor.add_way(slot, (*way.calls[:-1], turned), "conv.transposed", word=word)
    for task, call in list(editor.find(CONVOLUTION)):
        _forward(editor, task, call)


def _forward(editor: Editor, task: Task, call: Call) -> None:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = call.args
    (out,) = task.writes
    if len(editor.metas[out].shape) != 4 or not _plain(editor, x, weight, Ref(out)):
        return
    if transposed or groups != 1:
        return
    size = editor.metas[weight.name].shape
    if size[2:] == (1, 1) and set(stride) == {1} and set(padding) == {0} and bias is None:
        _matmul(editor, task, x, weight, out)
    elif set(dilation) == {1}:
        args = (x, weight, size[2:], bias, stride, padding)
        im2col = Call("aten._slow_conv2d_forward.default", args, (), (Ref(out),))
        editor.add(task, (im2col,), (out,), "conv.im2col", word="conv", runs=task.runs)


def _by_shape(editor: Editor, before: Sequence[Call], call: Call, out: int) -> Calls | None:
    """The input gradient with an expanded number in place of the input; None if PyTorch might choose another kernel.

    In other layouts PyTorch looks at the input's strides to choose one.
    """
    grad, x, weight, *rest = call.args
    x_meta, known = editor.meta_of(x), (editor.meta_of(weight), editor.metas[out])
    if editor.device.type != "cpu" or x_meta is None or not all(m and m.contiguous for m in (x_meta, *known)):
        return None
    calls = Calls(before)
    calls.append(replace(call, args=(grad, calls.one_number(x_meta), weight, *rest)))
    return calls if editor.results(calls)[Ref(out)] == editor.metas[out] else None


def input_gradient(editor: Editor, before: Sequence[Call], call: Call, out: int) -> Call | None:
    """The input gradient of a convolution as a convolution that writes ``out``; None if no convolution computes it.

    Args:
        before: calls that make what ``call`` reads.
        call: to ``convolution_backward``.
    """
    grad, _, weight, _, stride, padding, dilation, transposed, _, groups, _ = call.args
    wanted = editor.metas[out]

    def turned(rest: list[int]) -> Call:
        options = (stride, padding, dilation, not transposed, rest, groups)
        return Call(CONVOLUTION, (grad, weight, None, *options), (), (Ref(out),))

    made = editor.result((*before, turned([0] * len(stride))))
    # A transposed convolution is told how many cells at the far end the strides have skipped.
    skipped = [want - got for want, got in zip(wanted.shape[2:], made.shape[2:], strict=True)]
    return turned(skipped) if editor.result((*before, turned(skipped))) == wanted else None


def is_depthwise(editor: Editor, task: Task) -> bool:
    """Whether a task is a depthwise convolution, with a group for every channel, its transpose, or a gradient of it."""
    *before, call = task.calls
    filters, groups = (call.args[1], call.args[8]) if call.op == CONVOLUTION else (call.args[2], call.args[9])
    return groups > 1 and editor.seen(before, filters).shape[1] == 1


def _plain(editor: Editor, *found: Any) -> bool:
    """Whether these are whole contiguous tensors."""
    metas = [editor.meta_of(ref) for ref in found]
    return all(meta is not None and meta.contiguous for meta in metas)


def _matmul(editor: Editor, task: Task, x: Ref, weight: Ref, out: int) -> None:
    batch, channels, *pixels = editor.metas[x.name].shape  # type: ignore[index]
    wide, calls = editor.metas[out].shape[1], Calls()
    columns = calls.add("aten.view.default", x, (batch, channels, math.prod(pixels)))
    matrix = calls.add("aten.view.default", weight, (1, wide, channels))
    matrices = calls.add("aten.expand.default", matrix, (batch, wide, channels))
    product = calls.add("aten.bmm.default", matrices, columns)
    calls.add("aten.view.default", product, editor.metas[out].shape, out=Ref(out))
    editor.add(task, calls, (out,), "conv.matmul", word="conv", runs=task.runs)


# ---- cuDNN's algorithms ----


def offer_algorithms(editor: Editor) -> None:
    """Offer cuDNN's algorithms for convolutions of images, not transposed, of any layout, groups and dtype."""
    if ALGORITHMS not in editor.words or editor.device.type != "cuda":
        return
    for task, call in editor.find_last(CONVOLUTION):
        x, weight, bias, stride, padding, dilation, transposed, _, groups = call.args
        if transposed or len(stride) != 2:
            continue
        name, settings = "monet_like.cudnn_convolution.default", (stride, padding, dilation, groups)
        plain = Call(name, (x, weight, bias, *settings), (), call.outs)
        window = editor.metas[weight.name].shape[2:] if editor.meta_of(weight) else ()
        ways = _by_each_algorithm(editor, task.calls[:-1], plain, (), task.writes, window, FORWARD_ALGORITHMS)
        for algorithm, made in ways:
            editor.add(task, made, task.writes, f"conv.cudnn_{algorithm}", word=ALGORITHMS, runs=task.runs)
    for slot, way, call in list(editor.find_slots(BACKWARD)):
        if not call.args[7] and len(call.args[4]) == 2 and call.args[-1][0] != call.args[-1][1]:
            for algorithm, made in _gradient_by_algorithms(editor, way.calls[:-1], call, way.writes):
                editor.add_way(slot, made, f"conv.cudnn_{algorithm}", word=ALGORITHMS)


def _gradient_by_algorithms(
    editor: Editor, before: Sequence[Call], call: Call, writes: Sequence[int]
) -> Iterator[tuple[str, tuple[Call, ...]]]:
    """Calls of each algorithm for the gradient of the input, or of the weight and, if wanted, the bias."""
    grad, x, weight, _, stride, padding, dilation, _, _, groups, (of_input, _, of_bias) = call.args
    settings = (stride, padding, dilation, groups)
    # The gradient has the shape of its tensor.
    wanted = next(out for out in call.outs if out is not None)
    shape = editor.metas[wanted.name].shape  # type: ignore[index]
    if of_input:
        filters = editor.meta_of(weight)
        plain = Call(
            "monet_like.cudnn_convolution_backward_input.default", (grad, weight, shape, *settings), (), (wanted,)
        )
        window = filters.shape[2:] if filters else ()
        yield from _by_each_algorithm(editor, before, plain, (), writes, window, INPUT_ALGORITHMS)
        return
    plain = Call("monet_like.cudnn_convolution_backward_weight.default", (grad, x, shape, *settings), (), (wanted,))
    summed = (Call("aten.sum.dim_IntList", (grad, [0, 2, 3]), (), (call.outs[2],)),) if of_bias else ()
    yield from _by_each_algorithm(editor, before, plain, summed, writes, shape[2:], WEIGHT_ALGORITHMS)


def _by_each_algorithm(
    editor: Editor,
    before: Sequence[Call],
    plain: Call,
    after: Sequence[Call],
    writes: Sequence[int],
    window: Sequence[int],
    known: Sequence[str],
) -> Iterator[tuple[str, tuple[Call, ...]]]:
    """Calls of each algorithm that fits; none if the results would not have the layout of PyTorch's.

    Args:
        plain: the call without its last arguments, layout and algorithm.
        window: height and width of the convolution's kernel; empty if not known.
    """
    _, _, _, stride, _, dilation, _ = plain.args

    def calls(channels_last: bool, algorithm: str) -> tuple[Call, ...]:
        return (*before, replace(plain, args=(*plain.args, channels_last, algorithm)), *after)

    def fits(channels_last: bool) -> bool:
        made = {ref.name: meta for ref, meta in editor.results(calls(channels_last, known[0])).items()}
        return all(made.get(value) == editor.metas[value] for value in writes)

    layout = next((channels_last for channels_last in (False, True) if fits(channels_last)), None)
    if layout is None:
        return
    for algorithm in known:
        if offered(algorithm, window, stride, dilation):
            yield algorithm, calls(layout, algorithm)


def offered(algorithm: str, window: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> bool:
    """Whether an algorithm is tried: cuDNN's manual allows it, and it rounds as the others do.

    Measuring tells what cuDNN refuses besides. FFT and Winograd take neither strides nor dilations. Winograd takes
    windows of 3 x 3; not fused it takes 5 x 5, too, but there float32 is off by more than a thousandth of the largest
    element (cuDNN 9.19, H200).
    """
    if not algorithm.startswith(("fft", "winograd")):
        return True
    if {*stride, *dilation} != {1}:
        return False
    windows: dict[str, set[Any]] = {"winograd": {(3, 3)}, "winograd_nonfused": {(3, 3)}}
    return tuple(window) in windows[algorithm] if algorithm in windows else tuple(window) != (1, 1)
