"""Training-mode batch norm with what follows it: an addition, then ReLU or another clamp, in one pass.

Run again, it is computed from the saved mean and inverse standard deviation, alone or with what follows; PyTorch's own
recompute passes over the input once more for statistics that are a few bytes and still there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..program import Call, Ref, Task
from .editor import Editor

_BATCH_NORM = "aten.native_batch_norm.default"
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
