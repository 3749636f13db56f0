"""Operators that become several tasks, or tasks of other calls than the graph's: one function for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from ...ir.program import Call, Ref
from ...ops.meta_functions import product
from ...runtime import operators
from ...runtime.batch_norm import CUDNN, CUDNN_BACKWARD, NATIVE, backward_of, reserve_bytes
from ...runtime.questions import ASK, SIZED, SIZES
from ..captured import TensorMeta, cost_key
from ..trace.sizes import with_tensors
from .eager_results import (
    BATCH_NORM_NODES,
    SYNC_BATCH_NORM_GATHER,
    fills_in_memory_order,
    observes_in_place,
    reserve_of,
)
from .values import NodeResult, Values, args_of, empty_call, operator_of

#: Lowers a node that makes new storages. It gets the views that lead to its arguments and its call, and what it writes.
Rule = Callable[[Values, fx.Node, Sequence[Call], Sequence[int]], None]


def rule_of(lowering: Values, node: fx.Node, call: Call) -> Rule | None:
    """The function that lowers a node with such a call, if it does not become a single task."""
    if has_effect(node):
        return lower_effect
    if observes_in_place(lowering, node):
        return lower_observer
    if call.op == SYNC_BATCH_NORM_GATHER:
        return lower_gather
    if call.op == "aten.convolution_backward.default" and call.outs[0] is not None and any(call.outs[1:]):
        return lower_convolution_backward
    if is_random(node) and not lowering.nodes[node].backward and not lowering.in_backward:
        return lower_random
    return None


def with_own_memory(lowering: Values, node: fx.Node, calls: list[Call], call: Call) -> tuple[list[Call], Call]:
    """The calls of a node that would take other memory than eager PyTorch's, or draw in another order.

    A copy into a part of a storage takes no more than that part: ``aten.copy``'s own result would have all of it.
    """
    made = call.outs[0]
    first = args_of(node)[0] if args_of(node) else None
    if call.op == "aten.mul.Tensor" and isinstance(first, fx.Node) and lowering.is_scaled_in_place(first):
        calls = [replace(each, outs=(made,)) if each.outs == (call.args[0],) else each for each in calls]
        return calls, Call("aten.mul_.Tensor", (made, *call.args[1:]), (), ())
    if call.op == "aten.copy.default" and made is not None and _is_part(lowering.result_of(args_of(node)[0])):
        calls = []
        source = lowering.emit(args_of(node)[1], calls)
        empty = empty_call(lowering.metas[cast(int, made.name)], made)
        return [*calls, empty], Call("aten.copy_.default", (made, source), (), ())
    if fills_in_memory_order(lowering, node) and made is not None:
        empty = empty_call(lowering.metas[cast(int, made.name)], made)
        return [empty], Call("aten.bernoulli_.float", (made, *call.args[1:]), call.kwargs, ())
    return calls, call


def _is_part(tensor: torch.Tensor) -> bool:
    """Whether a tensor is some of the elements of its storage."""
    return tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()


def add_reserve(lowering: Values, node: fx.Node, kind: str, *, read: bool) -> None:
    """The reserve of a batch norm by cuDNN becomes a value, if it is training and a gradient may read it (``read``)."""
    if read and BATCH_NORM_NODES[operator_of(node)][1]:
        like = lowering.nodes[node].result[0]
        reserve = torch.empty(reserve_bytes(like), dtype=torch.uint8, device=like.device)
        lowering.by_cudnn[node] = Ref(lowering.new_value(f"{node.name}.reserve", kind, reserve))


def as_cudnn_call(lowering: Values, node: fx.Node, call: Call, writes: list[int]) -> Call:
    """The call of cuDNN's operator, if ``call`` is a batch norm by cuDNN, or its gradient; else ``call``.

    Its reserve is added to ``writes``.
    """
    if node in lowering.by_cudnn:
        places, training = BATCH_NORM_NODES[operator_of(node)]
        *tensors, momentum, eps = (None if place is None else call.args[place] for place in places)
        reserve = lowering.by_cudnn[node]
        writes += [cast(int, reserve.name)] if reserve else []
        return replace(call, op=CUDNN, args=(*tensors, training, momentum, eps), outs=(*call.outs, reserve))
    if (reserve := reserve_of(lowering, node)) is not None:
        taken = backward_of(call)
        assert taken is not None
        return replace(call, op=CUDNN_BACKWARD, args=taken.cudnn_with(reserve))
    return call


def lower_batch_norm(
    lowering: Values, node: fx.Node, calls: list[Call], args: tuple[Any, ...], outs: list[Any], writes: list[int]
) -> None:
    """Batch norm in training.

    Only the forward updates the running statistics; a rerun normalises by the batch again.
    """
    x, weight, bias, *running, _, momentum, eps = args
    before = calls
    # Instance norm has statistics of every sample, copies of the buffers.
    if not lowering.is_buffer_node(args_of(node)[3]):
        moved = [out or Ref(f"new_{name}") for name, out in zip(("mean", "var"), outs[3:], strict=True)]
        copies = (Call("aten.clone.default", (old,), (), (new,)) for old, new in zip(running, moved, strict=True))
        before, running = [*calls, *copies], moved
    update = Call(NATIVE, (x, weight, bias, *running, True, momentum, eps), (), tuple(outs[:3]), True)
    of_batch = (x, weight, bias, True, momentum, eps)
    again = Call("aten._native_batch_norm_legit.no_stats", of_batch, (), (outs[0], None, None), True)
    made = writes[:1]
    if node in lowering.by_cudnn:
        reserve = lowering.by_cudnn[node]
        update = replace(update, op=CUDNN, outs=(*update.outs, reserve))
        again = replace(update, args=(x, weight, bias, None, None, *update.args[5:]), outs=(*again.outs, reserve))
        left = [cast(int, reserve.name)] if reserve else []
        writes, made = [*writes, *left], [*made, *left]
    lowering.add_effect(node.name, (*before, update), f"{node.name}.statistics", writes)
    if outs[0] is not None:
        lowering.tasks.append(lowering.make_task(f"{node.name}.again", (*calls, again), made, runs="again"))


def lower_gather(lowering: Values, node: fx.Node, calls: Sequence[Call], writes: Sequence[int]) -> None:
    """SyncBatchNorm's statistics. The processes exchange them once, in the forward, even if nothing reads them."""
    *views, call = calls
    if call.outs[3] is None and call.outs[4] is None:  # the running statistics, if there are any, are updated in place
        call = replace(call, op="monet_like.sync_batch_norm_gather.default", outs=call.outs[:3])
    lowering.add_effect(node.name, (*views, call), f"{node.name}.statistics", writes)


def lower_observer(lowering: Values, node: fx.Node, calls: Sequence[Call], writes: Sequence[int]) -> None:
    """Fake quantisation. Its observer sees the tensor once, in the forward, and updates buffers in place."""
    *views, call = calls
    call = replace(call, op="aten._fused_moving_avg_obs_fq_helper.default", outs=call.outs[:2])
    lowering.add_effect(node.name, (*views, call), f"{node.name}.observer", writes)


def has_effect(node: fx.Node) -> bool:
    """Whether a node calls an operator for what it does, such as raising an error for a singular matrix."""
    return "in_order" in node.meta  # see `drop_tokens`


def lower_effect(lowering: Values, node: fx.Node, calls: Sequence[Call], writes: Sequence[int]) -> None:
    """An operator that is called for what it does: once, in its place.

    It is not measured: random inputs may raise its error.
    """
    if not writes:
        calls = (*calls[:-1], replace(calls[-1], outs=()))
    if lowering.in_backward:
        lowering.slots.append(lowering.make_task(node.name, calls, writes, cost=""))
    else:
        lowering.add_effect(node.name, calls, f"{node.name}.done", writes, cost="")


def lower_convolution_backward(lowering: Values, node: fx.Node, calls: Sequence[Call], _: Sequence[int]) -> None:
    """The gradients of a convolution as two slots: first weight and bias, then the input, as PyTorch computes them.

    So each can have its own way, and the second does not read the convolution's input.
    """
    *views, call = calls
    of_input, *of_weights = call.outs
    parts: dict[str, tuple[Ref | None, ...]] = {"weight": (None, *of_weights), "input": (of_input, None, None)}
    for name, outs in parts.items():
        part = Call(call.op, (*call.args[:-1], [out is not None for out in outs]), call.kwargs, outs, True)
        writes = cast("list[int]", [out.name for out in outs if out is not None])
        lowering.slots.append(lowering.make_task(f"{node.name}.{name}", (*views, part), writes))


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return operators.is_random(operator_of(node), args_of(node), node.kwargs)


def lower_random(lowering: Values, node: fx.Node, calls: Sequence[Call], writes: Sequence[int]) -> None:
    """A random operator of the forward. When it runs again, it starts from the generator's state of the first run.

    If nothing reads its result it still runs once, because later draws depend on the generator's state.
    """
    if node not in lowering.read_nodes:
        lowering.add_effect(node.name, calls, f"{node.name}.drawn", writes)
        return
    device = str(lowering.metas[writes[0]].device)
    bytes_ = 5056 if device == "cpu" else 0  # state of the CPU's generator; that of CUDA's is a few bytes on the host
    state = lowering.new_state(f"{node.name}.rng_state", bytes_)
    get = Call("monet_like.get_rng_state", (device,), (), (Ref(state),))
    now = Call("monet_like.get_rng_state", (device,), (), (Ref("rng_now"),))
    rewind = Call("monet_like.set_rng_state", (device, Ref(state)), (), ())
    restore = Call("monet_like.set_rng_state", (device, Ref("rng_now")), (), ())
    lowering.tasks.append(lowering.make_task(node.name, (get, *calls), (*writes, state), runs="first"))
    lowering.tasks.append(
        lowering.make_task(f"{node.name}.again", (now, rewind, *calls, restore), writes, runs="again")
    )


def is_dropout(node: fx.Node, nodes: Mapping[fx.Node, NodeResult]) -> bool:
    """Whether a node is a dropout that `lower_dropout` lowers: one on a CPU, or one that drops everything."""
    if node.target is not torch.ops.aten.native_dropout.default:
        return False
    x, p, train = args_of(node)
    return bool(train and (p == 1.0 or (nodes[x].result.device.type == "cpu" and p > 0.0)))


def lower_dropout(lowering: Values, node: fx.Node, backward: bool) -> None:
    """Dropout on a CPU as in eager mode: x * noise, where noise is 0 or 1 / (1 - p).

    The trace has ``native_dropout`` instead, CUDA's kernel with a boolean mask, whose scaling rounds differently. Noise
    and product are two tasks, so the product can be recomputed without drawing again. Where p is 1, noise is a single
    zero on any device, and nothing is drawn.
    """
    x, p, _ = args_of(node)
    like = lowering.nodes[x].result
    keep = 1.0 - p
    if lowering.nodes[x].backward:
        _lower_dropout_of_gradient(lowering, node, x, keep)
        return
    kind = "backward" if backward else "forward"
    noise = lowering.new_value(f"{node.name}.noise", kind, torch.empty_like(like) if keep else like.new_empty(()))
    draw = _drawing(lowering.metas[noise], Ref(noise), keep)
    if backward:
        lowering.slots.append(lowering.make_task(f"{node.name}.noise", draw, (noise,)))
    elif keep:
        lower_random(lowering, node, draw, (noise,))
    else:
        lowering.tasks.append(lowering.make_task(f"{node.name}.noise", draw, (noise,)))
    calls: list[Call] = []
    source = lowering.emit(x, calls)
    result = product(like, lowering.metas[noise].empty())
    value = lowering.new_value(f"{node.name}.0", kind, result)
    multiply = Call("aten.mul.Tensor", (source, Ref(noise)), (), (Ref(value),))
    (lowering.slots if backward else lowering.tasks).append(
        lowering.make_task(f"{node.name}.scale", (*calls, multiply), (value,))
    )
    mask = torch.empty_like(like, dtype=torch.bool)
    lowering.nodes[node] = NodeResult((result, mask), backward)
    lowering.noises.update((user, noise) for user in node.users if args_of(user)[1] == 1)


def _lower_dropout_of_gradient(lowering: Values, node: fx.Node, x: fx.Node, keep: float) -> None:
    """Dropout in the backward, by a hook or a custom function. A slot runs only once, so it draws the noise itself."""
    like = lowering.nodes[x].result
    calls: list[Call] = []
    source = lowering.emit(x, calls)
    noise_like = torch.empty_like(like) if keep else like.new_empty(())
    result = product(like, noise_like)
    value = lowering.new_value(f"{node.name}.0", "backward", result)
    noise = Ref("noise")
    calls += _drawing(lowering.metas[value], noise, keep)
    calls.append(Call("aten.mul.Tensor", (source, noise), (), (Ref(value),)))
    lowering.slots.append(lowering.make_task(f"{node.name}.scale", calls, (value,)))
    lowering.nodes[node] = NodeResult((result, torch.empty_like(like, dtype=torch.bool)), True)


def _drawing(meta: TensorMeta, noise: Ref, keep: float) -> tuple[Call, ...]:
    """Calls that draw the noise of a dropout, laid out like ``meta``: 1 / keep with probability ``keep``, else 0."""
    if not keep:
        options = (("dtype", meta.dtype), ("device", meta.device))
        return (Call("aten.zeros.default", ((),), options, (noise,)),)
    return (
        empty_call(meta, noise),
        Call("aten.bernoulli_.float", (noise, keep), (), ()),
        Call("aten.div_.Scalar", (noise, keep), (), ()),
    )


def lower_dropout_backward(lowering: Values, node: fx.Node) -> None:
    """The gradient of a dropout on a CPU: the incoming gradient * noise."""
    grad, mask, _ = args_of(node)
    calls: list[Call] = []
    source = lowering.emit(grad, calls)
    result = product(lowering.nodes[grad].result, lowering.metas[lowering.noises[mask]].empty())
    value = lowering.new_value(node.name, "backward", result)
    multiply = Call("aten.mul.Tensor", (source, Ref(lowering.noises[mask])), (), (Ref(value),))
    lowering.nodes[node] = NodeResult(result, True, value)
    lowering.slots.append(lowering.make_task(node.name, (*calls, multiply), (value,)))


def add_question(lowering: Values, node: fx.Node) -> None:
    """A question about values is asked once, in the forward, where the model's Python code asks it."""
    tensors, number = args_of(node)
    calls: list[Call] = []
    asked = [lowering.emit(tensor, calls) for tensor in tensors]
    assert lowering.flat.answers is not None
    answer = lowering.flat.answers[number]
    op, options = (SIZES, ()) if answer.is_size else (answer.op, answer.options)
    call = Call(ASK, (number, op, *asked), options, ())
    alike = cost_key((*calls, replace(call, args=(0, *call.args[1:]))), lowering.metas)
    lowering.add_effect(node.name, (*calls, call), f"{node.name}.answer", cost=alike)
    lowering.nodes[node] = NodeResult(node.meta["val"], False)


def add_sized(lowering: Values, node: fx.Node) -> None:
    """An operator whose results have the sizes of an answer; the question that comes next asks for them."""
    tensors, number, _ = args_of(node)
    assert lowering.flat.answers is not None
    answer = lowering.flat.answers[number]
    calls: list[Call] = []
    given = with_tensors(answer.options, [lowering.emit(tensor, calls) for tensor in tensors])
    for place, example in (answer.examples or {}).items():
        decides = lowering.tensor(tensors[place])
        lowering.examples.setdefault(decides.value, []).append((decides, example))
    results = tuple(node.meta["val"])
    writes = [lowering.new_value(f"{node.name}.{place}", "forward", result) for place, result in enumerate(results)]
    lowering.nodes[node] = NodeResult(results, False)
    call = Call(SIZED, (answer.op, answer.value), given, tuple(map(Ref, writes)), unpack=True)
    lowering.add_forward_task(node, (*calls, call), writes)
