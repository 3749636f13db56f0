"""SwiGLU, silu(gate) * up, in one pass, and both of its gradients in one.

PyTorch computes silu(gate), keeps it for the gradient of up, and multiplies; the gradients are a product for up, another one,
and silu's. Fused, silu(gate) and the gradient that passes through it are never in memory: 3 tensors are read or written instead of
5 in the forward, and 5 instead of 9 in the backward. Liger's kernel does the same (Hsu et al., Liger Kernel, 2024).
Results are PyTorch's, bit for bit.

Both gradients in one pass are a part of `tiled_mlp`, whose gradients are one slot anyway. Elsewhere the three slots stay apart: all
that is made of up's gradient runs before the gate's is made, and to have both at once would take one more tensor of the full width.
There up's gradient, silu(gate) * grad, takes the forward's operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..capture.captured import make_task
from ..ir.program import Call, Ref, Task
from .editor import Editor, root_of, views_of
from .gradient_slots import MUL, GradientSlots

VARIANT = "swiglu"
_SILU, _SILU_BACKWARD = "aten.silu.default", "aten.silu_backward.default"


@dataclass(frozen=True)
class Gate:
    """A gate of the forward.

    Attributes:
        silu, product: PyTorch's tasks.
        fused: one task for both, which does not write silu(gate).
        up: the value that is gated.
    """

    silu: Task
    product: Task
    fused: Task
    up: int

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
    slots = GradientSlots(editor)
    for gate in list(gates(editor)):
        editor.add(gate.product, gate.fused.calls, gate.fused.writes, VARIANT, runs=gate.product.runs)
        found = gradients(editor, slots, gate)
        if found is not None:
            editor.add_way(found.slots[0], found.of_up, f"{VARIANT}.up", word="multiway")


def gates(editor: Editor) -> Iterator[Gate]:
    """The gates whose silu(gate) nothing else reads in the forward."""
    for silu in editor.tasks:
        if silu.variant != "aten" or silu.calls[-1].op != _SILU or len(silu.writes) != 1:
            continue
        (inner,) = silu.writes
        readers = editor.forward_readers(inner)
        if len(readers) != 1 or inner in editor.captured.program.outputs:
            continue
        product, call = readers[0], readers[0].calls[-1]
        others = [arg for arg in call.args if arg != Ref(inner)]
        if call.op != MUL or len(others) != 1 or len(product.writes) != 1 or len(call.args) != 2:
            continue
        up = root_of(product.calls, others[0])
        if up is None or not _is_plain(editor, (*silu.reads, inner, up, *product.writes)):
            continue
        call = Call("monet_like.swiglu.default", (silu.calls[-1].args[0], others[0]), (), (Ref(product.writes[0]),))
        calls = [*views_of((silu, product), *call.args), call]
        if _have_one_shape(editor, calls):
            task = make_task(f"{product.name}.{VARIANT}", calls, product.writes, editor.metas, variant=VARIANT)
            yield Gate(silu, product, task, up)


def gradients(editor: Editor, slots: GradientSlots, gate: Gate) -> Gradients | None:
    """The slots of a gate's gradients, if they are PyTorch's three and nothing else reads what passes between them."""
    readers = slots.readers.get(gate.inner, [])
    of_up = readers[0] if len(readers) == 1 else None
    if of_up is None or slots.ways[of_up].calls[-1].op != MUL or len(slots.ways[of_up].writes) != 1:
        return None
    above = [v for v in slots.operands(of_up) if v is not None and v != gate.inner]
    through = slots.product(above[0], (gate.up,)) if len(above) == 1 else None
    of_gate = slots.after(through, _SILU_BACKWARD)
    if through is None or of_gate is None or slots.operands(of_gate)[1] != gate.silu.reads[0]:
        return None
    found = (of_up, through, of_gate)
    by_up, by_product, by_silu = ways = [slots.ways[slot] for slot in found]
    results = (by_silu.writes[0], by_up.writes[0])
    if any(way.overwrites is not None for way in ways) or not _is_plain(editor, (*above, *results, gate.up)):
        return None
    operands = (_operand(by_up, above[0]), by_silu.calls[-1].args[1], _operand(by_product, gate.up))
    call = Call("monet_like.swiglu_backward.default", operands, (), tuple(map(Ref, results)), True)
    calls = [*views_of(ways, *operands), call]
    if not _have_one_shape(editor, calls):
        return None
    name = f"{by_up.name}.{VARIANT}.backward"
    fused = make_task(name, calls, results, editor.metas, variant=f"{VARIANT}.backward", word="conv")
    of_up_alone = Call("monet_like.swiglu.default", (operands[1], operands[0]), (), (Ref(by_up.writes[0]),))
    return Gradients(found, (*views_of(ways, *operands[:2]), of_up_alone), fused)


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


def _is_plain(editor: Editor, values: Sequence[int]) -> bool:
    """Whether values have one dtype and one number of elements, and are contiguous."""
    metas = [editor.metas[value] for value in values]
    return (
        len({(meta.dtype, meta.storage_bytes) for meta in metas}) == 1
        and metas[0].dtype.is_floating_point
        and all(meta.contiguous for meta in metas)
    )


def _operand(way: Task, value: int) -> Ref:
    """The argument of a way's last call that is a value or a view of it."""
    return next(arg for arg in way.calls[-1].args if root_of(way.calls, arg) == value)


def _have_one_shape(editor: Editor, calls: Sequence[Call]) -> bool:
    """Whether the last call's operands and results have the same shape."""
    made = editor.results(calls[:-1])
    refs = (*calls[-1].args, *calls[-1].outs)
    return len({(made[ref] if ref in made else editor.metas[ref.name]).shape for ref in refs}) == 1
