"""Training-mode batch norm with what follows it: an addition, then ReLU or another clamp, in one pass.

Run again, it is computed from the saved mean and inverse standard deviation, alone or with what follows; PyTorch's own
recompute passes over the input once more for statistics that are a few bytes and still there.

With ``conv`` the gradients of a clamp and of the batch norm before it are one slot: by PyTorch's two operators, or in
one that reads the batch norm's input alone and makes the clamp's input from it. The latter sums in another order and
agrees to rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..capture import make_task
from ..program import Call, Ref, Task
from .editor import Editor

_BATCH_NORM = "aten.native_batch_norm.default"
_BATCH_NORM_BACKWARD = "aten.native_batch_norm_backward.default"
_NOTHING = (-math.inf, math.inf)


@dataclass(frozen=True)
class _Chain:
    """What follows a batch norm and can be done with it.

    Attributes:
        tasks: PyTorch's own, in order; each result but the last is read by the next alone.
        residual: what is added, or None.
        bounds: of the clamp at the end.
    """

    tasks: tuple[Task, ...]
    residual: Ref | None
    bounds: tuple[float, float]

    @property
    def name(self) -> str:
        return "_add" * (self.residual is not None) + "_clamp" * (self.bounds != _NOTHING)


def offer(editor: Editor) -> None:
    """Forward tasks for every training-mode batch norm: with what follows it, and run again."""
    added: set[str] = set()
    for task, call in editor.find(_BATCH_NORM):
        x, weight, bias, mean, var, training, momentum, eps = call.args
        out, save_mean, save_invstd = call.outs
        if not training or out is None or save_mean is None or save_invstd is None:
            continue
        assert isinstance(out.name, int)
        chain = _following(editor, out.name)
        if chain.residual is not None:
            if chain.tasks[0].name in added:
                chain = _Chain((), None, _NOTHING)  # both operands are batch norms: the other takes the addition along
            else:
                added.add(chain.tasks[0].name)
        statistics = (x, weight, bias, save_mean, save_invstd)
        # The residual may be made after the batch norm: what reads it stands where the addition stood.
        place = {} if chain.residual is None else {"before": chain.tasks[0]}
        if chain.tasks:
            (result,) = chain.tasks[-1].writes
            options = (chain.residual, *chain.bounds)
            train = Call(
                "monet_like.batch_norm_train.default",
                (x, weight, bias, mean, var, momentum, eps, *options),
                (),
                (Ref(result), save_mean, save_invstd),
                True,
            )
            name = f"batch_norm{chain.name}"
            editor.add(task, (train,), (result, *task.writes[1:]), f"{name}.train", runs="first", **place)
            apply = Call("monet_like.batch_norm_apply.default", (*statistics, *options), (), (Ref(result),))
            editor.add(task, (apply,), (result,), f"{name}.apply", runs="again", **place)
        alone = Call("monet_like.batch_norm_apply.default", (*statistics, None, *_NOTHING), (), (out,))
        editor.add(task, (alone,), (out.name,), "batch_norm.apply", runs="again", **place)


def _following(editor: Editor, value: int) -> _Chain:
    """The longest chain that starts with the only reader of ``value``."""
    tasks: list[Task] = []
    residual: Ref | None = None
    while (task := editor.only_reader(value)) is not None:
        call = task.calls[0]
        if editor.metas[task.writes[0]] != editor.metas[value]:
            break
        if call.op == "aten.add.Tensor" and residual is None and not call.kwargs and _alike(editor, task):
            residual = call.args[1] if call.args[0] == Ref(value) else call.args[0]
            tasks.append(task)
        elif call.op in ("aten.relu.default", "aten.hardtanh.default"):
            low, high = (0.0, math.inf) if "relu" in call.op else (*call.args[1:], *(-1.0, 1.0)[len(call.args) - 1 :])
            return _Chain((*tasks, task), residual, (float(low), float(high)))
        else:
            break
        (value,) = task.writes
    return _Chain(tuple(tasks), residual, _NOTHING)


def _alike(editor: Editor, addition: Task) -> bool:
    """Whether two different forward values of the result's own layout are added."""
    (out,) = addition.writes
    one, other = addition.calls[0].args
    return (
        one != other
        and editor.is_own(one)
        and editor.is_own(other)
        and editor.metas[one.name] == editor.metas[other.name] == editor.metas[out]
    )


def offer_backward(editor: Editor) -> None:
    """One slot for the gradients of a clamp and of the batch norm before it, wherever nothing reads what is between."""
    if "conv" not in editor.words:
        return  # PyTorch's two operators need less memory as two slots: something may be run again between them
    made_by = {call.outs[1]: call for _, call in editor.find(_BATCH_NORM) if call.args[5]}
    for slot in reversed(range(len(editor.slots) - 1)):
        clamp, norm = editor.slots[slot][0], editor.slots[slot + 1][0]
        bounds = _gradient_bounds(clamp.calls[-1])
        backward = norm.calls[-1]
        if bounds is None or backward.op != _BATCH_NORM_BACKWARD or len(norm.calls) > 1:
            continue
        between, forward = backward.args[0], made_by.get(backward.args[5])
        if Ref(clamp.writes[0]) != between or forward is None or not _only_there(editor, between.name, slot + 1):
            continue
        grad = clamp.calls[-1].args[0]
        if not editor.replaceable(grad, slot, backward.outs[0]):
            continue  # together they would need more memory than one after the other
        ways = [_in_turn(editor, way, norm, grad.name) for way in editor.slots[slot]]
        x, weight, bias, *_ = forward.args
        operands = (grad, x, weight, bias, backward.args[5], backward.args[6], *bounds, backward.args[-1])
        fused = Call("monet_like.batch_norm_clamp_backward.default", operands, (), backward.outs, True)
        calls = (*clamp.calls[:-1], fused)
        name = "batch_norm_clamp.backward"
        ways.append(make_task(f"{norm.name}.{name}", calls, norm.writes, editor.metas, variant=name, word="conv"))
        editor.merge(slot, ways)


def _gradient_bounds(call: Call) -> tuple[float, float] | None:
    """The bounds of the clamp whose gradient this is."""
    if call.op == "aten.threshold_backward.default" and call.args[2] == 0:
        return (0.0, math.inf)
    if call.op == "aten.hardtanh_backward.default":
        return (float(call.args[2]), float(call.args[3]))
    return None


def _only_there(editor: Editor, gradient: int, slot: int) -> bool:
    """Whether one slot alone reads a gradient."""
    readers = [index for index, ways in enumerate(editor.slots) if gradient in ways[0].reads]
    return readers == [slot] and gradient not in editor.captured.program.gradients


def _in_turn(editor: Editor, clamp: Task, norm: Task, released: int) -> Task:
    """Two slots' ways one after the other; the incoming gradient is gone before the last one is made."""
    name = norm.name if clamp.variant == "aten" else f"{norm.name}.{clamp.variant}"
    options: dict[str, Any] = {"variant": clamp.variant, "word": clamp.word, "overwrites": released}
    return editor.in_turn([clamp, norm], clamp.writes, name=name, **options)
