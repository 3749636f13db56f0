"""Instance norm with what follows it (an addition, an activation) in one pass, in any number of dimensions.

PyTorch computes it as the batch norm of one image whose channels are all channels of all images, with repeated weights.
So the fused batch norm operators do the same work; they read and write views of the tensors. See `batch_norm`, also for
which modes admit what.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..ir.program import Call, Ref, Task
from ..runtime.batch_norm import CUDNN, backward_of
from .batch_norm import NOTHING, Activation, Chain, activated_by, activation_of, following, in_turn, only_there
from .editor import Editor, root_of

_NATIVE = "aten._native_batch_norm_legit.no_stats"
_VIEW = "aten.view.default"


@dataclass(frozen=True)
class _Norm:
    """An instance norm of the forward.

    Attributes:
        task: the captured task.
        views: the calls before the norm, which make ``rows`` of the input, [1, N * C, ...].
        rows, weight, bias, mean, invstd: its tensors; the weights are repeated for every image.
        eps: as in PyTorch.
        out: the value of its result, shaped as ``rows``.
        exact_here: whether the fused operators round as this one does.
    """

    task: Task
    views: tuple[Call, ...]
    rows: Ref
    weight: Ref | None
    bias: Ref | None
    mean: Ref
    invstd: Ref
    eps: float
    out: int
    exact_here: bool

    @property
    def statistics(self) -> tuple[Any, ...]:
        """The leading operands of the operators that read saved statistics."""
        return (self.rows, self.weight, self.bias, self.mean, self.invstd)


def _norms(editor: Editor) -> Iterator[_Norm]:
    for task, call in editor.find_last(_NATIVE, CUDNN):
        *views, _ = task.calls
        if not views or any(view.op != _VIEW for view in views):
            continue
        if call.op == _NATIVE:
            rows, weight, bias, training, _, eps = call.args
        elif call.args[3] is None:
            rows, weight, bias, _, _, training, _, eps = call.args
        else:
            continue
        out, mean, invstd = call.outs[:3]
        if not training or out is None or mean is None or invstd is None or root_of(views, rows) is None:
            continue
        assert isinstance(out.name, int)
        exact = call.op == _NATIVE
        yield _Norm(task, tuple(views), rows, weight, bias, mean, invstd, eps, out.name, exact)


def offer(editor: Editor) -> None:
    """Forward tasks for every instance norm: with what follows it, and run again."""
    added: set[str] = set()
    for norm in _norms(editor):
        rounds = "" if norm.exact_here else "conv"
        alone = Call("monet_like.batch_norm_apply.default", (*norm.statistics, None, *NOTHING), (), (Ref(norm.out),))
        editor.add(norm.task, (*norm.views, alone), (norm.out,), "instance_norm.apply", word=rounds, runs="again")
        chain = _following(editor, norm.out)
        if chain is None or (chain.residual is not None and chain.tasks[0].name in added):
            continue
        calls, residual = list(norm.views), None
        if chain.residual is not None:
            added.add(chain.tasks[0].name)
            residual = Ref("residual")
            calls.append(Call(_VIEW, (chain.residual, editor.metas[norm.out].shape), (), (residual,)))
        result = chain.tasks[-1].writes[0]
        options = (residual, *chain.activation)
        back = Call(_VIEW, (Ref("made"), editor.metas[result].shape), (), (Ref(result),))
        name, word = chain.name.replace("batch_norm", "instance_norm"), chain.word or rounds
        place = {} if chain.residual is None else {"before": chain.tasks[0]}
        for exact in [True] * norm.exact_here + [False]:
            operands = (norm.rows, norm.weight, norm.bias, None, None, 0.0, norm.eps, *options, exact)
            outs = (Ref("made"), norm.mean, norm.invstd)
            train = Call("monet_like.batch_norm_train.default", operands, (), outs, True)
            writes = (result, int(norm.mean.name), int(norm.invstd.name))
            variant, needs = (f"{name}.train", word) if exact else (f"{name}.train_in_vectors", "conv")
            editor.add(norm.task, (*calls, train, back), writes, variant, word=needs, runs="first", **place)
        apply = Call("monet_like.batch_norm_apply.default", (*norm.statistics, *options), (), (Ref("made"),))
        editor.add(norm.task, (*calls, apply, back), (result,), f"{name}.apply", word=word, runs="again", **place)


def _following(editor: Editor, out: int) -> Chain | None:
    """The operators after an instance norm that can be fused with it; the first one reads the result through a view."""
    readers = editor.forward_readers(out)
    if len(readers) != 1 or out in editor.captured.program.outputs or len(readers[0].writes) != 1:
        return None
    *views, call = readers[0].calls
    made_from = {view.outs[0]: view.args[0] for view in views}
    (result,), meta = readers[0].writes, editor.metas[readers[0].writes[0]]
    if any(view.op != _VIEW or tuple(view.args[1]) != meta.shape for view in views) or not meta.contiguous:
        return None
    if not editor.metas[out].contiguous:
        return None
    activation = activation_of(call)
    if activation is not None and made_from.get(call.args[0]) == Ref(out):
        return Chain((readers[0],), None, activation)
    if call.op != "aten.add.Tensor" or call.kwargs:
        return None
    others = [other for arg in call.args if (other := made_from.get(arg, arg)) != Ref(out)]
    if (
        len(others) != 1
        or not editor.is_own(others[0])
        or editor.metas[others[0].name] not in (meta, editor.metas[out])
    ):
        return None
    rest = following(editor, result)
    if rest.residual is not None:
        rest = Chain((), None, NOTHING)
    return Chain((readers[0], *rest.tasks), others[0], rest.activation)


def offer_backward(editor: Editor) -> None:
    """One slot for the gradients of an activation and of the instance norm before it, if nothing reads what
    is between.
    """
    if "conv" not in editor.words:
        return
    made_by = {norm.mean: norm for norm in _norms(editor)}
    for slot in reversed(range(len(editor.slots) - 1)):
        first, second = editor.slots[slot][0], editor.slots[slot + 1][0]
        activation, backward = activated_by(first.calls[-1]), backward_of(second.calls[-1])
        if activation is None or backward is None or len(first.writes) != 1 or backward.mean not in made_by:
            continue
        between, views = first.writes[0], second.calls[:-1]
        if root_of(views, backward.grad) != between or backward.grad == Ref(between):
            continue
        if any(view.op != _VIEW for view in views) or not only_there(editor, between, slot + 1):
            continue
        incoming = first.calls[-1].args[0]
        if not editor.replaceable(incoming, slot, Ref(between)):
            continue  # together they would need more memory than one after the other
        ways = [in_turn(editor, way, second, incoming.name) for way in editor.slots[slot]]
        ways.append(_fused(editor, first, second, activation, made_by[backward.mean]))
        editor.merge(slot, ways)


def _fused(editor: Editor, first: Task, second: Task, activation: Activation, norm: _Norm) -> Task:
    """The way that reads the norm's input alone, and makes the activation's input from it."""
    call, backward = second.calls[-1], backward_of(second.calls[-1])
    assert backward is not None
    incoming = first.calls[-1].args[0]  # shaped as the image
    rows = Call(_VIEW, (incoming, editor.metas[norm.out].shape), (), (Ref("incoming_rows"),))
    operands = (Ref("incoming_rows"), *norm.statistics, *activation, backward.mask)
    fused = Call("monet_like.batch_norm_activation_backward.default", operands, (), call.outs, True)
    calls = (*first.calls[:-1], rows, *norm.views, fused)
    return editor.beside(second, calls, f"instance_norm_{activation[0]}.backward", word="conv")
