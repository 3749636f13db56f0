"""Convolutions on CUDA by each of cuDNN's algorithms, forward and both gradients, each with a workspace of its own.

Which of them is the fastest and how much workspace it takes, nothing up to many times the input, only measuring tells;
PyTorch chooses for speed and knows no budget. ``algorithms`` admits them; they agree to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..ir.mode import ALGORITHMS
from ..ir.program import Call
from ..ops.convolution import FORWARD_ALGORITHMS, INPUT_ALGORITHMS, WEIGHT_ALGORITHMS
from .editor import Editor

_CONVOLUTION = "aten.convolution.default"
_BACKWARD = "aten.convolution_backward.default"


def offer(editor: Editor) -> None:
    """algorithms: for convolutions of images that are not transposed, whatever their layout, groups and dtype."""
    if ALGORITHMS not in editor.words or editor.device.type != "cuda":
        return
    for task in editor.tasks:
        if task.variant != "aten" or not task.calls or task.calls[-1].op != _CONVOLUTION:
            continue
        *before, call = task.calls
        x, weight, bias, stride, padding, dilation, transposed, _, groups = call.args
        if transposed or len(stride) != 2:
            continue
        name, settings = "monet_like.cudnn_convolution.default", (stride, padding, dilation, groups)
        plain = Call(name, (x, weight, bias, *settings), (), call.outs)
        window = editor.metas[weight.name].shape[2:] if editor.meta_of(weight) else ()
        for algorithm, made in _by_each(editor, before, plain, (), task.writes, window, FORWARD_ALGORITHMS):
            editor.add(task, made, task.writes, f"conv.cudnn_{algorithm}", word=ALGORITHMS, runs=task.runs)
    for slot, way, call in list(editor.find_slots(_BACKWARD)):
        if not call.args[7] and len(call.args[4]) == 2 and call.args[-1][0] != call.args[-1][1]:
            for algorithm, made in _gradient(editor, way.calls[:-1], call, way.writes):
                editor.add_way(slot, made, f"conv.cudnn_{algorithm}", word=ALGORITHMS)


def _gradient(
    editor: Editor, before: Sequence[Call], call: Call, writes: Sequence[int]
) -> Iterator[tuple[str, tuple[Call, ...]]]:
    """The gradient for the input, or for the weight and maybe the bias."""
    grad, x, weight, _, stride, padding, dilation, _, _, groups, (of_input, _, of_bias) = call.args
    settings = (stride, padding, dilation, groups)
    # What either tensor has for a shape, the gradient for it has too.
    wanted = next(out for out in call.outs if out is not None)
    shape = editor.metas[wanted.name].shape  # type: ignore[index]
    if of_input:
        filters = editor.meta_of(weight)
        plain = Call(
            "monet_like.cudnn_convolution_backward_input.default", (grad, weight, shape, *settings), (), (wanted,)
        )
        window = filters.shape[2:] if filters else ()
        yield from _by_each(editor, before, plain, (), writes, window, INPUT_ALGORITHMS)
        return
    plain = Call("monet_like.cudnn_convolution_backward_weight.default", (grad, x, shape, *settings), (), (wanted,))
    summed = (Call("aten.sum.dim_IntList", (grad, [0, 2, 3]), (), (call.outs[2],)),) if of_bias else ()
    yield from _by_each(editor, before, plain, summed, writes, shape[2:], WEIGHT_ALGORITHMS)


def _by_each(
    editor: Editor,
    before: Sequence[Call],
    plain: Call,
    after: Sequence[Call],
    writes: Sequence[int],
    window: Sequence[int],
    known: Sequence[str],
) -> Iterator[tuple[str, tuple[Call, ...]]]:
    """Calls by every algorithm that may do it; none if the results would be laid out otherwise than PyTorch's.

    Args:
        plain: the call, which lacks layout and algorithm.
        window: of the convolution; empty: not known.
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
        if _possible(algorithm, window, stride, dilation):
            yield algorithm, calls(layout, algorithm)


def _possible(algorithm: str, window: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> bool:
    """What cuDNN's manual rules out; the rest it is asked when it is measured.

    Transforms know neither strides nor dilations; those of Winograd are for windows of 3 x 3 and, not fused, 5 x 5.
    """
    if not algorithm.startswith(("fft", "winograd")):
        return True
    if {*stride, *dilation} != {1}:
        return False
    windows: dict[str, set[Any]] = {"winograd": {(3, 3)}, "winograd_nonfused": {(3, 3), (5, 5)}}
    return tuple(window) in windows[algorithm] if algorithm in windows else tuple(window) != (1, 1)
