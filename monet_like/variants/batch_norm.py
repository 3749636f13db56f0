"""Training-mode batch norm: run again from the saved mean and inverse standard deviation, alone or with its ReLU.

PyTorch's own recompute passes over the input once more for statistics that are a few bytes and still there.
"""

from __future__ import annotations

from ..program import Call, Ref
from .editor import Editor


def offer(editor: Editor) -> None:
    """Forward tasks for every training-mode batch norm, and for batch norms that only a ReLU reads."""
    for task in editor.tasks:
        if task.variant != "aten" or task.calls[-1].op != "aten.native_batch_norm.default":
            continue
        call = task.calls[-1]
        x, weight, bias, mean, var, training, momentum, eps = call.args
        out, save_mean, save_invstd = call.outs
        if len(task.calls) != 1 or not training or None in call.outs:
            continue
        assert out is not None and save_mean is not None and isinstance(out.name, int)
        statistics = (x, weight, bias, save_mean, save_invstd)
        result = _relu_of(editor, out.name)
        if result is not None:
            train = Call(
                "monet_like.batch_norm_relu_train.default",
                (x, weight, bias, mean, var, momentum, eps),
                (),
                (Ref(result), save_mean, save_invstd),
                True,
            )
            editor.add(task, (train,), (result, *task.writes[1:]), "batch_norm_relu.train", runs="first")
            apply = Call("monet_like.batch_norm_relu_apply.default", statistics, (), (Ref(result),))
            editor.add(task, (apply,), (result,), "batch_norm_relu.apply", runs="again")
        again = Call("monet_like.batch_norm_apply.default", statistics, (), (out,))
        editor.add(task, (again,), (out.name,), "batch_norm.apply", runs="again")


def _relu_of(editor: Editor, value: int) -> int | None:
    """The result of the ReLU that is the only reader of ``value``, if that is so."""
    readers = editor.forward_readers(value)
    if len(readers) != 1 or readers[0].calls[-1].op != "aten.relu.default" or len(readers[0].calls) != 1:
        return None
    if value in editor.captured.program.outputs or editor.slot_readers(value):
        return None
    result = readers[0].calls[0].outs[0]
    return result.name if result is not None and isinstance(result.name, int) else None
