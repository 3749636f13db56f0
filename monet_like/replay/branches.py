"""Branches: what a step's Python code decides by values of tensors, see `monet_like.capture.trace.answers`.

A step asks its questions again in every call. Where an answer is another one, everything that the call has changed so
far is undone, and the call begins anew with the step of the other branch; likewise with the plain model where side
effects cannot be set again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.utils._pytree as pytree

from ..capture.captured import Captured
from ..capture.guards.effects import NotRepeated
from ..capture.guards.objects import default_generators
from ..capture.trace.answers import Answer
from ..capture.trace.undone import Contents, written_places
from ..errors import UsageError
from ..ir.program import Ref, Task
from ..runtime.operators import schema_of
from ..runtime.questions import OtherAnswer

#: So many captures for other answers are made in any case: after them only while most calls need none, and for other
#: sizes while nine in ten do not.
FEW_BRANCHES = 8


def written_values(tasks: Sequence[Task]) -> set[int | str]:
    """The values, and temporaries of tasks, that tasks write into in place."""
    found: set[int | str] = set()
    for call in (call for task in tasks for call in task.calls):
        schema, named = schema_of(call.op), dict(call.kwargs)
        further = schema.arguments[len(call.args) :] if schema is not None else ()
        given = [*call.args, *(named.get(argument.name) for argument in further)]
        for place in written_places(call.op, schema):
            found.update(leaf.name for leaf in pytree.tree_leaves(given[place : place + 1]) if isinstance(leaf, Ref))
    return found


def written_residents(tasks: Sequence[Task], residents: Sequence[int]) -> tuple[int, ...]:
    """Positions of the parameters, buffers and inputs that tasks write into."""
    found = written_values(tasks)
    return tuple(position for position, value in enumerate(residents) if value in found)


@contextmanager
def undone_if_ended(captured: Captured, written: Sequence[torch.Tensor]) -> Iterator[None]:
    """Restore ``written`` and PyTorch's generators if a question has another answer than at the capture, or if side
    effects cannot be set again."""
    contents = Contents()
    for generator in default_generators(captured.device):
        contents.keep_generator(generator)
    for tensor in written:
        contents.keep(tensor)
    try:
        yield
    except (OtherAnswer, NotRepeated):
        contents.restore()
        raise


def known_answers(captured: Captured, other: OtherAnswer) -> tuple[Answer, ...]:
    """The answers of a call that has left the branch of ``captured``, as far as they are known."""
    asked = captured.answers[other.number]
    return (*captured.answers[: other.number], replace(asked, shown=repr(other.value), value=other.value))


@dataclass
class Branches:
    """How often calls of one form took a branch that was not captured.

    Attributes:
        calls: that asked for values.
        captures: that were made because an answer was another.
    """

    calls: int = 0
    captures: int = 0

    def check(self, known: Sequence[Answer]) -> None:
        """Whether another branch may be captured, with these first answers.

        Raises:
            UsageError: too many were.
        """
        last = known[-1]
        if self.captures < max(FEW_BRANCHES, self.calls // (10 if last.is_size else 2)):
            return
        asks, instead = (
            "asks for values of tensors, whose answers",
            "compute with tensors instead of numbers, for example with torch.where",
        )
        if last.is_size:
            asks = "makes tensors whose sizes depend on values and"
            instead = (
                "give weights of 0 to what is left out instead of selecting (torch.where, reduction='none'), select "
                "outside the model, or plan the parts that do not select: auto_schedule(model, blocks=[...])"
            )
        raise UsageError(
            f"its Python code {asks} were new in {self.captures + 1} of {self.calls} calls ({last} was {last.shown}), "
            f"and each needs a program of its own; {instead}"
        )
