"""Liger's Triton kernels for RMS norm and SwiGLU, beside each of our own operators that they can stand in for.

Nothing is recognised here: every task and way that calls `rms_norm`, `swiglu` or one of their gradients is offered once
more, with Liger's kernel in the place of ours. So both exist where both run, and the profiler says which is faster.

* RMS norm: the forward, the forward again (from the input alone: Liger has no kernel that starts from the statistic),
  and the gradient, where a residual's is added in the same pass. ``inplace`` admits writing the gradient over the
  incoming one.
* SwiGLU: the forward, the gradient of up, and both gradients in an MLP that `tiled_mlp` takes. Liger's kernel writes
  them over gate and up. Where these are a tile's own tensors that nothing reads again, that is what happens; elsewhere
  it gets copies.

Liger computes in float32, so float64 is left to ours. Results agree with PyTorch's to rounding: ``conv`` admits it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..capture.captured import TensorMeta
from ..ir.program import Call, Ref, Task, refs
from ..ops.liger import FLOATS, LONGEST_ROW
from .editor import Editor, root_of

PREFIX = "liger_"
_NORM, _APPLY, _OF_NORM, _SWIGLU, _OF_SWIGLU = (
    f"monet_like.{name}.default"
    for name in ("rms_norm", "rms_norm_apply", "rms_norm_backward", "swiglu", "swiglu_backward")
)
_OURS = frozenset((_NORM, _APPLY, _OF_NORM, _SWIGLU, _OF_SWIGLU))


@dataclass(frozen=True)
class _Norm:
    """What the calls for a norm's gradient and recomputation do not say themselves."""

    eps: float
    rounded: bool


def offer(editor: Editor) -> None:
    """Offer, for ``conv``, every task and way with our RMS norm or SwiGLU with Liger's kernels, too."""
    if not editor.liger or "conv" not in editor.words:
        return
    added = list(editor.added())
    norms = dict(_norms(task for _, task in added))
    for anchor, task in added:
        calls = _by_liger(editor, task, norms)
        if calls is not None:
            editor.add(anchor, calls, task.writes, PREFIX + task.variant, word="conv", runs=task.runs)
    for slot, ways in enumerate(editor.slots):
        for way in list(ways):
            if way.word and way.word not in editor.words:
                continue  # it would need two words
            calls = _by_liger(editor, way, norms)
            if calls is None:
                continue
            variant = PREFIX + way.variant
            editor.add_way(slot, calls, variant, word="conv", overwrites=way.overwrites)
            if "inplace" in editor.words and (taken := _replaceable(editor, slot, way, calls)) is not None:
                over = [replace(c, op=_of(_OF_NORM, "_")) if c.op == _of(_OF_NORM) else c for c in calls]
                editor.add_way(slot, over, f"{variant}_in_place", word="conv", overwrites=taken)


def _norms(tasks: Iterable[Task]) -> Iterator[tuple[int, _Norm]]:
    """The norms by the value of their statistic."""
    for task in tasks:
        for call in task.calls:
            if call.op == _NORM:
                _, rstd = call.outs
                *_, eps, rounded, _ = call.args
                assert rstd is not None and isinstance(rstd.name, int)
                yield rstd.name, _Norm(eps, rounded)


def _of(ours: str, form: str = "") -> str:
    """Liger's operator in the place of one of ours."""
    return ours.replace("monet_like.", f"monet_like.{PREFIX}").replace(".default", f"{form}.default")


def _by_liger(editor: Editor, task: Task, norms: Mapping[int, _Norm]) -> list[Call] | None:
    """The calls of a task with Liger's kernels; None if it has none of our operators, or one that Liger has not."""
    if _OURS.isdisjoint(call.op for call in task.calls):
        return None
    metas = editor.results(task.calls)
    made = [
        _call(editor, task, place, metas, norms) if call.op in _OURS else call for place, call in enumerate(task.calls)
    ]
    return None if None in made else [call for call in made if call is not None]


def _call(
    editor: Editor, task: Task, place: int, metas: Mapping[Ref, TensorMeta], norms: Mapping[int, _Norm]
) -> Call | None:
    """Liger's call in the place of one of ours; None where it has none for these operands."""
    call = task.calls[place]

    def meta(ref: Ref) -> TensorMeta:
        return metas[ref] if ref in metas else editor.metas[int(ref.name)]

    def fits(*operands: Ref, results: Sequence[Ref | None] = ()) -> bool:
        found = [meta(ref) for ref in (*operands, *results) if ref is not None]
        known = {(m.dtype, m.shape) for m in found}
        return len(known) == 1 and found[0].dtype in FLOATS and 0 < found[0].shape[-1] <= LONGEST_ROW

    if call.op in (_SWIGLU, _OF_SWIGLU):
        if not fits(*call.args):
            return None
        own = call.op == _OF_SWIGLU and _are_spare(task, place, meta)
        return replace(call, op=_of(call.op, "_" if own else ""))
    if call.op == _OF_NORM:
        grad, x, weight, rstd, residual, dims = call.args
        norm = norms.get(rstd.name)
        alike = (grad, x) if residual is None else (grad, x, residual)
        if norm is None or dims != 1 or not fits(*alike, results=call.outs[:1]) or not _is_narrow(weight, meta):
            return None
        if residual is not None and weight is None:
            return None
        return replace(call, op=_of(_OF_NORM), args=(grad, x, weight, rstd, residual, norm.rounded))
    x, weight = call.args[:2]
    statistic: Ref = call.outs[1] if call.op == _NORM else call.args[2]  # type: ignore[assignment]
    norm, dims = norms.get(int(statistic.name)), call.args[2 if call.op == _NORM else 3]
    if norm is None or dims != 1 or not fits(x, results=call.outs[:1]) or not _is_narrow(weight, meta):
        return None
    outs = (call.outs[0], statistic if call.op == _NORM else None)
    return Call(_of(_NORM), (x, weight, norm.eps, norm.rounded), (), outs, True)


def _is_narrow(weight: Ref | None, meta: Callable[[Ref], TensorMeta]) -> bool:
    """Whether float32 holds what a weight holds."""
    return weight is None or meta(weight).dtype in FLOATS


def _are_spare(task: Task, place: int, meta: Callable[[Ref], TensorMeta]) -> bool:
    """Whether gate and up are contiguous tensors of the task's own, of which there are no views and no
    later readers.
    """
    _, *operands = task.calls[place].args
    makers = {out: call for call in task.calls for out in call.outs}
    for operand in operands:
        before = [call for call in task.calls[:place] if operand in refs(call)]
        after = [call for call in task.calls[place + 1 :] if operand in refs(call)]
        own = operand in makers and not isinstance(operand.name, int) and _is_new(makers[operand])
        if not own or after or not all(map(_is_new, before)) or not meta(operand).contiguous:
            return False
    return len(set(operands)) == len(operands)


def _is_new(call: Call) -> bool:
    """Whether the result of a call has memory of its own."""
    known = call.op in _OURS or call.op.startswith(("aten.mm.", "aten.addmm.", "aten.mul.", "aten.add."))
    return known and "out" not in dict(call.kwargs)


def _replaceable(editor: Editor, slot: int, way: Task, calls: Sequence[Call]) -> int | None:
    """The incoming gradient that a norm's gradient may overwrite; None if something reads it later, or it lies
    otherwise.
    """
    of_norm = [call for call in calls if call.op == _of(_OF_NORM)]
    others = [call for call in calls if call.op != _of(_OF_NORM)]
    if len(of_norm) != 1 or way.overwrites is not None or any(call.op != "aten.view.default" for call in others):
        return None
    taken = root_of(calls, of_norm[0].args[0])
    if taken is None or [root_of(calls, ref) for ref in refs(of_norm[0])].count(taken) != 1:
        return None
    mine, result = editor.metas[taken], editor.metas[way.writes[0]]
    alike = (mine.dtype, mine.storage_bytes) == (result.dtype, result.storage_bytes)
    dense = mine.contiguous and editor.dense(taken)
    return taken if alike and dense and editor.dies_in(taken, slot) else None
