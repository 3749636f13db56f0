"""Gradients through an activation that changes a view in place, without autograd's copies.

For an in-place operator on a view, autograd's ``CopySlices`` allocates a gradient of the base tensor, copies the
incoming gradient into it, clones the view's part, computes the operator's gradient and copies that back. Where the view
is the whole base, as after an instance norm, the operator's gradient alone gives the same bits.
"""

from __future__ import annotations

from dataclasses import replace

from ..capture.captured import make_task
from ..ir.program import Call, Ref, Task, refs
from .editor import Editor, root_of, with_names

_STEPS = ("aten.new_empty_strided.default", "aten.copy.default", "aten.clone.default", "", "aten.copy.default")


def offer(editor: Editor) -> None:
    """Merge the five slots of each ``CopySlices`` of a whole tensor into the slot of the operator's gradient."""
    for slot in reversed(range(len(editor.slots) - len(_STEPS) + 1)):
        steps = [ways[0] for ways in editor.slots[slot : slot + len(_STEPS)]]
        calls = _direct(editor, slot, steps)
        if calls is not None:
            name, written = steps[3].name, steps[4].writes
            editor.merge(slot, [make_task(name, calls, written, editor.metas)], len(_STEPS))


def _direct(editor: Editor, slot: int, steps: list[Task]) -> list[Call] | None:
    """The calls that compute the last step's result from the gradient that the first one reads; None:
    another pattern.
    """
    if any(op and task.calls[-1].op != op for op, task in zip(_STEPS, steps, strict=True)):
        return None
    if any(len(task.writes) != 1 for task in steps):
        return None
    empty, copied, cloned, operator, back = (task.writes[0] for task in steps)
    gradient = root_of(steps[1].calls, steps[1].calls[-1].args[1])
    follow = (
        root_of(steps[1].calls, steps[1].calls[-1].args[0]) == empty
        and root_of(steps[2].calls, steps[2].calls[-1].args[0]) == copied
        and root_of(steps[4].calls, steps[4].calls[-1].args[0]) == copied
        and root_of(steps[4].calls, steps[4].calls[-1].args[1]) == operator
    )
    readers = {
        value: [k for k, ways in enumerate(editor.slots) if value in ways[0].reads]
        for value in (empty, copied, cloned, operator)
    }
    alone = readers == {empty: [slot + 1], copied: [slot + 2, slot + 4], cloned: [slot + 3], operator: [slot + 4]}
    views = [call for task in steps for call in task.calls[:-1]]
    if gradient is None or not follow or not alone or any(call.op != "aten.view.default" for call in views):
        return None
    if sum(Ref(cloned) in refs(call) for call in steps[3].calls) != 1 or editor.values[gradient].kind != "backward":
        return None
    shape = editor.metas[cloned].shape
    incoming = Ref(gradient) if editor.metas[gradient].shape == shape else Ref("incoming")
    calls = [] if incoming == Ref(gradient) else [Call("aten.view.default", (Ref(gradient), shape), (), (incoming,))]
    for call in steps[3].calls:
        calls.append(with_names(call, {Ref(cloned): incoming}))
    calls[-1] = replace(calls[-1], outs=(Ref(back),))
    return calls if editor.result(calls) == editor.metas[back] else None
