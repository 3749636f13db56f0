"""Questions about values, and operators whose sizes depend on values, as tasks."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from ...ir.program import Call, Ref
from ...runtime.questions import ASK, SIZED, SIZES
from ..captured import cost_key
from ..trace.sizes import with_tensors
from .values import NodeResult, Values, args_of


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
