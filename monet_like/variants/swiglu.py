"""SwiGLU, silu(gate) * up, in one pass, and both of its gradients in one.

PyTorch computes silu(gate), keeps it for the gradient of up, and multiplies; the gradients are a product for up,
another one, and silu's. Fused, silu(gate) and the gradient that passes through it are never in memory: 3 tensors are
read or written instead of 5 in the forward, and 5 instead of 9 in the backward. Liger's kernel does the same (Hsu et
al., Liger Kernel, 2024). Results are PyTorch's, bit for bit.

Both gradients in one pass are a part of `tiled_mlp`, whose gradients are one slot anyway. Elsewhere the three slots
stay apart: all that is made of up's gradient runs before the gate's is made, and to have both at once would take one
more tensor of the full width. There up's gradient, silu(gate) * grad, takes the forward's operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ..capture.captured import make_task
from ..ir.program import Call, Ref, Task
from .editor import Editor, views_of
from .patterns import Input, Operators, Seen, record

VARIANT = "swiglu"


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU."""
    return F.silu(gate) * up


@dataclass(frozen=True)
class Gate:
    """A gate of the forward.

    Attributes:
        silu, product: PyTorch's tasks.
        fused: one task for both, which does not write silu(gate).
        source: what silu reads.
    """

    silu: Task
    product: Task
    fused: Task
    source: Seen

    @property
    def inner(self) -> int:
        """The value of silu(gate)."""
        return self.silu.writes[0]


@dataclass(frozen=True)
class Gradients:
    """The gradients of a gate.

    Attributes:
        slots: the numbers of those for up, through the product, and of the gate.
        of_up: calls that make the first from the gate.
        fused: one way that makes the first and the last.
    """

    slots: tuple[int, int, int]
    of_up: tuple[Call, ...]
    fused: Task


def offer(editor: Editor) -> None:
    """Offer the fused forward and, for ``multiway``, the gradient of up from the gate instead of from silu(gate)."""
    operators = Operators(editor)
    for gate in list(gates(operators)):
        editor.add(gate.product, gate.fused.calls, gate.fused.writes, VARIANT, runs=gate.product.runs)
        found = gradients(operators, gate)
        if found is not None:
            editor.add_way(found.slots[0], found.of_up, f"{VARIANT}.up", word="multiway")


def gates(operators: Operators) -> Iterator[Gate]:
    """The gates whose silu(gate) nothing else reads in the forward."""
    for silu in operators.editor.tasks:
        operator = operators.operator(silu) if silu.variant == "aten" else None
        if operator is None or operator.op != "silu":
            continue
        (source,) = operator.args
        found = operators.match(record(gated, _inputs(source), "silu"), silu)
        if found is None or not operators.alone(found) or not _is_plain(operators.editor, [*found.values.values()]):
            continue
        gate, up = found.refs["gate"], found.refs["up"]
        fused = Call("monet_like.swiglu.default", (gate, up), (), (Ref(found.results[0]),))
        calls, product = (*views_of(found.tasks, gate, up), fused), found.tasks[1]
        yield Gate(silu, product, operators.editor.beside(product, calls, VARIANT), source)


def gradients(operators: Operators, gate: Gate) -> Gradients | None:
    """The slots of a gate's gradients, if they are PyTorch's three and nothing else reads what passes between them."""
    pattern = record(gated, _inputs(gate.source), "silu", of=("gate", "up"))
    found = operators.match(pattern, gate.silu)
    if found is None or operators.escapes(found.slots, found.gradients):
        return None
    (_, of_up), slots = operators.writers[found.gradients[1]], found.slots
    assert of_up is not None
    order = (of_up, *(slot for slot in slots if slot != of_up))
    ways = [operators.ways[slot] for slot in order]
    if any(way.overwrites is not None for way in ways) or not _is_plain(operators.editor, [*found.values.values()]):
        return None
    operands = tuple(found.refs[name] for name in ("grad0", "gate", "up"))
    call = Call("monet_like.swiglu_backward.default", operands, (), tuple(map(Ref, found.gradients)), True)
    calls = [*views_of((*ways, *found.tasks), *operands), call]
    variant, name = f"{VARIANT}.backward", f"{ways[0].name}.{VARIANT}.backward"
    fused = make_task(name, calls, found.gradients, operators.editor.metas, variant=variant, word="conv")
    of_up_alone = Call("monet_like.swiglu.default", (operands[1], operands[0]), (), (Ref(found.gradients[1]),))
    views = views_of((*ways, *found.tasks), *operands[:2])
    return Gradients((order[0], order[1], order[2]), (*views, of_up_alone), fused)


def fused_tasks(tasks: Sequence[Task], found: Sequence[Gate]) -> list[Task]:
    """Tasks with the fused one in place of both of a gate's."""
    fused = {gate.product.name: gate.fused for gate in found}
    left_out = {gate.silu.name for gate in found}
    return [fused.get(task.name, task) for task in tasks if task.name not in left_out]


def fused_ways(ways: Sequence[Task], first: int, found: Sequence[Gradients]) -> list[Task]:
    """Ways of the slots from number ``first`` on, with the fused one in place of a gate's three."""
    fused = {min(gradients.slots): gradients.fused for gradients in found}
    left_out = {slot for gradients in found for slot in gradients.slots} - fused.keys()
    return [fused.get(slot, way) for slot, way in enumerate(ways, first) if slot not in left_out]


def _inputs(source: Seen) -> tuple[Input, Input]:
    return ("gate", source.shape, source.dtype), ("up", source.shape, source.dtype)


def _is_plain(editor: Editor, values: Sequence[Any]) -> bool:
    """Whether values are floats in rows, whole."""
    found = [value for value in values if isinstance(value, int)]
    metas = [editor.metas[value] for value in found]
    return len(found) == len(values) and all(m.contiguous and m.dtype.is_floating_point for m in metas)
