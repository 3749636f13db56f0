"""Checks for operator variants from outside the package: is a step that takes them plain PyTorch's?"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

from torch import nn

from .capture.captured import Captured
from .capture.example_inputs import Example, device_of, input_specs
from .capture.lower.step import capture
from .capture.precision import autocast_name, weights_layout
from .errors import UsageError
from .ir.mode import WORDS
from .ir.program import Task
from .ir.schedule import Schedule
from .ir.schedule_file import ScheduleRecord
from .plan.random_schedules import random_schedule
from .replay.verify.comparison import Verdict
from .replay.verify.steps import everything_after_a_step, judged
from .replay.wrapper import ScheduleWrapper
from .variants.constraints import bitwise_where_compared, obeying_marks, reading_once
from .variants.editor import Editor, Offer
from .variants.plugins import in_order, temporarily

#: Mode words whose variants are equal to the bit, so that a difference is the checked variant's.
EXACT_WORDS = frozenset(WORDS) - {"conv"}


@dataclass(frozen=True)
class VariantCheck:
    """How steps that take a variant compare with plain PyTorch's.

    Attributes:
        judgement: ``exact``: all tensors are equal to the bit; ``rounding``: some differ by no more than what rounding
            does to plain PyTorch; ``wrong``: some differ by more.
        verdicts: for every output, gradient and buffer the worst of all steps.
        taken: for every variant that was offered, the number of schedules that took it.
    """

    judgement: Literal["exact", "rounding", "wrong"]
    verdicts: tuple[Verdict, ...]
    taken: dict[str, int]

    def __repr__(self) -> str:
        worst = max(self.verdicts, key=lambda verdict: (not verdict.right, verdict.error))
        never = [name for name, count in self.taken.items() if not count]
        rest = f"; never taken: {', '.join(never)}" if never else ""
        if self.judgement == "exact":
            return f"exact{rest}"
        if self.judgement == "rounding":
            return f"equal to rounding (largest {worst.error:.2g}, {worst.name}){rest}"
        return f"wrong: {worst.name} {worst.reason}{rest}"


def check_variant(
    offer: Offer | str,
    model: nn.Module,
    x: Any,
    *,
    kwargs: dict[str, Any] | None = None,
    before: str = "in_place",
    schedules: int = 6,
) -> VariantCheck:
    """Run training steps of a model by random schedules that take a variant, and compare them with plain PyTorch's.

    A step's loss is the mean of the squares of all outputs. Outputs, the gradients of parameters and inputs, and
    buffers are compared tensor by tensor. The schedules also run operators again and take the package's own variants
    that are exact to the bit.

    Args:
        offer: the function that adds the variant, as for `monet_like.register_variant`, registered or not; or the name
            of a registered variant.
        model: it is copied. Parts with the operators that the variant is for must be in it.
        x: the input, or a tuple of the positional arguments; ``kwargs`` are the others.
        before: its place in the order, if it is not registered.
        schedules: number of random schedules, each of which takes the variant.

    Raises:
        UsageError: it adds nothing to this model's program.
    """
    example: Example = (x if isinstance(x, tuple) else (x,), kwargs or {})
    with temporarily(offer, before) as name:
        captured, added = _with_variant(capture(model, *example), name)
    if not added:
        raise UsageError(
            f"variant {name} adds nothing to the program of {type(model).__name__}: give a model, in train mode, with "
            "the operators that it is for"
        )
    plain = everything_after_a_step(copy.deepcopy(model), example)
    worst: dict[str, Verdict] = {}
    taken = dict.fromkeys(sorted(added), 0)
    for schedule in _schedules(captured, added, schedules):
        for variant in added & _variants(captured, schedule):
            taken[variant] += 1
        wrapped = ScheduleWrapper(
            copy.deepcopy(model), _record(captured, schedule, model, example), example=example, captured=captured
        )
        for verdict in judged(model, example, plain, everything_after_a_step(wrapped, example)):
            former = worst.setdefault(verdict.name, verdict)
            worst[verdict.name] = max(former, verdict, key=lambda v: (not v.right, v.error))
    verdicts = tuple(worst.values())
    wrong = any(not verdict.right for verdict in verdicts)
    exact = all(verdict.error == 0.0 for verdict in verdicts)
    return VariantCheck("wrong" if wrong else "exact" if exact else "rounding", verdicts, taken)


def _with_variant(raw: Captured, name: str) -> tuple[Captured, frozenset[str]]:
    """The program with the variant and those that are exact to the bit, and the names of what the variant adds."""
    offers = in_order()
    own_words = frozenset({word} if (word := getattr(offers[name], "word", "")) else ())
    editor, added = Editor(raw, EXACT_WORDS | own_words), frozenset[str]()
    for each, offer in offers.items():
        former = {task.variant for task in editor.every_task()}
        offer(editor)
        if each == name:
            added = frozenset({task.variant for task in editor.every_task()} - former)
    full = editor.finish()

    def admitted(task: Task) -> bool:
        return not task.word or task.word in EXACT_WORDS or task.variant in added

    tasks = tuple(task for task in full.program.tasks if admitted(task))
    slots = tuple(tuple(way for way in slot if admitted(way)) for slot in full.program.slots)
    once = reading_once(replace(full, program=replace(full.program, tasks=tasks, slots=slots)))
    return obeying_marks(replace(once, program=bitwise_where_compared(once.program))), added


def _schedules(captured: Captured, added: frozenset[str], count: int) -> Iterator[Schedule]:
    """Random schedules that take something of what was added."""
    drawn = (random_schedule(captured.program, seed, drop=0.5, others=0.8) for seed in range(20 * count))
    return islice((schedule for schedule in drawn if added & _variants(captured, schedule)), count)


def _variants(captured: Captured, schedule: Schedule) -> set[str]:
    """The names of the variants that a schedule takes."""
    program = captured.program
    runs = {program.tasks[p].variant for tasks in (schedule.forward, *schedule.again) for p in tasks}
    return runs | {slot[way].variant for slot, way in zip(program.slots, schedule.ways, strict=True)}


def _record(captured: Captured, schedule: Schedule, model: nn.Module, example: Example) -> ScheduleRecord:
    """A record that promises nothing, as a wrapper takes it."""
    inputs = input_specs(*example)
    device = device_of(model, example)
    return ScheduleRecord(
        schedule, type(model).__name__, inputs, "normal", 1, captured.program.fingerprint, device.type, {}, 0, 0.0, 0,
        0.0,
        "none", "made", autocast=autocast_name(device), layout=weights_layout(model),
    )  # fmt: skip
