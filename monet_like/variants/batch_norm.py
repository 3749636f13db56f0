"""Training-mode batch norm with what follows it: an addition, then an activation, in one pass.

Run again, it is computed from the saved mean and inverse standard deviation, alone or with what follows; PyTorch's own
recompute passes over the input once more for statistics that are a few bytes and still there. Our kernels can round as
ATen's do, so where a GPU computes by cuDNN all of this is for ``conv``; nor do they leave what cuDNN's gradient reads
beside the statistics, and ATen's gradient can take its place.

With ``conv`` the gradients of an activation and of the batch norm before it are one slot: by PyTorch's two operators,
or in one that reads the batch norm's input alone and makes the activation's input from it. The latter sums in another
order and agrees to rounding. So do statistics summed in vectors, and SiLU, whose exponential is our own.

A concatenation before a batch norm is not needed: all of these operators can read its parts where they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ..ir.program import Call, Ref, Task
from ..runtime.batch_norm import CUDNN, NATIVE, NATIVE_BACKWARD, backward_of
from .editor import Editor

#: Name and two numbers of what follows, as the operators take them.
Activation = tuple[str, float, float]
NOTHING: Activation = ("clamp", -math.inf, math.inf)
_RELU: Activation = ("clamp", 0.0, math.inf)


@dataclass(frozen=True)
class Chain:
    """The operators after a batch norm that can be fused with it.

    Attributes:
        tasks: PyTorch's own, in order; each result but the last is read by the next alone.
        residual: the tensor that is added, or None.
        activation: at the end.
    """

    tasks: tuple[Task, ...]
    residual: Ref | None
    activation: Activation

    @property
    def name(self) -> str:
        added = "_add" * (self.residual is not None)
        return "batch_norm" + added + f"_{self.activation[0]}" * (self.activation != NOTHING)

    @property
    def word(self) -> str:
        """Of a mode that admits it: SiLU agrees to rounding."""
        return "conv" if self.activation[0] == "silu" else ""


def offer(editor: Editor) -> None:
    """Forward tasks for every training-mode batch norm: with what follows it, and run again."""
    added: set[str] = set()
    for task, call in editor.find(NATIVE, CUDNN):
        x, weight, bias, mean, var, training, momentum, eps = call.args
        out, save_mean, save_invstd, *reserve = call.outs
        if not training or mean is None or out is None or save_mean is None or save_invstd is None:
            continue
        assert isinstance(out.name, int)
        chain, parts = _following_alone(editor, out.name, added), _parts(editor, x)
        rounds = "conv" if call.op == CUDNN else ""
        statistics = (x, weight, bias, save_mean, save_invstd)
        # The residual may be made after the batch norm, so the fused task stands where the addition stood.
        place = {} if chain.residual is None else {"before": chain.tasks[0]}
        result = chain.tasks[-1].writes[0] if chain.tasks else out.name
        options = (chain.residual, *chain.activation)
        # With ATen's bits where they are PyTorch's here; alone it would be PyTorch's own operator.
        for exact in [True] * (call.op == NATIVE and bool(chain.tasks)) + [False]:
            train = Call(
                "monet_like.batch_norm_train.default",
                (x, weight, bias, mean, var, momentum, eps, *options, exact),
                (),
                (Ref(result), save_mean, save_invstd),
                True,
            )
            variant, word = (f"{chain.name}.train", chain.word) if exact else (f"{chain.name}.train_in_vectors", "conv")
            writes = (result, *(value for value in task.writes[1:] if Ref(value) not in reserve))
            editor.add(task, (train,), writes, variant, word=word, runs="first", **place)
            if parts and chain.residual is None:
                operands = (parts, weight, bias, mean, var, momentum, eps, *chain.activation, exact)
                joined = replace(train, op="monet_like.batch_norm_train_joined.default", args=operands)
                editor.add(task, (joined,), writes, f"{variant}_joined", word=word, runs="first")
        if parts and chain.residual is None:
            known = (parts, weight, bias, save_mean, save_invstd, *chain.activation)
            joined = Call("monet_like.batch_norm_apply_joined.default", known, (), (Ref(result),))
            word = chain.word or rounds
            editor.add(task, (joined,), (result,), f"{chain.name}.apply_joined", word=word, runs="again")
        if chain.tasks:
            apply = Call("monet_like.batch_norm_apply.default", (*statistics, *options), (), (Ref(result),))
            word = chain.word or rounds
            editor.add(task, (apply,), (result,), f"{chain.name}.apply", word=word, runs="again", **place)
        alone = Call("monet_like.batch_norm_apply.default", (*statistics, None, *NOTHING), (), (out,))
        editor.add(task, (alone,), (out.name,), "batch_norm.apply", word=rounds, runs="again", **place)
    _offer_synchronised(editor, added)


def _parts(editor: Editor, x: Any) -> tuple[Ref, ...]:
    """The parts that ``x`` concatenates along the channels, if each is a whole contiguous value; else nothing."""
    makers = [call for task, call in editor.find("aten.cat.default") if task.writes == (getattr(x, "name", None),)]
    if len(makers) != 1 or makers[0].args[1:] != (1,) or not editor.metas[x.name].contiguous:
        return ()
    parts = tuple(makers[0].args[0])
    metas = [editor.meta_of(part) for part in parts]
    fit = all(
        m and m.contiguous and math.prod(m.shape[2:]) > 1 and m.dtype == editor.metas[x.name].dtype for m in metas
    )
    return parts if fit else ()


def _offer_synchronised(editor: Editor, added: set[str]) -> None:
    """SyncBatchNorm's normalisation with what follows it; its statistics are made before and never again."""
    for task, call in editor.find("monet_like.sync_batch_norm_elemt.default"):
        (out,) = call.outs
        assert out is not None and isinstance(out.name, int)
        chain = _following_alone(editor, out.name, added)
        if not chain.tasks:
            continue
        result = chain.tasks[-1].writes[0]
        operands = (*call.args[:-1], chain.residual, *chain.activation)
        apply = Call("monet_like.batch_norm_apply.default", operands, (), (Ref(result),))
        # On a CPU these are the kernels of the normalisation alone; on CUDA that is ATen's, which may round
        # differently.
        word = chain.word or ("conv" if editor.device.type == "cuda" else "")
        place = {} if chain.residual is None else {"before": chain.tasks[0]}
        editor.add(task, (apply,), (result,), f"{chain.name}.apply", word=word, **place)


def _following_alone(editor: Editor, value: int, added: set[str]) -> Chain:
    """The operators after a batch norm; if both operands of an addition are batch norms, only one of them gets the
    addition.
    """
    chain = following(editor, value)
    if chain.residual is None:
        return chain
    if chain.tasks[0].name in added:
        return Chain((), None, NOTHING)
    added.add(chain.tasks[0].name)
    return chain


def following(editor: Editor, value: int) -> Chain:
    """The longest chain that starts with the only forward reader of ``value``."""
    tasks: list[Task] = []
    residual: Ref | None = None
    while (task := editor.only_reader(value)) is not None:
        call = task.calls[0]
        if editor.metas[task.writes[0]] != editor.metas[value]:
            break
        if call.op == "aten.add.Tensor" and residual is None and not call.kwargs and _alike(editor, task):
            residual = call.args[1] if call.args[0] == Ref(value) else call.args[0]
            tasks.append(task)
        elif (activation := activation_of(call)) is not None:
            return Chain((*tasks, task), residual, activation)
        else:
            break
        (value,) = task.writes
    return Chain(tuple(tasks), residual, NOTHING)


def activation_of(call: Call) -> Activation | None:
    """The activation that a forward call applies to one tensor, if the fused operators know it."""
    numbers = [float(value) for value in call.args[1:] if isinstance(value, int | float)]
    if call.op == "aten.relu.default":
        return _RELU
    if call.op == "aten.hardtanh.default":
        low, high = (*numbers, *(-1.0, 1.0)[len(numbers) :])
        return ("clamp", low, high)
    if call.op == "aten.leaky_relu.default":
        return ("leaky_relu", numbers[0] if numbers else 0.01, 0.0)
    return _without_numbers(call)


def _without_numbers(call: Call) -> Activation | None:
    """Hardswish and SiLU, of the forward or the backward."""
    name = call.op.split(".")[1].removesuffix("_backward")
    return (name, 0.0, 0.0) if name in ("hardswish", "silu") else None


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
    """One slot for the gradients of an activation and of the batch norm before it, if nothing reads what is between."""
    if "conv" not in editor.words:
        return  # PyTorch's two operators need less memory as two slots: something may be run again between them
    made_by = {call.outs[1]: call for _, call in editor.find(NATIVE, CUDNN) if call.args[5] and call.args[3]}
    for slot in reversed(range(len(editor.slots) - 1)):
        first, norm = editor.slots[slot][0], editor.slots[slot + 1][0]
        activation = activated_by(first.calls[-1])
        call, *after = norm.calls
        backward = backward_of(call)
        if activation is None or backward is None or (after and not _adds(norm)):
            continue
        between, forward = backward.grad, made_by.get(backward.mean)
        if Ref(first.writes[0]) != between or forward is None or not only_there(editor, between.name, slot + 1):
            continue
        grad = first.calls[-1].args[0]
        result = Ref(norm.writes[0])
        if not editor.replaceable(grad, slot, result):
            continue  # together they would need more memory than one after the other
        ways = [in_turn(editor, way, norm, grad.name) for way in editor.slots[slot]]
        x, weight, bias, *_ = forward.args
        residual = [call.args[0] for call in after[-1:]]
        operands = (grad, x, weight, bias, backward.mean, backward.invstd, *activation, backward.mask, *residual)
        outs = (result, *call.outs[1:])
        fused = Call("monet_like.batch_norm_activation_backward.default", operands, (), outs, True)
        views, name = (*first.calls[:-1], *after[:-1]), f"batch_norm_{activation[0]}.backward"
        ways.append(editor.beside(norm, (*views, fused), name, word="conv"))
        if parts := _parts(editor, x):
            op = "monet_like.batch_norm_activation_backward_joined.default"
            joined = replace(fused, op=op, args=(grad, parts, *operands[2:]))
            ways.append(editor.beside(norm, (*views, joined), f"{name}_joined", word="conv"))
        editor.merge(slot, ways)


def offer_without_reserve(editor: Editor) -> None:
    """conv: ATen's own gradient for every one by cuDNN, whose batch norm alone leaves what that reads."""
    for slot, ways in enumerate(editor.slots):
        for way in tuple(ways):
            calls = tuple(_by_aten(call) for call in way.calls)
            if calls != way.calls and way.word in ("", "conv"):
                variant = "batch_norm.backward" if way.variant == "aten" else f"{way.variant}.batch_norm.backward"
                editor.add_way(slot, calls, variant, word="conv", overwrites=way.overwrites)


def _by_aten(call: Call) -> Call:
    backward = backward_of(call)
    return replace(call, op=NATIVE_BACKWARD, args=backward.native) if backward and backward.cudnn else call


def activated_by(call: Call) -> Activation | None:
    """The activation whose gradient this is."""
    if call.op == "aten.threshold_backward.default" and call.args[2] == 0:
        return _RELU
    if call.op == "aten.hardtanh_backward.default":
        return ("clamp", float(call.args[2]), float(call.args[3]))
    if call.op == "aten.leaky_relu_backward.default":
        return ("leaky_relu", float(call.args[2]), 0.0)
    return _without_numbers(call)


def _adds(norm: Task) -> bool:
    """Whether a slot adds to a batch norm's gradient what has come in before, see `meeting`, and does no more."""
    backward, *views, add = norm.calls
    return add.op == "aten.add.Tensor" and add.args[1] == backward.outs[0] and all("slice" in v.op for v in views)


def only_there(editor: Editor, gradient: int, slot: int) -> bool:
    """Whether one slot alone reads a gradient."""
    readers = [index for index, ways in enumerate(editor.slots) if gradient in ways[0].reads]
    return readers == [slot] and gradient not in editor.captured.program.gradients


def in_turn(editor: Editor, first: Task, norm: Task, released: int) -> Task:
    """Two slots' ways one after the other; the incoming gradient is gone before the last one is made."""
    name = norm.name if first.variant == "aten" else f"{norm.name}.{first.variant}"
    options: dict[str, Any] = {"variant": first.variant, "word": first.word, "overwrites": released}
    return editor.in_turn([first, norm], first.writes, name=name, **options)
