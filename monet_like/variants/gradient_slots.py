"""The backward's slots by the gradients that they read and write, for following a gradient from slot to slot."""

from __future__ import annotations

from collections.abc import Iterable

from ..ir.program import Ref
from .editor import Editor, root_of

CAST = "aten._to_copy.default"
MUL = "aten.mul.Tensor"


class GradientSlots:
    """The slots of a program, looked up by the values that they read and write.

    Attributes:
        ways: the first way of every slot.
        kept: values that outlive the backward: gradients and tangents of the program.
        readers, writers: of every value the slots that read it, and the slot that writes it.
    """

    def __init__(self, editor: Editor) -> None:
        program = editor.captured.program
        self.ways = [ways[0] for ways in editor.slots]
        self.kept = {*program.gradients, *program.tangents}
        self.readers: dict[int, list[int]] = {}
        self.writers = {value: slot for slot, way in enumerate(self.ways) for value in way.writes}
        for slot, way in enumerate(self.ways):
            for value in way.reads:
                self.readers.setdefault(value, []).append(slot)

    def operands(self, slot: int) -> list[int | None]:
        """The values of which the arguments of a slot's last call are views; None for literals."""
        way = self.ways[slot]
        return [root_of(way.calls, arg) for arg in way.calls[-1].args]

    def other(self, slot: int, value: int) -> Ref | None:
        """The other operand of a slot that adds something to ``value``."""
        call = self.ways[slot].calls[-1]
        roots = zip(call.args, self.operands(slot), strict=True)
        others = [arg for arg, root in roots if root is not None and root != value]
        return others[0] if len(others) == 1 and len(call.args) == 2 and not call.kwargs else None

    def made(self, slot: int) -> int:
        """The value that a slot of one result writes."""
        return self.ways[slot].writes[0]

    def maker(self, value: int, op: str) -> int | None:
        """The slot that writes ``value``, if it ends in ``op``."""
        slot = self.writers.get(value)
        return slot if slot is not None and self._ends_in(slot, op) else None

    def next(self, value: int, *ops: str) -> int | None:
        """The only slot that reads ``value``, if it ends in one of ``ops``."""
        found = self.readers.get(value, [])
        return found[0] if len(found) == 1 and value not in self.kept and self._ends_in(found[0], *ops) else None

    def after(self, slot: int | None, *ops: str) -> int | None:
        """The only slot that reads the result of ``slot``, if it ends in one of ``ops``."""
        return None if slot is None else self.next(self.made(slot), *ops)

    def before(self, slot: int | None, op: str) -> int | None:
        """The slot, ending in ``op``, that writes the only gradient which ``slot`` reads, if no other slot reads it."""
        grads = [] if slot is None else [v for v in self.ways[slot].reads if v in self.writers]
        alone = len(grads) == 1 and self.readers[grads[0]] == [slot]
        return self.maker(grads[0], op) if alone else None

    def product(self, one: int, others: Iterable[int]) -> int | None:
        """The only slot that multiplies ``one`` by one of ``others``."""
        pairs = [{one, other} for other in others]
        readers = self.readers.get(one, ())
        found = [slot for slot in readers if self._ends_in(slot, MUL) and set(self.operands(slot)) in pairs]
        return found[0] if len(found) == 1 else None

    def uncast(self, value: int, chain: list[int]) -> int:
        """The value from which casts make ``value``; casts that only slots of ``chain`` read are added to ``chain``."""
        while (slot := self.maker(value, CAST)) is not None and set(self.readers[value]) <= set(chain):
            chain.append(slot)
            (value,) = self.ways[slot].reads
        return value

    def _ends_in(self, slot: int, *ops: str) -> bool:
        return self.ways[slot].calls[-1].op in ops and len(self.ways[slot].writes) == 1
