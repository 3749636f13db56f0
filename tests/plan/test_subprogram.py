"""Programs with tasks and ways left out: schedules translate to the whole program and back."""

from __future__ import annotations

import random
from dataclasses import replace

from random_programs import random_program

from monet_like.ir.simulate import simulate
from monet_like.plan import store_all
from monet_like.plan.random_schedules import random_schedule
from monet_like.plan.subprogram import Subprogram, has_overlap, plain_operators, without_overlap, without_refused


def test_schedules_translate_to_the_whole_program_and_back_at_the_same_cost() -> None:
    smaller = 0
    for seed in range(60):
        program, costs = random_program(random.Random(seed), 6)
        part = plain_operators(program)
        smaller += len(part.tasks) < len(program.tasks)
        schedule = random_schedule(part.program, seed)
        whole = part.whole(schedule)
        assert part.part(whole) == schedule, seed
        assert simulate(program, whole, costs) == simulate(part.program, schedule, costs), seed
    assert smaller > 20


def test_ways_are_translated_by_their_place_in_the_slot() -> None:
    program, _ = next(
        found for found in (random_program(random.Random(seed), 4) for seed in range(99)) if len(found[0].slots[0]) > 1
    )
    last = len(program.slots[0]) - 1
    part = Subprogram.of(program, range(len(program.tasks)), [[last], *([0] for _ in program.slots[1:])])
    schedule = replace(store_all(program), ways=tuple(0 for _ in program.slots))
    assert part.whole(schedule).ways == (last, *(0 for _ in program.slots[1:]))
    assert part.program.slots[0] == (program.slots[0][last],)


def test_programs_without_copies_or_refused_tasks_are_whole() -> None:
    program, costs = random_program(random.Random(0), 4)
    assert without_refused(program, costs) is None
    assert not has_overlap(program)
    assert without_overlap(program).program == program
